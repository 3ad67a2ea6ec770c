"""Does R@1 fall as uncertainty rises? The queries are sorted by uncertainty and cut into L levels of equal size.

    S     = Spearman's correlation of the level, 1..L, with the share of hits in it; -1 where it falls at every step
    R^2   = the share of the variance of these L numbers that a straight line over the levels explains
    -S R^2, at best 1: the hits fall at every step, and evenly

How it must not be read: these are statistics of 10 or 5 numbers and reach 1 easily, even where single samples are told
apart badly; read the interval, and the AUROC beside it. The interval is over queries: it resamples them one by one,
although the captions of one image are not independent, and says nothing about other datasets or other trainings.

Reference: GroVE and ProbVLM. Their bins leave out samples at the edges or count them several times; these do not.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .metric import Metric
from .uncertainty import ordered_hits

LEVELS = (10, 5)
RESAMPLES = 1000
COVERAGE = 0.95  # The percentile interval has this share of the values.
CHUNK = 200_000  # At most this many resampled queries are held at a time.


def level_hits(ordered_BN: Tensor, levels: int) -> Tensor:
    """Return the share of hits in each level, [B, L]; sizes of levels differ by at most 1, the first are larger."""
    return torch.stack([part.mean(dim=1) for part in ordered_BN.tensor_split(levels, dim=1)], dim=1)


def level_statistics(share_BL: Tensor) -> Tensor:
    """Return S, R^2 and -S R^2 of the file's docstring, [B, 3]; nan where all levels of a set are equal."""
    share_BL = share_BL.double()
    level_L = torch.arange(share_BL.shape[1], dtype=torch.double)
    below_BL = (share_BL[:, :, None] > share_BL[:, None, :]).sum(dim=2)
    equal_BL = (share_BL[:, :, None] == share_BL[:, None, :]).sum(dim=2)
    s_B, r_B = (_correlation(level_L, x_BL) for x_BL in (below_BL + equal_BL / 2, share_BL))
    undefined_B = (share_BL == share_BL[:, :1]).all(dim=1)
    return torch.stack([s_B, r_B**2, -s_B * r_B**2], dim=1).masked_fill(undefined_B[:, None], math.nan)


def _correlation(a_L: Tensor, b_BL: Tensor) -> Tensor:
    """Return Pearson's correlation of `a_L` with each row of `b_BL`, [B]."""
    a_L, b_BL = a_L - a_L.mean(), b_BL - b_BL.mean(dim=1, keepdim=True)
    return (b_BL * a_L).sum(dim=1) / (a_L.norm() * b_BL.norm(dim=1))


def interval(values_B: Tensor, coverage: float = COVERAGE) -> tuple[float, float]:
    """Return the percentile interval of resampled values, without those that are nan; nan where no value is left."""
    known = values_B[~values_B.isnan()].double()
    if len(known) == 0:
        return math.nan, math.nan
    ends = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=torch.double)
    low, high = known.quantile(ends).tolist()
    return low, high


def levels(uncertainty_N: Tensor, hit_N: Tensor, resamples: int = RESAMPLES) -> Iterator[Metric]:
    """Yield `S_10_levels`, `R2_10_levels`, `-SR2_10_levels` and the same of 5 levels, each with its 95 % bootstrap
    interval. A set of fewer samples than levels has none of them (nan).

    Arguments:
        uncertainty_N, hit_N: [N]; hits are 0 or 1.
        resamples: for the interval; 0 for none.
    """
    n, generator = len(hit_N), torch.Generator().manual_seed(0)
    place_N, hit_N = uncertainty_N.unique(return_inverse=True)[1].cpu(), hit_N.cpu()
    counts = [count for count in LEVELS if count <= n]
    drawn: dict[int, list[Tensor]] = {count: [] for count in counts}
    step = max(1, CHUNK // max(1, n))
    for start in range(0, resamples if counts else 0, step):
        chosen_BN = torch.randint(n, (min(step, resamples - start), n), generator=generator)
        ordered_BN = ordered_hits(place_N[chosen_BN], hit_N[chosen_BN])
        for count in counts:
            drawn[count].append(level_statistics(level_hits(ordered_BN, count)))
    for count in LEVELS:
        statistics = [math.nan] * 3
        ends: list[tuple[float | None, float | None]] = [(math.nan, math.nan) if resamples else (None, None)] * 3
        if count in counts:
            statistics = level_statistics(level_hits(ordered_hits(place_N[None], hit_N[None]), count))[0].tolist()
            if resamples:
                ends = [interval(values_B) for values_B in torch.cat(drawn[count]).T]
        for name, value, (low, high) in zip(("S", "R2", "-SR2"), statistics, ends, strict=True):
            yield Metric(f"{name}_{count}_levels", value, low=low, high=high)
