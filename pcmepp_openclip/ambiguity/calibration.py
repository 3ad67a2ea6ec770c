"""The probability that one image and one caption are a pair, for that pair alone.

    logit p = scale * s cos - image_weight * x_v - text_weight * x_t + shift + logit(prior)

x is an offset per sample: its hubness in a bank, or its uncertainty times s / 2 for a model with variances. Four
scalars are fitted by logistic regression to held-out pairs, every image with every caption, where pairs and non-pairs
have the same total weight; so `prior` is the share of true pairs among those that one asks about.

How it must not be read: a pair is what was written for the image. A caption that happens to be true of another image
counts as a non-pair, in fitting as in measuring. It holds for data like those that it was fitted to: on photographs of
another collection, the shift alone was better than the offsets of a bank.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distances import Cosine
from ..gaussian import Gaussian
from .bank import IMAGES, TEXTS, Bank, fitted_shift

ESTIMATORS = ("bank", "variance")
SHIFT = "shift"  # the estimator of a calibration that has no offsets
STEPS, RIDGE = 50, 1e-6
LARGEST = 1e9  # bound of a calibration's numbers


@dataclass(frozen=True)
class Calibration:
    """The fitted scalars of the formula in the file's docstring.

    Arguments:
        estimator: where the offsets come from, "bank" or "variance"; "shift" where there are none.
        scale, image_weight, text_weight, shift: the scalars.
        pairs: how many held-out pairs they were fitted to.
        error: the expected calibration error at a prior of 1/2 on the half of the pairs that was not fitted to.
        source: the model, and the bank where the offsets come from one, that the scalars hold for, see
            `store.source_of`; empty before they are saved.
    """

    estimator: str
    scale: float
    image_weight: float
    text_weight: float
    shift: float
    pairs: int
    error: float
    source: str = ""

    def __post_init__(self) -> None:
        if self.estimator not in (*ESTIMATORS, SHIFT):
            raise ValueError(f"A calibration's estimator must be one of {', '.join((*ESTIMATORS, SHIFT))}.")
        if not isinstance(self.source, str):
            raise ValueError("A calibration's source must be a fingerprint.")
        numbers = [self.scale, self.image_weight, self.text_weight, self.shift, self.pairs, self.error]
        if any(isinstance(x, bool) or not isinstance(x, (int, float)) or not abs(x) <= LARGEST for x in numbers):
            raise ValueError(f"A calibration's numbers must be finite, and at most {LARGEST:g}.")

    def logits(self, logit_NM: Tensor, image_N: Tensor, text_M: Tensor, prior: float = 0.5) -> Tensor:
        """Return the log-odds that image i and caption j are a pair, [N, M].

        Arguments:
            logit_NM: s cos.
            image_N, text_M: the offsets of the images and of the captions.
            prior: the share of true pairs among those that are asked about, between 0 and 1.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior must be strictly between 0 and 1, not {prior}.")
        offset_NM = self.image_weight * image_N[:, None] + self.text_weight * text_M
        return self.scale * logit_NM - offset_NM + self.shift + math.log(prior / (1 - prior))

    def probability(self, logit_NM: Tensor, image_N: Tensor, text_M: Tensor, prior: float = 0.5) -> Tensor:
        return self.logits(logit_NM, image_N, text_M, prior).sigmoid()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, block: Any) -> "Calibration":
        """Build a calibration from JSON; ValueError for anything that `as_json` does not give."""
        if not isinstance(block, dict) or set(block) != set(cls.__dataclass_fields__):
            raise ValueError(f"A calibration must have the keys {', '.join(cls.__dataclass_fields__)}.")
        return cls(**block)


def pair_offsets(images: Gaussian, texts: Gaussian, scale: float, bank: Bank | None) -> tuple[Tensor, Tensor]:
    """Return x_v [N] and x_t [M] of the file's docstring, by the bank, or by the variances where there is none.

    Arguments:
        scale: s, by which the model multiplies a cosine.
    """
    if bank is None:
        return images.uncertainty * scale / 2, texts.uncertainty * scale / 2
    return bank.hubness(images.mean, IMAGES), bank.hubness(texts.mean, TEXTS)


def calibration_inputs(
    images: Gaussian, texts: Gaussian, scale: float, bank: Bank | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of a `Calibration`: s cos [N, M], and the offsets of the images [N] and of the texts [M]."""
    return scale * (1 - Cosine().matrix(images, texts)), *pair_offsets(images, texts, scale, bank)


def fit(
    logit_NM: Tensor, image_N: Tensor, text_M: Tensor, image_of_text: Tensor, estimator: str = "bank"
) -> Calibration:
    """Fit a calibration to held-out images and captions by Newton's method; its error is measured by fitting to the
    images of even index and applying that to the others.

    Arguments:
        logit_NM, image_N, text_M: see `Calibration.logits`.
        image_of_text: the image that each caption was written for, [M].
    """
    return _fit_by(_fit, estimator, logit_NM, image_N, text_M, image_of_text)


def fit_shift(logit_NM: Tensor, image_of_text: Tensor) -> Calibration:
    """Fit sigmoid(s cos + shift), which any CLIP has without offsets. The error and the arguments are as in `fit`."""
    offsets = logit_NM.new_zeros(len(logit_NM)), logit_NM.new_zeros(len(image_of_text))

    def shift(logit_NM: Tensor, image_N: Tensor, text_M: Tensor, pair_NM: Tensor) -> tuple[float, float, float, float]:
        return 1.0, 0.0, 0.0, fitted_shift(logit_NM, pair_NM)

    return _fit_by(shift, SHIFT, logit_NM.double(), *offsets, image_of_text)


def _fit_by(
    fit: Callable[..., tuple[float, float, float, float]],
    estimator: str,
    logit_NM: Tensor,
    image_N: Tensor,
    text_M: Tensor,
    image_of_text: Tensor,
) -> Calibration:
    """Fit to all images, and measure the error as `fit` says."""
    pair_NM = torch.arange(len(image_N))[:, None] == image_of_text
    even_N = torch.arange(len(image_N)) % 2 == 0
    if int(even_N.sum()) < 2 or int((~even_N).sum()) < 2 or len(text_M) < 4:
        raise ValueError("A calibration needs at least four images with captions.")
    even_M = even_N[image_of_text]
    weights = fit(logit_NM[even_N][:, even_M], image_N[even_N], text_M[even_M], pair_NM[even_N][:, even_M])
    held_out = logit_NM[~even_N][:, ~even_M], image_N[~even_N], text_M[~even_M]
    probability_NM = Calibration(estimator, *weights, 0, 0.0).probability(*held_out)
    error = reliability(probability_NM, pair_NM[~even_N][:, ~even_M])[1]
    return Calibration(estimator, *fit(logit_NM, image_N, text_M, pair_NM), len(text_M), error)


def reliability(
    probability_NM: Tensor, pair_NM: Tensor, prior: float = 0.5, count: int = 10
) -> tuple[list[tuple[float, float, float]], float]:
    """Return (mean probability, share of pairs, share of the weight) of bins of [0, 1] of equal width, and the expected
    calibration error, where pairs have the total weight `prior` and the others 1 - prior.

    Arguments:
        probability_NM: probabilities at the same prior.
        pair_NM: whether each is a pair, bool.
    """
    p, pair = probability_NM.flatten().double(), pair_NM.flatten()
    weight = torch.where(pair, prior / pair.sum(), (1 - prior) / (~pair).sum()).double()
    bin_ = (p * count).long().clamp(0, count - 1)
    total, mean, share = (
        torch.bincount(bin_, x, minlength=count) for x in (weight, weight * p, weight * pair.double())
    )
    bins = [(m / t, s / t, t) for m, s, t in zip(mean.tolist(), share.tolist(), total.tolist(), strict=True) if t > 0]
    return bins, sum(t * abs(m - s) for m, s, t in bins)


def _fit(logit_NM: Tensor, image_N: Tensor, text_M: Tensor, pair_NM: Tensor) -> tuple[float, float, float, float]:
    """Fit scale, image_weight, text_weight, shift by logistic regression with equal total weights of both classes."""
    shape = logit_NM.shape
    columns = (logit_NM, -image_N[:, None].expand(shape), -text_M.expand(shape))
    x_PF = torch.stack([column.flatten().double() for column in columns], dim=1)
    centre_F, spread_F = x_PF.mean(dim=0), x_PF.std(dim=0).clamp(min=1e-6)
    x_PF = torch.cat([(x_PF - centre_F) / spread_F, torch.ones(len(x_PF), 1, dtype=torch.double)], dim=1)
    y = pair_NM.flatten().double()
    weight = torch.where(pair_NM.flatten(), 0.5 / y.sum(), 0.5 / (1 - y).sum())
    beta_F = torch.zeros(4, dtype=torch.double)
    ridge = RIDGE * torch.eye(4, dtype=torch.double)
    for _ in range(STEPS):  # damped: a step that does not lower the loss is halved
        p = (x_PF @ beta_F).sigmoid()
        gradient = x_PF.T @ (weight * (p - y)) + ridge @ beta_F
        hessian = (x_PF * (weight * p * (1 - p))[:, None]).T @ x_PF + ridge
        step = torch.linalg.solve(hessian, gradient)
        before = _loss(x_PF, y, weight, beta_F)
        while _loss(x_PF, y, weight, beta_F - step) > before and step.abs().max() > 1e-9:
            step = step / 2
        beta_F = beta_F - step
        if step.abs().max() < 1e-9:
            break
    slope_F = beta_F[:3] / spread_F
    scale, image_weight, text_weight = slope_F.tolist()
    return scale, image_weight, text_weight, (beta_F[3] - (slope_F * centre_F).sum()).item()


def _loss(x_PF: Tensor, y: Tensor, weight: Tensor, beta_F: Tensor) -> float:
    logits = x_PF @ beta_F
    return ((weight * (F.softplus(logits) - y * logits)).sum() + RIDGE / 2 * beta_F.square().sum()).item()
