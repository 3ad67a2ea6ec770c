"""The most and the least uncertain samples of a dataset, and what they find."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distances import Distance
from ..gaussian import Gaussian
from .retrieval import nearest


class Example(NamedTuple):
    """The index of a query, its uncertainty, and the indices of the items that it finds, nearest first."""

    query: int
    uncertainty: float
    found: list[int]


def extremes(uncertainty_N: Tensor, count: int, same: Sequence[Hashable] | None = None) -> tuple[list[int], list[int]]:
    """Indices of the most uncertain samples, the most uncertain first, and of the least uncertain ones, the least
    uncertain first: `count` of each, fewer where there are not twice as many.

    Arguments:
        same: for each sample what it is; of equal ones only the first counts.
    """
    kept = list(range(len(uncertainty_N)))
    if same is not None:
        kept = sorted({what: i for i, what in reversed(list(enumerate(same)))}.values())
    order = [kept[i] for i in uncertainty_N[kept].argsort(descending=True, stable=True).tolist()]
    return order[:count], order[count:][::-1][:count]


def examples(
    uncertainty_N: Tensor, indices: Sequence[int], query: Gaussian, gallery: Gaussian, distance: Distance, k: int
) -> list[Example]:
    """The queries at `indices` with the `k` items that each finds.

    Arguments:
        uncertainty_N: of all queries.
        query, gallery: all Gaussians, [N, D] and [M, D].
        distance: to be called with the queries first.
    """
    chosen = Gaussian(query.mean[list(indices)], query.logvar[list(indices)])
    found_nk = torch.cat(list(nearest(chosen, gallery, distance, k))).tolist() if len(indices) else []
    return [Example(i, uncertainty_N[i].item(), found) for i, found in zip(indices, found_nk, strict=True)]
