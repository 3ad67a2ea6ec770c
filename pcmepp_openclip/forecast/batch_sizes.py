"""Which batch sizes fit a card: memory is nearly a straight line over the batch size."""

from collections.abc import Callable, Sequence

from .cards import room

MULTIPLE = 8  # of a batch size
CLOSE = 0.02  # a line this close to a step is as good as it


def largest(peak: Callable[[int], int], known: Sequence[tuple[int, int]], sizes: Sequence[float]) -> list[int]:
    """The largest batch size for each card, a multiple of `MULTIPLE`; 0 where none fits.

    Arguments:
        peak: the peak of a step by its batch size, bytes. It is called once or twice.
        known: two batch sizes with their peaks.
        sizes: of the cards, bytes.
    """
    (first, low), (second, high) = known
    at = _fits(first, low, second, high, max(sizes))
    if at:
        measured = peak(at)
        if abs(measured - (low + (at - first) * (high - low) / (second - first))) > CLOSE * measured:
            first, low, second, high = second, high, at, measured
    return [_fits(first, low, second, high, size) for size in sizes]


def _fits(first: int, low: int, second: int, high: int, size: float) -> int:
    if second == first or high <= low:
        return 0
    batch_size = first + (room(size) - low) * (second - first) / (high - low)
    return max(0, int(batch_size // MULTIPLE) * MULTIPLE)
