"""Shards to a shuffled stream of samples, for one lane at a time: an exact pass or endless draws."""

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from .mixing import Mixer
from .plan import SampleSequence, Segment, ShardRead
from .shards import Sample, iter_samples
from .sizes import UNKNOWN_SIZE
from .tally import Tally

Item = TypeVar("Item")
MAX_MISSING = 100_000  # consecutive positions without a sample that are skipped: a count may be wrong
MAX_PEEKS = 8  # so many buffered samples are tried in place of an unusable one before others are read


class NothingUsable(Exception):
    """Too many consecutive shards of a source have no usable sample."""

    def __init__(self, source: int, shards: int):
        super().__init__(source, shards)
        self.source, self.shards = source, shards


class Guard:
    """Counts consecutive shards of a source without a usable sample, to stop a reader that would never end."""

    def __init__(self, limit: int):
        self._limit = limit
        self._empty: dict[int, int] = {}
        self._undecoded: dict[int, set[tuple[bool, int]]] = {}

    def shard_read(self, source: int, usable: int) -> None:
        self._empty[source] = 0 if usable else self._empty.get(source, 0) + 1
        self._check(source, self._empty[source])

    def decoded(self, sample: Sample, good: bool) -> None:
        visits = self._undecoded.setdefault(sample.source, set())
        if good:
            visits.clear()
        else:
            visits.add((sample.reread, sample.visit))
            self._check(sample.source, len(visits))

    def _check(self, source: int, shards: int) -> None:
        if shards >= self._limit:
            raise NothingUsable(source, shards)


class Reader:
    """Reads shards one after the other, and notes their defects.

    Arguments:
        reread: whether its samples are read a second time in the epoch, and were counted the first time.
        every_caption: whether all captions of a sample are read.
    """

    def __init__(self, tally: Tally, guard: Guard, retries: int, reread: bool = False, every_caption: bool = False):
        self._tally, self._guard, self._retries, self._reread = tally, guard, retries, reread
        self._every_caption = every_caption
        self._visit = 0

    def slots(self, segment: Segment) -> Iterator[Sample | None]:
        """Yield exactly one item per position of a segment, None if there is no usable sample.

        When samples are reread to replace others, a long row of None is cut short.
        """
        assert segment.shard.size is not None
        whole = segment.stop == segment.shard.size.samples
        items = self._read(ShardRead(segment.shard, segment.start), segment.stop, note_excess=whole)
        at = segment.start
        for start, stop in segment.only or ((segment.start, segment.stop),):
            yielded = 0
            for item in itertools.islice(items, start - at, stop - at):
                yielded += 1
                yield item
            missing = stop - start - yielded
            yield from itertools.repeat(None, min(missing, MAX_MISSING) if self._reread else missing)
            at = stop
        next(items, None)  # reading on notes defects after the last one, too

    def samples(self, visit: ShardRead) -> Iterator[Sample]:
        """Return the usable samples of a shard, read one after the other."""
        return (item for item in self._read(visit, None) if item is not None)

    def _read(self, visit: ShardRead, stop: int | None, note_excess: bool = False) -> Iterator[Sample | None]:
        shard, usable = visit.shard, 0
        self._visit += 1

        def note(cause: str, count: int, where: str) -> None:
            count = 0 if self._reread else count
            self._tally.met += count
            self._tally.note(shard.source, cause, count, where)

        items = iter_samples(
            shard.place,
            note,
            source=shard.source,
            visit=self._visit,
            reread=self._reread,
            pass_index=shard.pass_index,
            every_caption=self._every_caption,
            start=visit.start,
            stop=stop,
            size=shard.size or UNKNOWN_SIZE,
            retries=self._retries,
            note_excess=note_excess,
        )
        for item in items:
            if item is not None:
                usable += 1
                self._tally.met += not self._reread
            yield item
        if usable or not visit.start:  # a shard that is entered near its end may have nothing left
            self._guard.shard_read(shard.source, usable)


class ShuffleBuffer(Generic[Item]):
    """A bounded shuffle: each item is drawn at random from a buffer, which fills up while it is used."""

    def __init__(self, items: Iterable[Item], size: int, rng: random.Random):
        self._items, self._size, self._rng = iter(items), max(1, size), rng
        self._begun = False
        self.waiting: list[Item] = []
        self.pulled = 0

    def take(self) -> Item | None:
        """Return the next item, or None when there are no more."""
        self._pull(2 if self._begun else max(1, self._size // 5))
        self._begun = True
        if not self.waiting:
            return None
        i = self._rng.randrange(len(self.waiting))
        self.waiting[i], self.waiting[-1] = self.waiting[-1], self.waiting[i]
        return self.waiting.pop()

    def _pull(self, count: int) -> None:
        for item in itertools.islice(self._items, max(0, min(count, self._size + 1 - len(self.waiting)))):
            self.waiting.append(item)
            self.pulled += 1


class Feed(Protocol):
    """The samples of one lane in one epoch."""

    stand_ins_repeat: bool
    """True if a stand-in is delivered in its own place, too."""

    def take_batch(self, size: int) -> list[Sample | None]:
        """Return the next samples, None for an unusable one."""
        ...

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        """Return another sample in the place of an unusable one. `attempt` counts from 0 for each place in a batch."""
        ...

    def close(self) -> None: ...


class ExactFeed:
    """A lane's slice of an exact pass: each sample once, then other samples a second time, as many as are requested.

    Positions are shuffled, not samples, so that a pass that is resumed in its middle reads only what was in the buffer
    at that time. An unusable sample keeps its place in that order; one from the buffer stands in for it.
    """

    stand_ins_repeat = True

    def __init__(
        self,
        line: SampleSequence,
        begin: int,
        fresh_end: int,
        buffer_size: int,
        skip: int,
        reader: Reader,
        rereader: Reader,
        tally: Tally,
        rng: random.Random,
    ):
        self._tally, self._begin, self._fresh_end = tally, begin, fresh_end
        self._order = ShuffleBuffer(range(begin, fresh_end), buffer_size, rng)
        again = max(0, skip - (fresh_end - begin))
        for _ in range(skip - again):
            self._order.take()
        self._buffered = set(self._order.waiting)
        self._resumed_at = begin + self._order.pulled
        self._at = min(self._buffered, default=self._resumed_at)  # the next position to read
        self._slots = _chain(reader.slots, line.segments(self._at, fresh_end))
        self._ready: dict[int, Sample | None] = {}
        self._more = _chain(rereader.slots, line.segments(fresh_end + again))
        self._turn = 0

    def take_batch(self, size: int) -> list[Sample | None]:
        """Return the next samples, None for unusable ones."""
        self._turn = 0
        return [self._take() for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        """Return a sample from the buffer, which is delivered in a later batch, too, or else one from elsewhere.

        The first kind does not depend on earlier batches, so that a resumed pass stays the same.
        """
        waiting = self._order.waiting
        if attempt < MAX_PEEKS and self._turn < len(waiting):
            self._turn += 1
            return self._ready[waiting[-self._turn]]
        return next(self._more)

    def _take(self) -> Sample | None:
        position = self._order.take()
        if position is None:
            self._tally.filled += 1
            return next(self._more)
        while self._at < self._begin + self._order.pulled:
            item = next(self._slots)
            if self._at >= self._resumed_at or self._at in self._buffered:
                self._ready[self._at] = item
            self._at += 1
            if self._at == self._fresh_end:
                next(self._slots, None)  # reading on notes defects at the end of the last shard, too
        return self._ready.pop(position)

    def close(self) -> None:
        self._slots.close()
        self._more.close()


class ResampledFeed:
    """Samples of several sources in given shares, without end. Each source is shuffled by itself.

    Arguments:
        reads: endless iterators over the shards to read, by source index.
        shares, buffer_sizes: the share and the buffer size of each source in `reads`, in order.
    """

    stand_ins_repeat = False

    def __init__(
        self,
        reads: dict[int, Iterator[ShardRead]],
        shares: list[float],
        buffer_sizes: list[int],
        reader: Callable[[], Reader],
        rng: random.Random,
    ):
        self._sources, self._mixer = list(reads), Mixer(shares, rng)
        self._streams = [_chain(reader().samples, drawn) for drawn in reads.values()]
        self._buffers = [
            ShuffleBuffer(stream, size, rng) for stream, size in zip(self._streams, buffer_sizes, strict=True)
        ]

    def take_batch(self, size: int) -> list[Sample | None]:
        return [self._take(self._mixer.next()) for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        """Return the next sample of the same source, to keep the shares."""
        assert sample is not None
        return self._take(self._sources.index(sample.source))

    def _take(self, entry: int) -> Sample:
        sample = self._buffers[entry].take()
        assert sample is not None, "reads never end"
        return sample

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class UncountedFeed:
    """Whole shards that were not counted: each sample once, then those of `extra`, as many as are requested."""

    stand_ins_repeat = False

    def __init__(
        self,
        own: list[ShardRead],
        extra: Iterator[ShardRead],
        buffer_size: int,
        reader: Reader,
        rereader: Reader,
        tally: Tally,
        rng: random.Random,
    ):
        self._tally = tally
        self._own, self._extra = _chain(reader.samples, own), _chain(rereader.samples, extra)
        self._buffer = ShuffleBuffer(self._own, buffer_size, rng)

    def take_batch(self, size: int) -> list[Sample | None]:
        return [self._take() for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        return self._take()

    def _take(self) -> Sample:
        sample = self._buffer.take()
        if sample is None:
            self._tally.filled += 1
            return next(self._extra)
        return sample

    def close(self) -> None:
        self._own.close()
        self._extra.close()


def _chain(read: Callable[[Item], Iterator[Any]], places: Iterable[Item]) -> Generator[Any, None, None]:
    for place in places:
        yield from read(place)
