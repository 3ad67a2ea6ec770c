"""Which batch sizes fit a card: memory over the batch size is a straight line, or a parabola where the loss holds a
matrix of all pairs."""

from collections.abc import Callable, Sequence

from .cards import room

MULTIPLE = 8  # of a batch size
FARTHEST = 8  # times the larger known batch size, where the line is checked


def largest(
    peak: Callable[[int], int], known: Sequence[tuple[int, int]], least: int, sizes: Sequence[float]
) -> list[int]:
    """The largest batch size for each card, a multiple of `MULTIPLE`; 0 where none fits.

    Arguments:
        peak: the peak of a step by its batch size, bytes. It is called once, near the answer for the largest card.
        known: two batch sizes with their peaks, the smaller one first.
        least: the peak of a step with hardly any samples, bytes.
        sizes: of the cards, bytes.
    """
    (first, low), (second, high) = known
    slope = (high - low) / (second - first)
    answer = int(first + (room(max(sizes)) - low) / slope) if slope > 0 else 0
    third = min(answer, FARTHEST * second) if answer > second else max(1, first // 4)
    line = _through(*sorted([*known, (third, peak(third))]))
    return [_largest_below(line, room(size)) if least <= room(size) else 0 for size in sizes]


def _through(first: tuple[int, int], second: tuple[int, int], third: tuple[int, int]) -> Callable[[int], float]:
    """The parabola through three points, or the line through the last two where it would bend down."""
    (x, a), (y, b), (z, c) = first, second, third
    left, right = (b - a) / (y - x), (c - b) / (z - y)
    bend = max(0.0, (right - left) / (z - x))
    return lambda n: b + right * (n - y) + bend * (n - y) * (n - z)


def _largest_below(line: Callable[[int], float], limit: float) -> int:
    """By bisection between batch sizes that fit and that do not."""
    fits, fails = 0, 1
    while line(fails * MULTIPLE) <= limit and fails < 2**20:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if line(middle * MULTIPLE) <= limit else (fits, middle)
    return fits * MULTIPLE
