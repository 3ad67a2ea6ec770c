"""Scores of images and texts, corrected by a bank or by the variances of the model."""

from torch import Tensor

from ..distances import CSD, Cosine, Entailment
from ..gaussian import Gaussian
from . import Bank, BankEntailment, HubnessCorrected
from .bank import IMAGES, TEXTS
from .calibration import pair_offsets

SCORES = ("cosine", "csd", "entailment")


def similarity(images: Gaussian, texts: Gaussian, score: str, bank: Bank | None, entailment: Entailment) -> Tensor:
    """Return the cosine of the means with the correction of the score, [N, M]; larger is closer.

        cosine        cos
        csd           cos - (u_v + u_t) / 2          with a bank: cos - (h_v + h_t) / (2 s)
        entailment    cos + weight u_t               with a bank: cos - (h_t - log share_t) / s

    u is the uncertainty and h the hubness. One matrix serves both directions: along a row only what belongs to the
    texts matters, along a column only what belongs to the images.

    Arguments:
        bank: None to take the variances.
        entailment: the score of the model's scales, for the variances.
    """
    if score == "cosine":
        return 1 - Cosine().matrix(images, texts)
    if bank is None:
        return 1 - CSD().matrix(images, texts) / 2 if score == "csd" else 1 - entailment.matrix(images, texts)
    if score == "entailment":
        return 1 - BankEntailment(bank).matrix(images, texts)
    image_N = HubnessCorrected(bank, TEXTS).factors(texts, images).column_M
    assert image_N is not None
    return 1 - HubnessCorrected(bank, IMAGES).matrix(images, texts) - image_N[:, None]


def calibration_inputs(
    images: Gaussian, texts: Gaussian, scale: float, bank: Bank | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of a `Calibration`: s cos [N, M], and the offsets of the images [N] and of the texts [M]."""
    return scale * (1 - Cosine().matrix(images, texts)), *pair_offsets(images, texts, scale, bank)
