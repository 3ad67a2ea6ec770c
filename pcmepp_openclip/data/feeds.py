"""Shards to a shuffled stream of samples: one feed a lane, over an exact pass or over endless draws."""

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from .mixing import Mixer
from .plan import Line, Segment, Visit
from .shards import Sample, iter_samples
from .sizes import UNKNOWN_SIZE
from .tally import Tally

Item = TypeVar("Item")
MOST_MISSING = 100_000  # positions in a row that are waited through for others: a count may be a lie
PEEKS = 8  # waiting samples tried in the place of an unusable one, before others are read


class NothingUsable(Exception):
    """A source gave nothing over too many shards in a row."""

    def __init__(self, source: int, shards: int):
        super().__init__(source, shards)
        self.source, self.shards = source, shards


class Guard:
    """Stops a reader that would go on for ever: counts the shards of a source that gave nothing, in a row."""

    def __init__(self, limit: int):
        self._limit = limit
        self._empty: dict[int, int] = {}
        self._undecoded: dict[int, set[int]] = {}

    def shard_read(self, source: int, usable: int) -> None:
        self._empty[source] = 0 if usable else self._empty.get(source, 0) + 1
        self._check(source, self._empty[source])

    def decoded(self, sample: Sample, good: bool) -> None:
        visits = self._undecoded.setdefault(sample.source, set())
        if good:
            visits.clear()
        else:
            visits.add(sample.visit)
            self._check(sample.source, len(visits))

    def _check(self, source: int, shards: int) -> None:
        if shards >= self._limit:
            raise NothingUsable(source, shards)


class Reader:
    """Opens shards one after the other, and notes what is wrong with them.

    Arguments:
        again: whether its samples are read a second time in the epoch: then they were counted the first time.
    """

    def __init__(self, tally: Callable[[], Tally], guard: Guard, retries: int, again: bool = False):
        self._tally, self._guard, self._retries, self._again = tally, guard, retries, again
        self._visit = 0

    def slots(self, segment: Segment) -> Iterator[Sample | None]:
        """Exactly one item for each position of a segment, None where there is nothing usable.

        Where they are read again, to stand in for others, an endless row of None is cut short.
        """
        assert segment.shard.size is not None
        whole = segment.stop == segment.shard.size.samples
        items = self._read(Visit(segment.shard, segment.start), segment.stop, note_excess=whole)
        at = segment.start
        for start, stop in segment.only or ((segment.start, segment.stop),):
            yielded = 0
            for item in itertools.islice(items, start - at, stop - at):
                yielded += 1
                yield item
            missing = stop - start - yielded
            yield from itertools.repeat(None, min(missing, MOST_MISSING) if self._again else missing)
            at = stop
        next(items, None)  # its end is looked at, too

    def samples(self, visit: Visit) -> Iterator[Sample]:
        """The usable samples of a shard."""
        return (item for item in self._read(visit, None) if item is not None)

    def _read(self, visit: Visit, stop: int | None, note_excess: bool = False) -> Iterator[Sample | None]:
        shard, usable = visit.shard, 0
        self._visit += -1 if self._again else 1

        def note(cause: str, count: int, where: str) -> None:
            count = 0 if self._again else count
            self._tally().met += count
            self._tally().note(shard.source, cause, count, where)

        items = iter_samples(
            shard.place,
            note,
            source=shard.source,
            visit=self._visit,
            start=visit.start,
            stop=stop,
            size=shard.size or UNKNOWN_SIZE,
            retries=self._retries,
            note_excess=note_excess,
        )
        for item in items:
            if item is not None:
                usable += 1
                self._tally().met += not self._again
            yield item
        if usable or not visit.start:  # one begun near its end may well have nothing left
            self._guard.shard_read(shard.source, usable)


class ShuffleBuffer(Generic[Item]):
    """A bounded shuffle: each item taken is a random one of those waiting. It fills up while it is used."""

    def __init__(self, items: Iterable[Item], size: int, rng: random.Random):
        self._items, self._size, self._rng = iter(items), max(1, size), rng
        self._begun = False
        self.waiting: list[Item] = []
        self.pulled = 0

    def take(self) -> Item | None:
        """The next item, or None when there are no more."""
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


class ExactFeed:
    """A lane's slice of an exact pass: each sample once, then others again as long as they are asked for.

    The order is drawn on positions, not on samples, so that a pass that is resumed in its middle reads only what was
    waiting in the buffer then. An unusable sample keeps its place in that order; a waiting one stands in for it.
    """

    stand_ins_repeat = True

    def __init__(
        self,
        line: Line,
        begin: int,
        fresh_end: int,
        buffer_size: int,
        skip: int,
        reader: Reader,
        reader_again: Reader,
        tally: Callable[[], Tally],
        rng: random.Random,
    ):
        self._tally, self._begin, self._fresh_end = tally, begin, fresh_end
        self._order = ShuffleBuffer(range(begin, fresh_end), buffer_size, rng)
        again = max(0, skip - (fresh_end - begin))
        for _ in range(skip - again):
            self._order.take()
        self._kept = set(self._order.waiting)
        self._resumed_at = begin + self._order.pulled
        self._at = min(self._kept, default=self._resumed_at)  # the next position to read
        self._slots = _chain(reader.slots, line.segments(self._at, fresh_end))
        self._ready: dict[int, Sample | None] = {}
        self._more = _chain(reader_again.slots, line.segments(fresh_end + again))
        self._turn = 0

    def take_batch(self, size: int) -> list[Sample | None]:
        """The next samples, None for unusable ones."""
        self._turn = 0
        return [self._take() for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        """A waiting sample, which has its own turn in a later batch; or, if those are no better, one from elsewhere.

        The first kind depends on nothing that happened in earlier batches: a resumed pass stays the same.
        """
        waiting = self._order.waiting
        if attempt < PEEKS and self._turn < len(waiting):
            self._turn += 1
            return self._ready[waiting[-self._turn]]
        return next(self._more)

    def _take(self) -> Sample | None:
        position = self._order.take()
        if position is None:
            self._tally().filled += 1
            return next(self._more)
        while self._at < self._begin + self._order.pulled:
            item = next(self._slots)
            if self._at >= self._resumed_at or self._at in self._kept:
                self._ready[self._at] = item
            self._at += 1
            if self._at == self._fresh_end:
                next(self._slots, None)  # the last shard has its end looked at, too
        return self._ready.pop(position)

    def close(self) -> None:
        self._slots.close()
        self._more.close()


class ResampledFeed:
    """Samples of several sources in given shares, each source shuffled by itself, for ever.

    Arguments:
        visits: the shards to read, by number of the source. They must not end.
        shares, buffer_sizes: of the sources in `visits`, in order.
    """

    stand_ins_repeat = False

    def __init__(
        self,
        visits: dict[int, Iterator[Visit]],
        shares: list[float],
        buffer_sizes: list[int],
        reader: Callable[[], Reader],
        rng: random.Random,
    ):
        self._numbers, self._mixer = list(visits), Mixer(shares, rng)
        self._streams = [_chain(reader().samples, drawn) for drawn in visits.values()]
        self._buffers = [
            ShuffleBuffer(stream, size, rng) for stream, size in zip(self._streams, buffer_sizes, strict=True)
        ]

    def take_batch(self, size: int) -> list[Sample | None]:
        return [self._take(self._mixer.next()) for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        """The next sample of the same source, to keep the shares."""
        assert sample is not None
        return self._take(self._numbers.index(sample.source))

    def _take(self, entry: int) -> Sample:
        sample = self._buffers[entry].take()
        assert sample is not None, "visits never end"
        return sample

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class UncountedFeed:
    """Whole shards that were not counted, each sample once, then those of `others` as long as they are asked for."""

    stand_ins_repeat = False

    def __init__(
        self,
        own: list[Visit],
        others: Iterator[Visit],
        buffer_size: int,
        reader: Reader,
        reader_again: Reader,
        tally: Callable[[], Tally],
        rng: random.Random,
    ):
        self._tally = tally
        self._own, self._others = _chain(reader.samples, own), _chain(reader_again.samples, others)
        self._buffer = ShuffleBuffer(self._own, buffer_size, rng)

    def take_batch(self, size: int) -> list[Sample | None]:
        return [self._take() for _ in range(size)]

    def stand_in(self, sample: Sample | None, attempt: int) -> Sample | None:
        return self._take()

    def _take(self) -> Sample:
        sample = self._buffer.take()
        if sample is None:
            self._tally().filled += 1
            return next(self._others)
        return sample

    def close(self) -> None:
        self._own.close()
        self._others.close()


def _chain(read: Callable[[Item], Iterator[Any]], places: Iterable[Item]) -> Generator[Any, None, None]:
    for place in places:
        yield from read(place)
