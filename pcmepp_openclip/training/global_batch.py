"""--global-batch-size: how many samples a rank takes per forward pass, and how many of these batches make a step.

    global batch = batch size x ranks x accumulated batches

The global batch is what a run's hyperparameters depend on, and the number of ranks is what a cluster grants. So the
other two follow from them, and a run that is resumed on another number of ranks keeps its steps.
"""

import math
from collections.abc import Collection
from typing import Any

ACCUMULATION_COST = (
    "the towers run forward twice, about 4/3 of the time per sample where a backward pass costs two forward passes; "
    "the loss is that of the whole global batch"
)
MOST = 10**12  # samples of a step


def words(batch_size: int, ranks: int, accum_freq: int) -> str:
    """Return a global batch in words."""
    each = f"{batch_size} per rank x {ranks} ranks x {accum_freq} accumulated batches"
    return f"{batch_size * ranks * accum_freq:,} ({each})"


def words_with_cost(config: Any) -> str:
    """Return the global batch of a run in words and, with accumulation, what that costs."""
    text = words(config.batch_size, config.world_size, config.accum_freq)
    return f"{text}; {ACCUMULATION_COST}" if config.accum_freq > 1 else text


def resolve(config: Any, explicit: Collection[str], multiple_of: int) -> None:
    """Set `batch_size` and `accum_freq` for `world_size` ranks, if there is a --global-batch-size.

    Arguments:
        explicit: the names of the flags that are on the command line; others have open_clip's defaults.
        multiple_of: the batch size is a multiple of it.
    """
    if config.global_batch_size is None:
        return
    if "accum_freq" in explicit:
        raise ValueError(
            "--accum-freq follows from --global-batch-size and --batch-size: drop it, or --global-batch-size."
        )
    at_most = config.batch_size if "batch_size" in explicit else None
    del config.batch_size, config.accum_freq  # if they cannot be set, checks that need them are skipped
    config.batch_size, config.accum_freq = split(config.global_batch_size, config.world_size, at_most, multiple_of)


def split(samples: int, ranks: int, at_most: int | None = None, multiple_of: int = 1) -> tuple[int, int]:
    """Return the size and the number of the largest batches that make a global batch; ValueError if there are none.

    Arguments:
        samples: the samples of the global batch.
        at_most: the most samples of a batch per rank. The largest size that divides is taken if it is at least half of
            that.
        multiple_of: the batch size is a multiple of it.
    """
    unit = ranks * multiple_of
    if samples % unit:
        captions = f" and {multiple_of} captions per image" if multiple_of > 1 else ""
        raise ValueError(
            f"--global-batch-size {samples} is not a multiple of {ranks} ranks{captions}: "
            f"choose {_neighbours(samples, unit)}{', or another number of ranks' if ranks > 1 else ''}."
        )
    share = samples // ranks
    largest = share if at_most is None else min(at_most, share)
    sizes = [size for size in _divisors(share) if size % multiple_of == 0]
    batch_size = max((size for size in sizes if size <= largest), default=None)
    if batch_size is None:
        raise ValueError(
            f"--batch-size {at_most} is less than the {multiple_of} captions per image with --multi-positives: "
            "raise it."
        )
    if 2 * batch_size < largest:
        larger = min(size for size in sizes if size > largest)
        whole = ranks * (largest // multiple_of * multiple_of)
        raise ValueError(
            f"--global-batch-size {samples} on {ranks} ranks is {share} samples per rank, which no --batch-size from "
            f"{(largest + 1) // 2} to {largest} divides: choose --batch-size {batch_size} or {larger}, or "
            f"--global-batch-size {_neighbours(samples, whole)}."
        )
    return batch_size, share // batch_size


def _divisors(number: int) -> set[int]:
    """Return all divisors of a positive number, in time that grows with its root."""
    lower = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return {*lower, *(number // size for size in lower)}


def _neighbours(number: int, unit: int) -> str:
    """Return the multiples of `unit` next below and above a number, in words."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
