"""The samples that an epoch reads, and their order, from seed and epoch alone.

The `batches` batches of a rank's epoch are assigned to `lanes` lanes in turn: batch i belongs to lane i % lanes. Each
lane reads its own shards; a worker runs one or several lanes. Since the number of lanes does not depend on the number
of workers, neither do the batches nor their order.

An exact pass lines up the usable samples of all shards, with the shards shuffled by seed and epoch, and cuts the line
into one slice per rank and lane, within shards if necessary. So every rank gets the same number of batches however the
samples are distributed over the shards, and no sample is in two slices. The last slice continues at the beginning of
the line to fill its last batch.
"""

import bisect
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from .sizes import ShardSize

MAX_LANES = 24  # divisible by many numbers of workers
BATCHES_PER_LANE = 4  # with fewer, a lane would have little to shuffle


def lane_count(batches: int, workers: int, limit: int | None = None) -> int:
    """Return the number of lanes of an epoch with that many batches, at most `limit` if shards cannot be cut.

    It depends on the number of workers only if there are more than `MAX_LANES`. In a short epoch it is a power of two,
    which the usual numbers of workers share evenly: with one lane more, one worker would do twice the work of the
    others.
    """
    lanes = max(1, min(batches // BATCHES_PER_LANE, sys.maxsize if limit is None else limit))
    full = max(MAX_LANES, workers)
    return full if lanes >= full else 2 ** (lanes.bit_length() - 1)


def seed_for(*parts: int | str) -> int:
    """Return a seed for a combination of parts, which is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class Shard(NamedTuple):
    """One shard of a source. `size` is None if it was not counted.

    An epoch of several passes over the images has each shard once per pass, told apart by `pass_index`.
    """

    source: int
    place: str
    size: ShardSize | None
    pass_index: int = 0


class Segment(NamedTuple):
    """Positions [start, stop) of a shard; if `only` is given, just the positions within its ranges [start, stop)."""

    shard: Shard
    start: int
    stop: int
    only: tuple[tuple[int, int], ...] | None = None


class SampleSequence(Protocol):
    """A sequence of samples that is cut into slices."""

    def __len__(self) -> int: ...

    def segments(self, begin: int, end: int | None = None) -> Iterator[Segment]: ...


class ExactPass:
    """The sequence of all usable samples of an epoch, one pass after the other. All shards must be counted."""

    def __init__(self, shards: Sequence[Shard], seed: int, epoch: int):
        self._shards = [shard for shard in shards if shard.size and shard.size.samples]
        random.Random(seed_for("pass", seed, epoch)).shuffle(self._shards)
        self._shards.sort(key=lambda shard: shard.pass_index)  # keeps the order within a pass
        self._ends: list[int] = []
        for shard in self._shards:
            assert shard.size is not None
            self._ends.append((self._ends[-1] if self._ends else 0) + shard.size.samples)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield [begin, end) itself if it is not empty. `Remaining.pieces` does the same for a part of a pass."""
        if begin < end:
            yield begin, end

    def segments(self, begin: int, end: int | None = None) -> Iterator[Segment]:
        """Yield the parts of shards at [begin, end) of the sequence, which starts over after its end.

        Without `end` it never ends.
        """
        assert len(self), "an empty line has no segments"
        while end is None or begin < end:
            at = begin % len(self)
            index = bisect.bisect_right(self._ends, at)
            shard = self._shards[index]
            assert shard.size is not None
            start = at - (self._ends[index] - shard.size.samples)
            stop = shard.size.samples if end is None else min(shard.size.samples, start + end - begin)
            yield Segment(shard, start, stop)
            begin += stop - start


def lane_batches(batches: int, lanes: int, lane: int) -> int:
    """Return how many of a rank's first `batches` batches belong to the lane."""
    return (batches - lane + lanes - 1) // lanes


def lane_slice(batches: int, lanes: int, lane: int, rank: int, batch_size: int) -> tuple[int, int]:
    """Return the part [begin, end) of the sequence that a lane delivers. It may extend past the end of the sequence."""
    before = sum(lane_batches(batches, lanes, earlier) for earlier in range(lane))
    begin = (rank * batches + before) * batch_size
    return begin, begin + lane_batches(batches, lanes, lane) * batch_size


def fresh_slice(length: int, batches: int, lanes: int, lane: int, *, rank: int, batch_size: int) -> tuple[int, int]:
    """Return the part of a lane's slice that lies on a sequence of that length: samples that no other lane has."""
    begin, end = lane_slice(batches, lanes, lane, rank, batch_size)
    return begin, max(begin, min(end, length))


def order_seed(seed: int, epoch: int, rank: int, lane: int) -> int:
    """Return the seed that shuffles the samples of a lane."""
    return seed_for("order", seed, epoch, rank, lane)


def buffer_size(shuffle: int, lanes: int) -> int:
    """Return the number of samples in the shuffle buffer of a lane, if the rank has `shuffle` in all."""
    return max(1, shuffle // lanes)


class ShardRead(NamedTuple):
    """A part of a shard to read: from position `start` to its end."""

    shard: Shard
    start: int = 0


def endless_draws(shards: Sequence[Shard], rng: random.Random) -> Iterator[ShardRead]:
    """Yield the shards of a source without end, in passes of random order.

    If counts are known, the first shard is drawn by size and read from a random position, as if reading had started
    long before. Otherwise epochs that end within a shard would favour the beginnings of shards.
    """
    sizes = [shard.size.samples if shard.size else 0 for shard in shards]
    if sum(sizes):
        index = rng.choices(range(len(shards)), weights=sizes)[0]
        yield ShardRead(shards[index], rng.randrange(sizes[index]))
    wanted = [shard for shard in shards if shard.size is None or shard.size.samples]
    while wanted:
        yield from (ShardRead(shard) for shard in rng.sample(wanted, len(wanted)))


def uncounted_walk(
    shards: Sequence[Shard], rng: random.Random, part: int, parts: int
) -> tuple[list[ShardRead], Iterator[ShardRead]]:
    """Return the uncounted shards of this part of a pass, and the shards that follow if they do not suffice.

    `rng` must be the same in every part.
    """
    line = rng.sample(list(shards), len(shards))
    own = line[part::parts]

    def extra() -> Iterator[ShardRead]:
        while True:
            yield from (ShardRead(line[(part + i) % len(line)]) for i in range(1, len(line) + 1))

    return [ShardRead(shard) for shard in own], extra()
