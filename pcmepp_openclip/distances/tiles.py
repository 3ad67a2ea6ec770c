"""Distances that are no matrix product, computed in tiles.

Each tile is computed again in the backward pass, so that neither pass holds more than a few tiles.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..gaussian import Gaussian, full_precision
from .base import Distance, check_shapes

CHUNK = {"cpu": 2**20, "cuda": 2**25}  # elements of a matrix held at a time, to fit a CPU's cache and fill a GPU


def elements_at_a_time(like: Tensor) -> int:
    """Return how many elements the largest tensor of a tile, or of a chunk of rows, may have on a device."""
    return CHUNK.get(like.device.type, CHUNK["cuda"])


def in_tiles(function: Callable[[Gaussian, Gaussian], Tensor], a: Gaussian, b: Gaussian, per_pair: int) -> Tensor:
    """Return the matrix [N, M] of a function that returns the matrix of parts of both.

    Arguments:
        function: a function of Gaussians [n, D] and [m, D] that returns [n, m]. It is called again in the backward
            pass.
        per_pair: the number of elements that it holds for each pair, such as D.
    """
    side = max(1, math.isqrt(elements_at_a_time(a.mean) // per_pair))
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (*a, *b))
    rows = []
    for part_a in _parts(a, side):
        row = [
            checkpoint(function, part_a, part_b, use_reentrant=False) if learns else function(part_a, part_b)
            for part_b in _parts(b, side)
        ]
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows)


def _parts(x: Gaussian, size: int) -> Iterator[Gaussian]:
    return (Gaussian(*part) for part in zip(x.mean.split(size), x.logvar.split(size), strict=True))


class SumOverDimensions(Distance):
    """A distance that is a sum over dimensions. A subclass defines `summands`."""

    def summands(self, a: Gaussian, b: Gaussian) -> Tensor:
        """Return the summand of each dimension, [..., D] in fp32, for Gaussians whose shapes broadcast."""
        raise NotImplementedError

    def matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        check_shapes(a, b)
        with full_precision(a.mean):
            return in_tiles(self._matrix, a, b, per_pair=a.mean.shape[1])

    def paired(self, a: Gaussian, b: Gaussian) -> Tensor:
        check_shapes(a, b)
        with full_precision(a.mean):
            return self._sum(a, b)

    def _matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        return self._sum(Gaussian(a.mean[:, None], a.logvar[:, None]), b)

    def _sum(self, a: Gaussian, b: Gaussian) -> Tensor:
        return self.summands(
            Gaussian(a.mean.float(), a.logvar.float()), Gaussian(b.mean.float(), b.logvar.float())
        ).sum(dim=-1)
