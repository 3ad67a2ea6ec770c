"""Split-conformal prediction for retrieval: how long a list must be to hold the right item in 90 % of the cases.

Half of the queries, drawn with a fixed seed, calibrate: of their n scores s of the right item (of several, the best)

    q = the ceil(0.9 (n + 1))-th smallest, infinite where that is more than n

On the other half, a query's set is all items with s <= q; reported are its mean size and its coverage, the share of
these queries whose right item is in the set. There are three scores:

    list        s = rank of the item: every query gets a list of the same length
    set         s = distance of the item: every query gets what is near, be it much, little or nothing
    level_list  s = rank, with a q for each of 5 levels of uncertainty: uncertain queries may get longer lists

Smaller sets are better if the coverage is the same; an uncertainty that knows which queries are hard makes
`level_list` shorter than `list`, and is of use if it does so better than the confidence of the softmax beside it.

How it must not be read: the coverage is promised on average over queries, for queries like those that calibrated, and
varies by about 1 / sqrt(n); nothing is promised for one query. The captions of one image are not independent.

Reference: Vovk et al., "Algorithmic Learning in a Random World", 2005.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..distances import Distance, get_distance
from ..gaussian import Gaussian
from .metric import Metric
from .retrieval import Matches, Ranking, places, scores

COVERAGE = 0.9
LEVELS = 5


def halves(count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the queries that calibrate, and those of the others."""
    order_N = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order_N[: count // 2].sort().values, order_N[count // 2 :].sort().values


def threshold(score_N: Tensor, coverage: float = COVERAGE) -> float:
    """Return q of the file's docstring."""
    k = math.ceil(round(coverage * (len(score_N) + 1), 9))  # 0.9 * 10 is not quite 9
    return math.inf if k > len(score_N) else score_N.double().kthvalue(k).values.item()


def lists(rank_N: Tensor, gallery: int) -> tuple[float, float]:
    """Return (mean size, coverage) of lists of one length.

    Arguments:
        rank_N: the rank, from 0, of the first right item of each query, [N].
        gallery: how many items there are.
    """
    return level_lists(rank_N, torch.zeros(len(rank_N)), gallery)


def level_lists(rank_N: Tensor, uncertainty_N: Tensor, gallery: int, levels: int = LEVELS) -> tuple[float, float]:
    """Return (mean size, coverage) of lists with a length per level of uncertainty, between calibrating quantiles."""
    known, other = halves(len(rank_N))
    if len(known) == 0:
        return _mean(torch.full((len(other),), float(gallery))), _mean(rank_N[other] < gallery)
    edges = uncertainty_N[known].double().quantile(torch.linspace(0, 1, levels + 1, dtype=torch.double)[1:-1])
    level_N = torch.bucketize(uncertainty_N.double(), edges)
    by_level = [threshold(rank_N[known][level_N[known] == level]) + 1 for level in range(levels)]
    size_N = torch.tensor(by_level, dtype=torch.double).clamp(max=gallery)[level_N[other]]
    return _mean(size_N), _mean(rank_N[other] < size_N)


def sets(query: Gaussian, gallery: Gaussian, right: Matches, distance: str | Distance) -> tuple[float, float]:
    """Return (mean size, coverage) of the sets of items up to one distance, in chunks of the matrix.

    Arguments:
        right: the indices of each query's right items.
        distance: a name in `DISTANCES`.
    """
    place_NR = places(right, gallery)
    known, other = halves(len(query.mean))
    if len(known) == 0:
        return float(len(gallery.mean)), 1.0
    bound = threshold(torch.cat([own_n for own_n, _ in _distances(query, gallery, place_NR, known, distance)]))
    size, inside = 0, 0
    for own_n, distance_nM in _distances(query, gallery, place_NR, other, distance):
        size += int((distance_nM <= bound).sum())
        inside += int((own_n <= bound).sum())
    return size / len(other), inside / len(other)


def _distances(
    query: Gaussian, gallery: Gaussian, place_NR: Tensor, chosen: Tensor, distance: str | Distance
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (distance of the nearest right item [n], distances of all [n, M]) for chunks of the chosen queries."""
    query, place_NR = query.select(chosen), place_NR[chosen]
    factors = get_distance(distance).factors(query, gallery)
    for rows, score_nM in scores(query, gallery, distance):
        distance_nM = -score_nM if factors is None else factors.row_N[rows, None] - factors.scale * score_nM
        padded_nM = torch.nn.functional.pad(distance_nM, (0, 1), value=math.inf)
        yield padded_nM.gather(1, place_NR[rows]).amin(dim=1), distance_nM


def _mean(x_N: Tensor) -> float:
    return x_N.double().mean().item()


def conformal(ranking: Ranking, query: Gaussian, gallery: Gaussian, right: Matches) -> Iterator[Metric]:
    """Yield `conformal_list_size`, `conformal_list_coverage`, `conformal_set_size`, `conformal_set_coverage`."""
    list_values = lists(ranking.own_rank_N, len(gallery.mean))
    for name, values in (("list", list_values), ("set", sets(query, gallery, right, ranking.measure))):
        for quantity, value in zip(("size", "coverage"), values, strict=True):
            yield Metric(f"conformal_{name}_{quantity}", value, ranking.distance, ranking.direction)


def conformal_levels(rank_N: Tensor, uncertainty_N: Tensor, gallery: int) -> Iterator[Metric]:
    """Yield `conformal_level_list_size` and `conformal_level_list_coverage`, see `level_lists`."""
    for quantity, value in zip(("size", "coverage"), level_lists(rank_N, uncertainty_N, gallery), strict=True):
        yield Metric(f"conformal_level_list_{quantity}", value)
