"""The estimators that are compared: functions of a query, of the items among which it belongs, or of neither.

Each is judged on all three questions, whichever it was made for. The larger its value, the more an input should fit,
be missed, or leave open.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pcmepp_openclip import Gaussian
from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.ambiguity.bank import CALIBRATED_ON, IMAGES, PRIOR, TEXTS, fitted_shift
from pcmepp_openclip.evaluation.failure import confidences

from .features import Photos
from .heads import Heads, split_rows

BANK_SIZES = (250, 1000, 4000)
NEAREST = 50
QUANTILE = 0.995
GALLERY, ALONE = "the gallery", "the input"


class Query(NamedTuple):
    """Inputs of one modality.

    Arguments:
        gaussian: their Gaussians.
        of: "images" or "texts".
        words_N: the numbers of words of texts.
    """

    gaussian: Gaussian
    of: str
    words_N: Tensor | None = None


@dataclass(frozen=True)
class Estimator:
    """One way to answer.

    Arguments:
        name: for the table.
        score: a query and the means of the gallery of the other modality to values, [N], or None where it has none.
        sees: the items that it is told: `GALLERY`, `ALONE` or a bank.
        is_number: whether a value is a number of items of the gallery.
    """

    name: str
    score: Callable[[Query, Tensor], Tensor | None]
    sees: str = ALONE
    is_number: bool = False


def make_bank(heads: Heads, photos: Photos, seed: int, size: int) -> Bank:
    """Return a bank of pairs that the means have not seen."""
    rows = split_rows(photos, seed)[1][:size]
    images, texts = heads.images(photos.views["clean"][rows]), heads.texts(photos.texts[photos.first[rows]])
    return Bank(images.mean, texts.mean, heads.scale.item())


def of_means(heads: Heads, photos: Photos, empty_x: Tensor, seed: int) -> list[Estimator]:
    """Return the estimators that need no variance, the trivial ones first.

    Arguments:
        empty_x: the features of the empty caption, [1, 384].
    """
    bank, scale = make_bank(heads, photos, seed, BANK_SIZES[-1]), heads.scale.item()
    root = {IMAGES: F.normalize(bank.images_BD.mean(dim=0), dim=0), TEXTS: heads.texts(empty_x).mean[0]}
    few = slice(CALIBRATED_ON)
    is_pair = torch.eye(len(bank.images_BD[few]), dtype=torch.bool)
    shift = fitted_shift(scale * bank.images_BD[few] @ bank.texts_BD[few].T, is_pair) + math.log(PRIOR / (1 - PRIOR))

    def by(score: str) -> Callable[[Query, Tensor], Tensor]:
        return lambda query, gallery: -confidences(query.gaussian.mean, gallery, scale)[score]

    def nearest(query: Query, gallery: Tensor) -> Tensor:
        return (query.gaussian.mean @ gallery.T).topk(min(NEAREST, len(gallery)), dim=1).values.mean(dim=1)

    def above(query: Query, gallery: Tensor) -> Tensor:
        cosine_NM = query.gaussian.mean @ gallery.T
        kept = max(1, round((1 - QUANTILE) * cosine_NM.numel()))
        return (cosine_NM >= cosine_NM.flatten().topk(kept).values[-1]).sum(dim=1).float()

    def matches(query: Query, gallery: Tensor) -> Tensor:
        return (scale * query.gaussian.mean @ gallery.T + shift).sigmoid().sum(dim=1)

    def random(query: Query, _: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed + len(query.gaussian.mean))
        return torch.rand(len(query.gaussian.mean), generator=generator)

    estimators = [
        Estimator("a random number", random),
        Estimator("number of words", lambda query, _: None if query.words_N is None else -query.words_N),
        Estimator("closeness to the empty caption, or mean image", lambda q, _: q.gaussian.mean @ root[q.of]),
        Estimator("largest cosine", by("max_cosine"), GALLERY),
        Estimator("largest softmax", by("max_softmax"), GALLERY),
        Estimator("entropy of the softmax", by("entropy"), GALLERY),
        Estimator("hubness", lambda q, _: bank.hubness(q.gaussian.mean, q.of), f"bank of {len(bank):,}"),
        Estimator(f"mean cosine of the {NEAREST} nearest", nearest, GALLERY),
        Estimator(f"count above the {QUANTILE:.1%} quantile", above, GALLERY, is_number=True),
        Estimator("sum of match probabilities", matches, GALLERY, is_number=True),
        Estimator(
            "**`multiplicity`**", lambda q, gallery: bank.multiplicity(q.gaussian.mean, q.of, gallery), GALLERY, True
        ),
        Estimator("`multiplicity`", lambda q, _: bank.multiplicity(q.gaussian.mean, q.of), f"bank of {len(bank):,}"),
        Estimator(
            "`confusion`, order 1",
            lambda q, gallery: bank.confusion(q.gaussian.mean, q.of, gallery, order=1),
            GALLERY,
            is_number=True,
        ),
        Estimator("**`confusion`**", lambda q, gallery: bank.confusion(q.gaussian.mean, q.of, gallery), GALLERY, True),
    ]
    for size in BANK_SIZES:
        own = make_bank(heads, photos, seed, size)
        estimators.append(_alone(own))
    return estimators


def _alone(bank: Bank) -> Estimator:
    return Estimator("`confusion`", lambda q, _: bank.confusion(q.gaussian.mean, q.of), f"bank of {len(bank):,}")


def by_variance(name: str) -> Estimator:
    return Estimator(name, lambda query, _: query.gaussian.uncertainty)
