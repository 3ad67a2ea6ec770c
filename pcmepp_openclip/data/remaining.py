"""The samples that remain of an exact pass that is resumed with another seed, batch size or number of ranks.

The order of a pass follows from how its line was distributed, so that the samples which the first batches of all ranks
took can be computed again, without reading anything, in about 2 seconds per million. The remaining ones form a line of
their own, which is distributed again: each sample is still seen once in the whole epoch.
"""

import hashlib
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .feeds import ShuffleBuffer
from .plan import ExactPass, Segment, Shard, buffer_size, fresh_slice, lane_batches, order_seed
from .sources import kind, local_path, shard_key

MAX_PROBED_SHARDS = 1000  # spread evenly, since each probe costs a slow disk milliseconds
PROBE_BYTES = 4096


class Assignment(NamedTuple):
    """The assignment of a sequence of samples to ranks and lanes, and how far it was read. Checkpoints keep it.

    Arguments:
        first: the index of its first batch in the epoch, 0 unless the epoch began with other settings.
        batches: the batches per rank in the whole epoch.
        taken: the batches per rank that were read, from `first` on.
    """

    seed: int
    world_size: int
    batch_size: int
    lanes: int
    shuffle: int
    batches: int
    first: int = 0
    taken: int = 0

    @property
    def samples(self) -> int:
        """Return the number of samples that were taken, over all ranks."""
        return self.taken * self.batch_size * self.world_size


class Remaining:
    """Parts of the sequence of a pass, in its order, as a sequence of their own."""

    def __init__(self, line: ExactPass, pieces: Iterable[tuple[int, int]]):
        """Take positions [start, stop) of the pass as `pieces`, which must not overlap."""
        self._line = line
        table = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 2)
        begins = np.append(True, table[1:, 0] != table[:-1, 1])[: len(table)]  # neighbours become one
        self._starts = table[begins, 0]
        self._stops = table[np.append(begins[1:], True)[: len(table)], 1]
        self._ends = np.cumsum(self._stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the range [begin, end) of this sequence as ranges of the pass."""
        index = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            stop, end_here = int(self._stops[index]), int(self._ends[index])
            start = stop - (end_here - begin)
            yield start, min(stop, start + end - begin)
            begin, index = end_here, index + 1

    def segments(self, begin: int, end: int | None = None) -> Iterator[Segment]:
        """Yield the parts of shards at [begin, end) of this sequence, each shard at once.

        Without `end`, yield samples of the whole pass without end, to be seen a second time.
        """
        if end is None:
            yield from self._line.segments(begin)
            return
        segments = (segment for piece in self.pieces(begin, end) for segment in self._line.segments(*piece))
        for _, group in itertools.groupby(segments, key=lambda segment: id(segment.shard)):
            parts = list(group)
            only = tuple((part.start, part.stop) for part in parts)
            yield Segment(parts[0].shard, parts[0].start, parts[-1].stop, only)


def remaining_after(base: ExactPass, assignments: Sequence[Assignment], epoch: int) -> ExactPass | Remaining:
    """Return the part of a pass that several assignments in a row have left."""
    line: ExactPass | Remaining = base
    for past in assignments:
        pieces: list[tuple[int, int]] = []
        for rank, lane in itertools.product(range(past.world_size), range(past.lanes)):
            begin, end = fresh_slice(
                len(line),
                past.batches - past.first,
                past.lanes,
                lane,
                rank=rank,
                batch_size=past.batch_size,
            )
            rng = random.Random(order_seed(past.seed, epoch, rank, lane))
            order = ShuffleBuffer(range(begin, end), buffer_size(past.shuffle, past.lanes), rng)
            for _ in range(min(end - begin, lane_batches(past.taken, past.lanes, lane) * past.batch_size)):
                order.take()
            for position in order.waiting:
                pieces += line.pieces(position, position + 1)
            pieces += line.pieces(begin + order.pulled, end)
        line = Remaining(base, pieces)
    return line


def shards_digest(shards: Sequence[Shard]) -> str:
    """Return a digest of the names and counts of shards, independent of their folders."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        counted = None if shard.size is None else (shard.size.samples, sorted(shard.size.unusable))
        digest.update(repr((shard.source, shard_key(shard.place), counted)).encode())
    return digest.hexdigest()


def content_probes(shards: Sequence[Shard]) -> dict[int, int]:
    """Return a digest of length, beginning and middle of each local shard, by its index."""
    probes = {}
    for index in range(0, len(shards), max(1, -(-len(shards) // MAX_PROBED_SHARDS))):
        place = shards[index].place
        if kind(place) != "local":
            continue
        try:
            with open(local_path(place), "rb", buffering=0) as file:
                length = file.seek(0, os.SEEK_END)
                digest = hashlib.blake2b(length.to_bytes(8, "big"), digest_size=7)
                for start in (0, length // 2):
                    file.seek(start)
                    digest.update(file.read(PROBE_BYTES))
        except OSError:
            continue
        probes[index] = int.from_bytes(digest.digest(), "big")
    return probes
