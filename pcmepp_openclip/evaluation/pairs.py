"""Does the probability that an image and a caption are a pair mean what it says? Reliability over a whole dataset.

    match_ECE = sum over 10 bins of [0, 1] of (weight of the bin) * |mean probability - share of pairs|

All N x M combinations count; those that were written for each other have the total weight 1/2, and so have all others.
Two probabilities are judged: the calibrated one (`ambiguity.calibration`), and, as what a CLIP has without it,

    sigmoid    p = sigmoid(s cos + c)

where c is the shift with the highest likelihood on these very combinations. That favours it: the calibration was fitted
to other data.

How it must not be read: a caption that happens to be true of another image counts as a non-pair, so probabilities of
vague captions look too high. An error of 0 does not say that pairs are told apart: always 1/2 is calibrated, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ambiguity import Bank
from ..ambiguity.calibration import Calibration, pair_offsets
from ..gaussian import Gaussian, full_precision
from .metric import Metric

CHUNK = 10_000_000  # At most this many combinations are held at a time.
PRIOR = 0.5
BINS = 10
SHIFT_BINS = 1 << 16  # The histogram of the cosines, by which c is found, has this many bins.
Curve = list[tuple[float, float, float]]  # Each bin has its mean probability, share of pairs and share of the weight.


def reliabilities(
    calibration: Calibration,
    images: Gaussian,
    texts: Gaussian,
    image_of_text: Sequence[int],
    scale: float,
    bank: Bank | None = None,
    chunk: int = CHUNK,
) -> dict[str, tuple[Curve, float]]:
    """Return the reliability diagram and `match_ECE` of each probability by its name, "calibrated_bank" or
    "calibrated_variance" by the estimator, then "sigmoid"; {} where there is but one image.

    Arguments:
        images, texts: Gaussians with l2-normalised means, [N, D] and [M, D].
        image_of_text: for each text the index of the image that it was written for.
        scale: s, by which the model multiplies a cosine.
        bank: the bank that the calibration was fitted with, where its estimator is "bank".
        chunk: combinations held at a time.
    """
    if len(images.mean) < 2:
        return {}
    combinations = _Combinations(images.mean.float(), texts.mean.float(), torch.as_tensor(image_of_text), scale, chunk)
    by_bank = calibration.estimator == "bank"
    assert bank is not None or not by_bank, "a calibration of a bank needs the bank"
    image_N, text_M = pair_offsets(images, texts, scale, bank if by_bank else None)
    shift = best_shift(combinations)
    return {
        f"calibrated_{calibration.estimator}": reliability(
            combinations, lambda rows, logit_nM: calibration.probability(logit_nM, image_N[rows], text_M, PRIOR)
        ),
        "sigmoid": reliability(combinations, lambda _, logit_nM: (logit_nM + shift).sigmoid()),
    }


@dataclass(frozen=True)
class _Combinations:
    """The scaled cosines, s cos, of all images with all texts, and which of them are pairs, in chunks."""

    image_ND: Tensor
    text_MD: Tensor
    image_of_text: Tensor
    scale: float
    chunk: int

    @property
    def pairs(self) -> int:
        return len(self.text_MD)

    @property
    def others(self) -> int:
        return (len(self.image_ND) - 1) * len(self.text_MD)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (images, s cos [n, M], whether it is a pair [n, M]) of each chunk."""
        n, step = len(self.image_ND), max(1, self.chunk // self.pairs)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            with full_precision(self.image_ND):
                logit_nM = self.scale * self.image_ND[rows] @ self.text_MD.T
            yield rows, logit_nM, torch.arange(rows.start, rows.stop)[:, None] == self.image_of_text


def best_shift(combinations: _Combinations) -> float:
    """Find c of the file's docstring, at which the probabilities have the mean 1/2, by bisection over a fine histogram
    of the cosines, so that the matrix is formed once."""
    s = combinations.scale
    pair_K, all_K = torch.zeros(SHIFT_BINS, dtype=torch.long), torch.zeros(SHIFT_BINS, dtype=torch.long)
    for _, logit_nM, pair_nM in combinations:
        place_nM = ((logit_nM / s + 1) / 2 * SHIFT_BINS).long().clamp_(0, SHIFT_BINS - 1)
        all_K += torch.bincount(place_nM.flatten(), minlength=SHIFT_BINS)
        pair_K += torch.bincount(place_nM[pair_nM], minlength=SHIFT_BINS)
    weight_K = PRIOR * pair_K.double() / combinations.pairs
    weight_K += (1 - PRIOR) * (all_K - pair_K).double() / combinations.others
    logit_K = s * (2 * (torch.arange(SHIFT_BINS, dtype=torch.double) + 0.5) / SHIFT_BINS - 1)
    low, high = -s, s
    for _ in range(60):
        middle = (low + high) / 2
        mean = (weight_K * (logit_K + middle).sigmoid()).sum().item()
        low, high = (middle, high) if mean < PRIOR else (low, middle)
    return (low + high) / 2


def reliability(combinations: _Combinations, probability: Callable[[slice, Tensor], Tensor]) -> tuple[Curve, float]:
    """Compute `ambiguity.calibration.reliability` with a prior of 1/2, in chunks.

    Arguments:
        probability: a function of (images, s cos [n, M]) to [n, M].
    """
    weights = torch.tensor([(1 - PRIOR) / combinations.others, PRIOR / combinations.pairs], dtype=torch.double)
    total, mean, share = torch.zeros(3, BINS, dtype=torch.double)
    for rows, logit_nM, pair_nM in combinations:
        p_nM = probability(rows, logit_nM)
        for pairs in (False, True):
            p = p_nM[pair_nM == pairs]
            bin_ = (p * BINS).long().clamp_(0, BINS - 1)
            weight = weights[int(pairs)] * torch.bincount(bin_, minlength=BINS)
            total += weight
            mean += weights[int(pairs)] * torch.bincount(bin_, p.double(), minlength=BINS)
            share += weight * pairs
    sums = zip(mean.tolist(), share.tolist(), total.tolist(), strict=True)
    curve = [(m / t, s / t, t) for m, s, t in sums if t > 0]
    return curve, math.fsum(t * abs(m - s) for m, s, t in curve)


def pairs(curves: Mapping[str, tuple[Curve, float]]) -> Iterator[Metric]:
    """Yield `match_ECE` of each of `reliabilities`."""
    for score, (_, error) in curves.items():
        yield Metric("match_ECE", error, samples="pairs", score=score)
