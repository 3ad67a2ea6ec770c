"""What is left of an exact pass that goes on with another seed, batch size or number of ranks.

The order of a pass follows from how it is dealt out, so which samples the first batches of all ranks took can be worked
out again, without reading anything, in about 2 seconds a million. What is left is a line of its own, which is dealt out
anew: over the whole epoch each sample is still seen once.
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

MOST_PROBED = 1000  # shards whose content is looked at, spread over all: a look costs a slow disk milliseconds
PROBE = 4096


class Deal(NamedTuple):
    """How a line was dealt out and how far that went. Plain numbers, which a checkpoint keeps.

    Arguments:
        first: the batch of the epoch that it begins with, 0 unless the epoch had begun otherwise.
        batches: of a rank, in the whole epoch.
        taken: batches of a rank, from `first` on.
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
        """That were taken, over all ranks."""
        return self.taken * self.batch_size * self.world_size


class Left:
    """Pieces of the line of a pass, in its order, as a line of their own."""

    def __init__(self, line: ExactPass, pieces: Iterable[tuple[int, int]]):
        """`pieces` are positions [start, stop) of the line that do not overlap."""
        self._line = line
        table = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 2)
        begins = np.append(True, table[1:, 0] != table[:-1, 1])[: len(table)]  # neighbours become one
        self._starts = table[begins, 0]
        self._stops = table[np.append(begins[1:], True)[: len(table)], 1]
        self._ends = np.cumsum(self._stops - self._starts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """What is at [begin, end) of this line, as pieces of the pass's."""
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            stop, behind = int(self._stops[number]), int(self._ends[number])
            start = stop - (behind - begin)
            yield start, min(stop, start + end - begin)
            begin, number = behind, number + 1

    def segments(self, begin: int, end: int | None = None) -> Iterator[Segment]:
        """The pieces of shards at [begin, end) of this line, each shard in one go. No `end`: samples of the whole pass,
        which all are seen again, for ever."""
        if end is None:
            yield from self._line.segments(begin)
            return
        found = (segment for piece in self.pieces(begin, end) for segment in self._line.segments(*piece))
        for _, group in itertools.groupby(found, key=lambda segment: id(segment.shard)):
            parts = list(group)
            only = tuple((part.start, part.stop) for part in parts)
            yield Segment(parts[0].shard, parts[0].start, parts[-1].stop, only)


def left_of(base: ExactPass, deals: Sequence[Deal], epoch: int) -> ExactPass | Left:
    """What several deals, one after the other, have left of the line of a pass."""
    line: ExactPass | Left = base
    for deal in deals:
        pieces: list[tuple[int, int]] = []
        for rank, lane in itertools.product(range(deal.world_size), range(deal.lanes)):
            begin, end = fresh_slice(
                len(line), deal.batches - deal.first, deal.lanes, lane, rank=rank, batch_size=deal.batch_size
            )
            rng = random.Random(order_seed(deal.seed, epoch, rank, lane))
            order = ShuffleBuffer(range(begin, end), buffer_size(deal.shuffle, deal.lanes), rng)
            for _ in range(min(end - begin, lane_batches(deal.taken, deal.lanes, lane) * deal.batch_size)):
                order.take()
            for position in order.waiting:
                pieces += line.pieces(position, position + 1)
            pieces += line.pieces(begin + order.pulled, end)
        line = Left(base, pieces)
    return line


def names(shards: Sequence[Shard]) -> str:
    """A digest of which shards there are and what was counted in them, wherever they lie."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        counted = None if shard.size is None else (shard.size.samples, sorted(shard.size.unusable))
        digest.update(repr((shard.source, shard_key(shard.place), counted)).encode())
    return digest.hexdigest()


def probes(shards: Sequence[Shard]) -> dict[int, int]:
    """A number for what local shards hold, by their place in the order: of their length, beginning and middle."""
    found = {}
    for number in range(0, len(shards), max(1, -(-len(shards) // MOST_PROBED))):
        place = shards[number].place
        if kind(place) != "local":
            continue
        try:
            with open(local_path(place), "rb", buffering=0) as file:
                length = file.seek(0, os.SEEK_END)
                digest = hashlib.blake2b(length.to_bytes(8, "big"), digest_size=7)
                for start in (0, length // 2):
                    file.seek(start)
                    digest.update(file.read(PROBE))
        except OSError:
            continue
        found[number] = int.from_bytes(digest.digest(), "big")
    return found
