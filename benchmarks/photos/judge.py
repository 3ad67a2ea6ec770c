"""What an estimator of uncertainty is worth on a test split: numbers with intervals over photographs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pcmepp_openclip import DISTANCES, Gaussian
from pcmepp_openclip.ambiguity import Bank, HubnessCorrected, calibration
from pcmepp_openclip.distances import Distance
from pcmepp_openclip.evaluation.uncertainty import auroc, bin_correlation

from .estimators import Estimator, oracle
from .features import DEGRADED, Photos
from .heads import Heads

RESAMPLES = 50
COLUMNS = ("bins_i2t", "bins_t2i", "miss_i2t", "miss_t2i", *DEGRADED, "cut")


@dataclass
class Encoded:
    """A test split through a model: Gaussians of the images by view, of the captions, and of the cut captions."""

    views: dict[str, Gaussian]
    texts: Gaussian
    cut: Gaussian
    image_of_text: Tensor
    scale: float

    @property
    def images(self) -> Gaussian:
        return self.views["clean"]


@torch.inference_mode()
def encode(heads: Heads, photos: Photos) -> Encoded:
    views = {name: heads.images(x) for name, x in photos.views.items()}
    return Encoded(views, heads.texts(photos.texts), heads.texts(photos.cut), photos.image_of_text, heads.scale.item())


def first_hits(data: Encoded, distance: Distance) -> tuple[Tensor, Tensor]:
    """Whether each image and each caption finds its own first, [N] and [M] of 0 and 1."""
    by_image = distance.matrix(data.images, data.texts).argmin(dim=1)
    by_text = distance.transposed.matrix(data.texts, data.images).argmin(dim=1)
    own_image = data.image_of_text[by_image] == torch.arange(len(by_image))
    return own_image.float(), (by_text == data.image_of_text).float()


def retrieval(data: Encoded, bank: Bank | None) -> dict[str, float]:
    """R@1 by the cosine, by CSD, and by the cosine corrected by a bank, image to text and text to image."""
    distances = {"mean": DISTANCES["cosine"], "csd": DISTANCES["csd"]}
    if bank is not None:
        distances["bank"] = HubnessCorrected(bank)
    found = {}
    for name, distance in distances.items():
        for direction, hit in zip(("i2t", "t2i"), first_hits(data, distance), strict=True):
            found[f"{name}_{direction}"] = hit.mean().item()
    return found


Numbers = dict[str, Callable[[Tensor], float]]  # a function of the drawn images, by the name of the number


@torch.inference_mode()
def judge(data: Encoded, estimator: Estimator | None, resamples: int = RESAMPLES) -> dict[str, list[float]]:
    """[value, resampled values...] by column of the table. Without an estimator, the oracle's."""
    texts_mean, images_mean = data.texts.mean, data.images.mean
    if estimator is None:

        def of_images(query: Gaussian) -> Tensor:
            return oracle(data.scale * query.mean @ texts_mean.T, data.image_of_text, "images")

        def of_texts(query: Gaussian) -> Tensor:
            return oracle(data.scale * query.mean @ images_mean.T, data.image_of_text, "texts")

    else:
        chosen = estimator

        def of_images(query: Gaussian) -> Tensor:
            return chosen.images(query, texts_mean)

        def of_texts(query: Gaussian) -> Tensor:
            return chosen.texts(query, images_mean)

    u_images, u_texts, u_cut = of_images(data.images), of_texts(data.texts), of_texts(data.cut)
    hit_images, hit_texts = first_hits(data, DISTANCES["cosine"])
    numbers = dict(_of_hits(u_images, hit_images, "i2t")) | dict(_of_hits(u_texts, hit_texts, "t2i"))
    for view in DEGRADED:
        numbers[view] = _against(u_images, of_images(data.views[view]))
    numbers["cut"] = _against(u_texts, u_cut)
    by_image = [(data.image_of_text == i).nonzero()[:, 0] for i in range(len(u_images))]
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in numbers}
    for number in range(resamples + 1):
        rows = torch.arange(len(u_images))
        if number:
            rows = torch.randint(len(rows), (len(rows),), generator=generator)
        texts = torch.cat([by_image[i] for i in rows.tolist()])
        for name, compute in numbers.items():
            found[name].append(compute(texts if name in ("bins_t2i", "miss_t2i", "cut") else rows))
    return found


def _of_hits(u_N: Tensor, hit_N: Tensor, direction: str) -> Iterator[tuple[str, Callable[[Tensor], float]]]:
    yield f"bins_{direction}", lambda rows: bin_correlation(u_N[rows], hit_N[rows])
    yield f"miss_{direction}", lambda rows: auroc(-u_N[rows], hit_N[rows])


def _against(u_N: Tensor, degraded_N: Tensor) -> Callable[[Tensor], float]:
    """AUROC of what shows or says less against the whole."""
    return lambda rows: auroc(
        torch.cat([u_N[rows], degraded_N[rows]]), torch.cat([torch.zeros(len(rows)), torch.ones(len(rows))])
    )


@torch.inference_mode()
def pair_errors(known: Encoded, other: Encoded, bank: Bank) -> dict[str, float]:
    """Expected calibration error of the probability of a pair at a prior of 1/2: fitted to one split, measured on
    another. `cosine` has a scale and a shift, `bank` the hubness of both sides in addition."""

    def parts(data: Encoded, with_bank: bool) -> tuple[Tensor, Tensor, Tensor]:
        logit_NM = data.scale * data.images.mean @ data.texts.mean.T
        if not with_bank:
            return logit_NM, torch.zeros(len(logit_NM)), torch.zeros(logit_NM.shape[1])
        return logit_NM, bank.hubness(data.images.mean, "images"), bank.hubness(data.texts.mean, "texts")

    found = {}
    for name in ("cosine", "bank"):
        fitted = calibration.fit(*parts(known, name == "bank"), known.image_of_text)
        probability = fitted.probability(*parts(other, name == "bank"))
        truth = torch.arange(len(probability))[:, None] == other.image_of_text
        found[name] = calibration.reliability(probability, truth)[1]
        found[f"{name}_auroc"] = auroc(probability.flatten(), truth.flatten())
    return found
