"""Tests of what an uncertainty predicts: hits, matches, the length of a caption, known facts about an image.

How it must not be read: a correlation over 10 bins is of 10 numbers, and high even where single samples are told apart
badly; AUROC (`failure.py`) and the rejection curve are about samples. An uncertainty has no unit: compare within one
model and one modality.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .metric import Metric

COVERAGES = (0.5, 0.8, 0.9)  # Hits are reported for these shares of samples, the most certain ones.


def bins(uncertainty_N: Tensor, hit_N: Tensor, count: int = 10) -> list[tuple[float, float, int]]:
    """Return (mean uncertainty, share of hits, number of samples) of bins of equal size, from certain to uncertain;
    equally uncertain samples share their hits."""
    ordered = uncertainty_N.sort().values, shared_hits(uncertainty_N, hit_N)
    parts = zip(*(x.tensor_split(count) for x in ordered), strict=True)
    return [(u.mean().item(), hit.mean().item(), len(hit)) for u, hit in parts if len(hit)]


def bin_correlation(uncertainty_N: Tensor, hit_N: Tensor, count: int = 10) -> float:
    """Return Pearson's correlation between the index of an uncertainty bin and its share of hits; nan if undefined."""
    shares = torch.tensor([share for _, share, _ in bins(uncertainty_N, hit_N, count)], dtype=torch.double)
    return pearson(torch.arange(len(shares)), shares)


def pearson(a_N: Tensor, b_N: Tensor) -> float:
    """Return the linear correlation; nan where one of the two is constant, or there are fewer than two values."""
    both = torch.stack([a_N.double(), b_N.double()])
    constant = (both == both[:, :1]).all(dim=1).any()  # One value, or none, is constant too.
    return math.nan if constant else torch.corrcoef(both)[0, 1].item()


def ordered_hits(place_BN: Tensor, hit_BN: Tensor) -> Tensor:
    """Return the hits of each of B sets of N samples from certain to uncertain, [B, N] in double precision. Each of
    several equally uncertain samples counts as their mean, as if their order were drawn.

    Arguments:
        place_BN: the place of each sample among the different uncertainties, from 0; all that matters is the order.
    """
    sets, n = place_BN.shape
    groups = int(place_BN.max()) + 1
    key_N = (place_BN + groups * torch.arange(sets, device=place_BN.device)[:, None]).flatten()
    count = torch.bincount(key_N, minlength=sets * groups)
    share = torch.bincount(key_N, hit_BN.flatten().double(), minlength=sets * groups) / count
    return share.repeat_interleave(count).reshape(sets, n)


def shared_hits(uncertainty_N: Tensor, hit_N: Tensor) -> Tensor:
    """Return `ordered_hits` of one set, [N]."""
    return ordered_hits(uncertainty_N.unique(return_inverse=True)[1][None], hit_N[None])[0]


def rejection(uncertainty_N: Tensor, hit_N: Tensor) -> Tensor:
    """Return the share of hits among the k most certain samples, k = 1..N, [N]; equally uncertain ones share theirs."""
    hit_N = shared_hits(uncertainty_N, hit_N)
    return hit_N.cumsum(0) / torch.arange(1, len(hit_N) + 1, device=hit_N.device)


def reliability(confidence_N: Tensor, hit_N: Tensor, count: int = 10) -> tuple[list[tuple[float, float, int]], float]:
    """Return (mean confidence, share of hits, number of samples) of bins of [0, 1] of equal width, and the expected
    calibration error: the mean over samples of the difference between the two."""
    bin_N = (confidence_N * count).long().clamp(0, count - 1)
    curve, error = [], 0.0
    for i in range(count):
        inside = bin_N == i
        if inside.any():
            confidence, share, n = confidence_N[inside].mean().item(), hit_N[inside].mean().item(), int(inside.sum())
            curve.append((confidence, share, n))
            error += abs(confidence - share) * n / len(hit_N)
    return curve, error


# scipy and scikit-learn were measured for the statistics below and in `failure`: they agree to 1e-7, take 1.1 to 2
# times as long on 100,000 samples and 2 to 24 times on 1,000, and would add 200 MB and a second of import.


def spearman(a_N: Tensor, b_N: Tensor) -> float:
    """Return the rank correlation; equal values share their mean rank. nan where one of the two is constant."""
    return pearson(_mean_ranks(a_N), _mean_ranks(b_N))


def auroc(score_N: Tensor, positive_N: Tensor) -> float:
    """Return how often a positive sample scores higher than another, ties as halves; nan without one of both kinds."""
    positive = positive_N.bool()
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return math.nan
    return (_mean_ranks(score_N)[positive].sum().item() - p * (p - 1) / 2) / (p * n)


def _mean_ranks(x_N: Tensor) -> Tensor:
    """Return ranks from 0, in double precision; equal values share their mean rank."""
    _, place, count = x_N.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0) - 1
    return (last - (count - 1) / 2).double()[place]


def against_hits(uncertainty_N: Tensor, hit_N: Tensor) -> Iterator[Metric]:
    """Yield the correlation with the hits over 10 bins (-1: the uncertain ones fail), and the share of hits when only
    the most certain samples are kept."""
    yield Metric("bin_correlation", bin_correlation(uncertainty_N, hit_N))
    curve = rejection(uncertainty_N, hit_N)
    for coverage in COVERAGES:
        value = curve[max(1, round(coverage * len(curve))) - 1].item()
        yield Metric(f"hits_at_{coverage:.0%}_coverage", value)
    yield Metric("hits_of_all", curve[-1].item())


def against_facts(uncertainty_N: Tensor, facts: Sequence[dict[str, Any]]) -> Iterator[Metric]:
    """Yield, for every fact that sorts the samples into 2 to 10 groups, each group's mean uncertainty and the AUROC of
    its uncertainty against the others'. The group of a metric reads like "condition=blurred"."""
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [fact.get(name) for fact in facts]
        kinds = sorted({value for value in values if isinstance(value, str)})
        if not (2 <= len(kinds) <= min(10, len(values) - 1) and all(isinstance(value, str) for value in values)):
            continue
        for kind in kinds:
            inside, group = torch.tensor([value == kind for value in values]), f"{name}={kind}"
            yield Metric("mean", uncertainty_N[inside].mean().item(), group=group)
            yield Metric("AUROC", auroc(uncertainty_N, inside), group=group)


def of_captions(
    uncertainty_N: Tensor, captions: Sequence[str], matches_per_caption: Sequence[int] | None
) -> Iterator[Metric]:
    """Yield the rank correlation of a caption's uncertainty with its length in words, and with the number of images
    that it truly fits where that is known. A caption that occurs several times counts once."""
    first = list({caption: i for i, caption in reversed(list(enumerate(captions)))}.values())
    words = torch.tensor([len(captions[i].split()) for i in first])
    yield Metric("spearman_caption_length", spearman(uncertainty_N[first], words))
    if matches_per_caption is not None:
        matches = torch.tensor([matches_per_caption[i] for i in first])
        yield Metric("spearman_matches", spearman(uncertainty_N[first], matches))
