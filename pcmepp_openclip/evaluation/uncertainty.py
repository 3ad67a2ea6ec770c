"""What an uncertainty goes with: hits, matches, the length of a caption, known facts about an image.

How it must not be read: a correlation over 10 bins is of 10 numbers, and high even where single samples are told apart
badly; AUROC and the rejection curve are about samples. An uncertainty has no unit: compare within one
model and one modality.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .ranking import bin_correlation

KEPT = (0.5, 0.8, 0.9)


def bins(uncertainty_N: Tensor, hit_N: Tensor, count: int = 10) -> list[tuple[float, float, int]]:
    """(mean uncertainty, share of hits, number) of bins of equal size, from certain to uncertain."""
    order = uncertainty_N.argsort()
    parts = zip(uncertainty_N[order].tensor_split(count), hit_N[order].tensor_split(count), strict=True)
    return [(u.mean().item(), hit.mean().item(), len(hit)) for u, hit in parts if len(hit)]


def rejection(uncertainty_N: Tensor, hit_N: Tensor) -> Tensor:
    """The share of hits among the k most certain samples, for k = 1..N, [N]; equally uncertain ones share theirs."""
    values, place = uncertainty_N.unique(return_inverse=True)
    total = torch.zeros(len(values), dtype=torch.double)
    number = torch.zeros_like(total).index_add_(0, place, torch.ones(len(place), dtype=torch.double))
    share = total.index_add_(0, place, hit_N.double()) / number
    return _running_mean(share[place][uncertainty_N.argsort()])


def _running_mean(x_N: Tensor) -> Tensor:
    return x_N.cumsum(0) / torch.arange(1, len(x_N) + 1)


def reliability(confidence_N: Tensor, hit_N: Tensor, count: int = 10) -> tuple[list[tuple[float, float, int]], float]:
    """(mean confidence, share of hits, number) of bins of [0, 1] of equal width, and the expected calibration error:
    the mean over samples of how far the two are apart."""
    number_N = (confidence_N * count).long().clamp(0, count - 1)
    found, error = [], 0.0
    for i in range(count):
        inside = number_N == i
        if inside.any():
            confidence, share, n = confidence_N[inside].mean().item(), hit_N[inside].mean().item(), int(inside.sum())
            found.append((confidence, share, n))
            error += abs(confidence - share) * n / len(hit_N)
    return found, error


def spearman(a_N: Tensor, b_N: Tensor) -> float:
    """The rank correlation; equal values share their mean rank. nan where one of the two is constant."""
    ranks = torch.stack([_mean_ranks(a_N), _mean_ranks(b_N)])
    return torch.corrcoef(ranks)[0, 1].item() if (ranks.std(dim=1) > 0).all() else math.nan


def auroc(score_N: Tensor, positive_N: Tensor) -> float:
    """How often a positive sample has the higher score than another, ties as halves; nan without one of both kinds."""
    positive = positive_N.bool()
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return math.nan
    return (_mean_ranks(score_N)[positive].sum().item() - p * (p - 1) / 2) / (p * n)


def _mean_ranks(x_N: Tensor) -> Tensor:
    """Ranks from 0, in double precision; equal values share their mean rank."""
    _, place, count = x_N.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0) - 1
    return (last - (count - 1) / 2).double()[place]


def against_hits(uncertainty_N: Tensor, hit_N: Tensor) -> Iterator[tuple[str, float]]:
    """Correlation with the hits over 10 bins (-1: the uncertain ones fail), how well the uncertainty tells misses from
    hits, and the share of hits when only the most certain samples are kept."""
    yield "bin_correlation", bin_correlation(uncertainty_N, hit_N)
    yield "miss_AUROC", auroc(uncertainty_N, 1 - hit_N)
    curve = rejection(uncertainty_N, hit_N)
    for kept in KEPT:
        yield f"hits_at_{kept:.0%}_coverage", curve[max(1, round(kept * len(curve))) - 1].item()
    yield "hits_of_all", curve[-1].item()


def against_facts(uncertainty_N: Tensor, facts: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """For every fact that sorts the samples into 2 to 10 kinds: each kind's mean uncertainty, and its AUROC over the
    others. Yields names like "condition=blurred/AUROC"."""
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [fact.get(name) for fact in facts]
        kinds = sorted({value for value in values if isinstance(value, str)})
        if not (2 <= len(kinds) <= min(10, len(values) - 1) and all(isinstance(value, str) for value in values)):
            continue
        for kind in kinds:
            inside = torch.tensor([value == kind for value in values])
            yield f"{name}={kind}/mean", uncertainty_N[inside].mean().item()
            yield f"{name}={kind}/AUROC", auroc(uncertainty_N, inside)


def of_captions(
    uncertainty_N: Tensor, captions: Sequence[str], number_of_images: Sequence[int] | None
) -> Iterator[tuple[str, float]]:
    """Rank correlation of a caption's uncertainty with its length in words, and with the number of images it truly
    fits where that is known. A caption that occurs several times counts once."""
    first = list({caption: i for i, caption in reversed(list(enumerate(captions)))}.values())
    uncertainty = uncertainty_N[first]
    yield "spearman_caption_length", spearman(uncertainty, torch.tensor([len(captions[i].split()) for i in first]))
    if number_of_images is not None:
        yield "spearman_matches", spearman(uncertainty, torch.tensor([number_of_images[i] for i in first]))
