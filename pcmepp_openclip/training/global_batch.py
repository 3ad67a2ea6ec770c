"""--global-batch-size: how many samples a rank takes per forward pass, and how many of these batches make a step.

    global batch = batch size x ranks x accumulated batches

The global batch is what a run's hyperparameters depend on, and the number of ranks is what a cluster grants. So the
other two follow from them, and a run that is resumed on another number of ranks keeps its steps.
"""

import argparse
import math
from collections.abc import Collection
from dataclasses import dataclass

from ..host.flags import PlannedRun, RunSettings

ACCUMULATION_COST = (
    "the towers run forward twice, about 4/3 of the time per sample where a backward pass costs two forward passes; "
    "the loss is that of the whole global batch"
)
MOST = 10**12  # samples of a step


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step.

    Arguments:
        batch_size: per rank and forward pass.
        accum_freq: batches per rank and step.
    """

    batch_size: int
    ranks: int
    accum_freq: int

    @classmethod
    def of(cls, run: RunSettings | PlannedRun) -> "GlobalBatch":
        return cls(run.batch_size, run.world_size, run.accum_freq)

    @property
    def samples(self) -> int:
        return self.batch_size * self.ranks * self.accum_freq

    def __str__(self) -> str:
        each = f"{self.batch_size} per rank x {self.ranks} ranks x {self.accum_freq} accumulated batches"
        return f"{self.samples:,} ({each})"

    @property
    def with_cost(self) -> str:
        """The same, and what the accumulation costs, for a dry run and the log."""
        return f"{self}; {ACCUMULATION_COST}" if self.accum_freq > 1 else str(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="samples per step over all ranks; --batch-size is then the most that a rank takes per forward pass "
        "(default: its whole share), and --accum-freq follows",
    )


def resolve(args: argparse.Namespace, given: Collection[str], multiple_of: int) -> None:
    """With --global-batch-size, set `args.batch_size` and `args.accum_freq` for `args.world_size` ranks.

    Arguments:
        given: which of "batch_size" and "accum_freq" are on the command line; the others are open_clip's defaults.
        multiple_of: the batch size is a multiple of it.
    """
    if args.global_batch_size is None:
        return
    if not 1 <= args.global_batch_size <= MOST:
        raise ValueError(f"--global-batch-size must be from 1 to {MOST:,}, not {args.global_batch_size}.")
    if "accum_freq" in given:
        raise ValueError(
            "--accum-freq follows from --global-batch-size and --batch-size: drop it, or --global-batch-size."
        )
    at_most = args.batch_size if "batch_size" in given else None
    batch = split(args.global_batch_size, args.world_size, at_most, multiple_of)
    args.batch_size, args.accum_freq = batch.batch_size, batch.accum_freq


def split(samples: int, ranks: int, at_most: int | None = None, multiple_of: int = 1) -> GlobalBatch:
    """The largest batches that a global batch of so many samples can be divided into; ValueError if there are none.

    Arguments:
        at_most: the most samples of a batch per rank; the largest that divides is taken, if it is at least half of it.
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
    return GlobalBatch(batch_size, ranks, share // batch_size)


def _divisors(number: int) -> set[int]:
    """Return all divisors of a positive number, in time that grows with its root."""
    lower = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return {*lower, *(number // size for size in lower)}


def _neighbours(number: int, unit: int) -> str:
    """The multiples of `unit` on both sides of a number."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
