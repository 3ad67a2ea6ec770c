"""COCO captions by the metrics that papers report: 1K and 5K, CrissCrossed Captions (CxC), and ECCV Caption.

The matches of CxC and ECCV Caption come with the `eccv_caption` package, by COCO's ids of images and captions;
it computes them and 5K from the nearest items. 1K is the mean of five folds of 1,000 images, as it has them. RSUM is
the sum of the six R@k in per cent; the one of the paper's tables is of 1K.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distances import Distance, by_name, get_distance
from ..gaussian import Gaussian
from .metric import Metric
from .retrieval import KS, invert, match_ranks, nearest

MAX_MATCHES = 50  # ECCV Caption has up to 48 captions per image


@functools.cache
def load_eccv_caption() -> Any:
    """Return the metrics of the `eccv_caption` package with its annotations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns where ujson is missing.
        import eccv_caption
    return eccv_caption.Metrics()


def check_ids(package: Any, image_ids: Sequence[int], caption_ids: Sequence[int]) -> None:
    """Raise a ValueError unless these include all images and captions that the package has matches for."""
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
    distances: Iterable[str] | Mapping[str, Distance] | None = None,
    package: Any = None,
) -> Iterator[Metric]:
    """Yield metrics by the package's names, such as "coco_5k_r1_i2t" and "eccv_map_at_r_t2i", and those of 1K, such as
    "coco_1k_r1_i2t", with "coco_1k_rsum" and "coco_5k_rsum"."""
    package = package or load_eccv_caption()
    check_ids(package, image_ids, caption_ids)
    for label, distance in by_name(distances).items():
        i2t = _by_ids(images, texts, image_ids, caption_ids, distance)
        t2i = _by_ids(texts, images, caption_ids, image_ids, distance.transposed)
        wanted = ("coco_5k_recalls", "cxc_recalls", "eccv_r1", "eccv_map_at_r", "eccv_rprecision")
        values_by_name = {
            f"{name}_{direction}": float(value)
            for name, values in package.compute_all_metrics(i2t, t2i, target_metrics=wanted, Ks=KS).items()
            for direction, value in values.items()
        }
        folds = _folds(package, caption_ids)
        for direction, _, rank_n in ranks_by_fold(images, texts, image_of_text, folds, distance):
            for name, k in ((f"coco_1k_r{k}_{direction}", k) for k in KS):
                share = (rank_n < k).double().mean().item() / len(folds)
                values_by_name[name] = values_by_name.get(name, 0.0) + share
        for size in ("1k", "5k"):
            recall = [values_by_name[f"coco_{size}_r{k}_{direction}"] for k in KS for direction in ("i2t", "t2i")]
            values_by_name[f"coco_{size}_rsum"] = 100 * sum(recall)
        yield from (Metric(name, value, label) for name, value in values_by_name.items())


def first_hits_1k(
    images: Gaussian,
    texts: Gaussian,
    caption_ids: Sequence[int],
    image_of_text: Sequence[int],
    distance: str | Distance,
    package: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return whether each image, and each caption, finds a partner first within the 1,000 images of its fold, [N] and
    [M] of 0 and 1. The paper compares the uncertainty with this, by CSD."""
    hit = {"i2t": torch.zeros(len(images.mean)), "t2i": torch.zeros(len(texts.mean))}
    folds = _folds(package or load_eccv_caption(), caption_ids)
    for direction, indices, rank_n in ranks_by_fold(images, texts, image_of_text, folds, distance):
        hit[direction][indices] = (rank_n < 1).float()
    return hit["i2t"], hit["t2i"]


def ranks_by_fold(
    images: Gaussian,
    texts: Gaussian,
    image_of_text: Sequence[int],
    folds: Sequence[Sequence[int]],
    distance: str | Distance,
) -> Iterator[tuple[str, list[int], Tensor]]:
    """Yield (direction, indices of the queries, rank of the first right item of each) for both directions of a fold.

    Arguments:
        folds: the captions of each, as indices; the images are theirs.
    """
    for fold in folds:
        own = sorted({image_of_text[i] for i in fold})
        place = {image: i for i, image in enumerate(own)}
        pairs = [[place[image_of_text[i]]] for i in fold]
        fold_images, fold_texts = images.select(own), texts.select(fold)
        yield "i2t", own, match_ranks(fold_images, fold_texts, invert(pairs, len(own)), distance)
        yield "t2i", list(fold), match_ranks(fold_texts, fold_images, pairs, get_distance(distance).transposed)


def _folds(package: Any, caption_ids: Sequence[int]) -> list[list[int]]:
    index = {caption: i for i, caption in enumerate(caption_ids)}
    size = len(package.coco_ids) // 5
    return [[index[int(i)] for i in package.coco_ids[k * size : (k + 1) * size]] for k in range(5)]


def _by_ids(
    query: Gaussian, gallery: Gaussian, query_ids: Sequence[int], gallery_ids: Sequence[int], distance: Distance
) -> dict[int, list[int]]:
    ids = torch.as_tensor(gallery_ids)
    rows = (row for top in nearest(query, gallery, distance, MAX_MATCHES) for row in ids[top].tolist())
    return dict(zip(query_ids, rows, strict=True))
