"""COCO captions by the numbers that papers give: 1K and 5K, CrissCrossed Captions (CxC), and ECCV Caption.

The matches of CxC and ECCV Caption come with the `eccv_caption` package, by COCO's own numbers of images and captions;
it computes them and 5K from the nearest items. 1K is the mean of five folds of 1,000 images, as it has them.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..gaussian import Gaussian
from .retrieval import DISTANCES, KS, hits, invert, nearest, recalls

MOST_MATCHES = 50  # ECCV Caption has up to 48 captions an image


def metrics() -> Any:
    """The package's metrics with its annotations; ValueError where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would rather have ujson
            import eccv_caption
    except ImportError:
        raise ValueError("--coco needs the eccv_caption package: pip install 'pcmepp-openclip[coco]'.") from None
    return eccv_caption.Metrics()


def check(package: Any, image_ids: Sequence[int], caption_ids: Sequence[int]) -> None:
    """ValueError where these are not the images and captions that the package has matches for."""
    missing = set(package.coco_gts["i2t"]) - set(image_ids), set(package.coco_gts["t2i"]) - set(caption_ids)
    if any(missing):
        raise ValueError(
            f"--coco lacks {len(missing[0])} images and {len(missing[1])} captions of Karpathy's test split: "
            "CxC and ECCV Caption need all of its 5,000 images."
        )


def coco(
    images: Gaussian,
    texts: Gaussian,
    image_ids: Sequence[int],
    caption_ids: Sequence[int],
    image_of_text: Sequence[int],
    distances: Sequence[str] = DISTANCES,
    package: Any = None,
) -> Iterator[tuple[str, float]]:
    """Yields names like "csd/coco_5k_r1_i2t", "mean/eccv_map_at_r_t2i", as the package calls them."""
    package = package or metrics()
    check(package, image_ids, caption_ids)
    for distance in distances:
        i2t = _by_ids(images, texts, image_ids, caption_ids, distance)
        t2i = _by_ids(texts, images, caption_ids, image_ids, distance)
        wanted = ("coco_5k_recalls", "cxc_recalls", "eccv_r1", "eccv_map_at_r", "eccv_rprecision")
        for name, values in package.compute_all_metrics(i2t, t2i, target_metrics=wanted, Ks=KS).items():
            for direction, value in values.items():
                yield f"{distance}/{name}_{direction}", float(value)
        folds = _folds(package, caption_ids)
        for name, value in coco_1k(images, texts, image_of_text, folds, distance):
            yield f"{distance}/coco_1k_{name}", value


def coco_1k(
    images: Gaussian, texts: Gaussian, image_of_text: Sequence[int], folds: Sequence[Sequence[int]], distance: str
) -> Iterator[tuple[str, float]]:
    """The mean over folds of R@k among the fold's own images and captions; a fold is the numbers of its captions."""
    totals: dict[str, float] = {}
    for fold in folds:
        own = sorted({image_of_text[i] for i in fold})
        place = {image: i for i, image in enumerate(own)}
        pairs = [[place[image_of_text[i]]] for i in fold]
        fold_images, fold_texts = _rows(images, own), _rows(texts, fold)
        both = (("i2t", fold_images, fold_texts, invert(pairs, len(own))), ("t2i", fold_texts, fold_images, pairs))
        for direction, query, gallery, matches in both:
            top = torch.cat(list(nearest(query, gallery, distance, max(KS))))
            for name, value in recalls(hits(top, matches)):
                key = f"{name.lower().replace('@', '')}_{direction}"
                totals[key] = totals.get(key, 0.0) + value / len(folds)
    yield from totals.items()


def _folds(package: Any, caption_ids: Sequence[int]) -> list[list[int]]:
    number = {caption: i for i, caption in enumerate(caption_ids)}
    size = len(package.coco_ids) // 5
    return [[number[int(i)] for i in package.coco_ids[k * size : (k + 1) * size]] for k in range(5)]


def _by_ids(
    query: Gaussian, gallery: Gaussian, query_ids: Sequence[int], gallery_ids: Sequence[int], distance: str
) -> dict[int, list[int]]:
    ids = torch.as_tensor(gallery_ids)
    rows = (row for top in nearest(query, gallery, distance, MOST_MATCHES) for row in ids[top].tolist())
    return dict(zip(query_ids, rows, strict=True))


def _rows(gaussian: Gaussian, rows: Sequence[int]) -> Gaussian:
    return Gaussian(gaussian.mean[list(rows)], gaussian.logvar[list(rows)])
