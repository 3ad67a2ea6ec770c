"""Which batch sizes fit a card, from as few steps as possible: memory over the batch size is nearly a straight line.

It is not where a small batch has its peak at the update of the weights, or where the loss holds a matrix of all pairs.
"""

import itertools
from collections.abc import Callable, Sequence

from .cards import room

MULTIPLE = 8  # of a batch size
CLOSE = 0.02  # a line this close to a step is as good as it
FARTHEST = 8  # times the larger known batch size, for a check
CHECKS = 3  # steps for each card where the line is bent


def largest(
    peak: Callable[[int], int], known: Sequence[tuple[int, int]], least: int, sizes: Sequence[float]
) -> list[int]:
    """The largest batch size for each card, a multiple of `MULTIPLE`; 0 where none fits.

    Arguments:
        peak: the peak of a step by its batch size, bytes. It is called once where memory is a straight line.
        known: two batch sizes with their peaks.
        least: the peak of a step with hardly any samples, bytes.
        sizes: of the cards, bytes.
    """
    points, bent, checked, found = dict(known), False, False, {}
    farthest = FARTHEST * max(points)  # the loss of a far larger batch takes long to count
    for size in sorted(sizes, reverse=True):
        limit = room(size)
        for _ in range(CHECKS if limit > least else 0):
            at = min(_crossing(points, limit), farthest) or min(points) // 4
            if at in points or at == 0 or (checked and not bent):
                break
            expected, points[at], checked = _line(points, at), peak(at), True
            if abs(points[at] - expected) <= CLOSE * points[at]:
                break
            bent = True
        found[size] = _crossing(points, limit) if limit > least else 0
    return [found[size] for size in sizes]


def _crossing(points: dict[int, int], limit: float) -> int:
    """The batch size at which the lines through the points reach a limit, rounded down."""
    (x, low), (y, high) = _nearest(points, lambda _, size: size >= limit)
    if high <= low:
        return FARTHEST * y
    return max(0, int((x + (limit - low) * (y - x) / (high - low)) // MULTIPLE) * MULTIPLE)


def _line(points: dict[int, int], at: int) -> float:
    """The lines through the points at a batch size."""
    (x, low), (y, high) = _nearest(points, lambda n, _: n >= at)
    return low + (at - x) * (high - low) / (y - x)


def _nearest(points: dict[int, int], beyond: Callable[[int, int], bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two neighbouring points of which the right one is the first beyond; the last two if none is."""
    pairs = list(itertools.pairwise(sorted(points.items())))
    return next((pair for pair in pairs if beyond(*pair[1])), pairs[-1])
