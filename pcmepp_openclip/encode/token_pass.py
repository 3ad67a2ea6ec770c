"""The first pass of `--cache-tokens` writes the towers' output of every sample to disk, and keeps complete files.

Shards are read and images decoded as in training, in worker processes; unusable samples are left out and counted.
Ranks take files in turn. Every few seconds they tell each other how far they are, so that they stop together: on a
request, for a mistake of one of them, or when all files are there.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from ..data.batches import CHARACTERS_PER_TOKEN, Failure, LoaderSpec, cut_texts, nothing_usable
from ..data.decode import BadImage
from ..data.feeds import Guard, NothingUsable, Reader
from ..data.loader import MIN_SAMPLES_TO_JUDGE
from ..data.pixels import to_pixels
from ..data.plan import Segment
from ..data.sources import label, shown
from ..data.tally import Tally
from ..system.processes import signals_blocked
from .store import Row, Store, join_rows

ROUND_S = 5.0  # seconds of work between two agreements of the ranks
REPORT_S = 60.0  # seconds between two lines of progress in the log


class Interrupted(Exception):
    """The pass was asked to stop, on all ranks. What is complete is kept."""


class Ranks:
    """The ranks of the run that the pass is part of: here a single process that nobody asks to stop."""

    rank, world_size = 0, 1

    def gather(self, item: Any) -> list[Any]:
        """Return `item` of every rank, on every rank."""
        return [item]

    def stop_asked(self) -> bool:
        """Return whether this rank knows of a request to stop."""
        return False

    def pass_on_stop(self) -> None:
        """Tell the other ranks of a request to stop."""

    def wait_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches until a stop is asked for; a long wait for a batch is logged and has a limit."""
        return iter(batches)


@dataclass
class Report:
    """The message of a rank to the others after each round."""

    finished: bool = False
    stop: bool = False
    problem: str | None = None
    tally: Tally = field(default_factory=Tally)


def fill(
    store: Store,
    files: dict[str, Segment],
    reading: LoaderSpec,
    encode: Callable[[Tensor, Tensor], Row],
    workers: int,
    ranks: Ranks,
    max_bad: float,
) -> None:
    """Write the files, on all ranks together.

    Arguments:
        encode: turns images and token ids, as `data.batches.Batch` has them, into rows.
        max_bad: the fraction of unusable samples above which a ValueError ends the pass.
    """
    if ranks.rank == 0:
        store.remove_leftovers()
    left = {name: files[name] for name in list(files)[ranks.rank :: ranks.world_size]}
    loader: DataLoader = DataLoader(
        _FileReader(reading, dict(left)),
        batch_size=None,
        num_workers=min(workers, len(left)),
        generator=torch.Generator(),  # leave the training process's random numbers alone
    )
    with signals_blocked():  # the workers are started here
        batches = (batch for batch in loader)
    work = _write_files(store, left, encode, ranks.wait_for(batches))
    progress = _Progress(reading.names, sum(file.stop - file.start for file in files.values()), ranks.rank)
    with contextlib.closing(progress):
        while True:
            reports = ranks.gather(_round(work, left, ranks))
            for report in reports:
                progress.add(report.tally)
            problem = next((report.problem for report in reports if report.problem), None)
            if problem:
                raise ValueError(problem)
            progress.tally.judge(list(reading.names), max_bad, MIN_SAMPLES_TO_JUDGE)
            if any(report.stop for report in reports):
                raise Interrupted
            if all(report.finished for report in reports):
                return


def _round(work: Iterator[Tally], left: dict[str, Segment], ranks: Ranks) -> Report:
    """Work for some seconds, or until there is something that the other ranks must know."""
    report, end = Report(), time.monotonic() + ROUND_S
    try:
        while time.monotonic() < end:
            tally = None if ranks.stop_asked() else next(work, None)
            if tally is None:
                report.finished, report.stop = not left, bool(left)  # a request may have ended the wait for a batch
                if report.stop:
                    ranks.pass_on_stop()
                break
            report.tally.add(tally)
    except ValueError as error:
        report.problem = str(error)
    return report


def _write_files(
    store: Store, left: dict[str, Segment], encode: Callable[[Tensor, Tensor], Row], batches: Iterator[Any]
) -> Iterator[Tally]:
    """Encode the batches, write each file when it is complete and remove it from `left`; yield the tally of each
    batch."""
    tallies: dict[str, Tally] = {name: Tally() for name in left}
    parts: dict[str, list[Row]] = {name: [] for name in left}
    for batch in batches:
        if isinstance(batch, Failure):
            raise ValueError(batch.message)
        name = batch.file
        if batch.images is not None:
            batch.tally.used[left[name].shard.source] += len(batch.images)
            parts[name].append(encode(batch.images, batch.texts))
        tallies[name].add(batch.tally)
        if batch.last:
            tally = tallies.pop(name)
            tally.retries.clear()  # they belong to this pass, not to the file
            store.write(name, join_rows(parts.pop(name)), tally=tally.to_plain())
            del left[name]
        yield batch.tally


class FileBatch(NamedTuple):
    """Some samples of a file, in order.

    Arguments:
        images, texts: as in `data.batches.Batch`; None if there is no usable sample left for the file.
        tally: counts of the used and the unusable samples since the last batch.
        last: whether the file ends with it.
    """

    file: str
    images: Tensor | None
    texts: Tensor | None
    tally: Tally
    last: bool


class _FileReader(IterableDataset):
    """The batches of some files, one file after the other; each of several workers has files of its own."""

    def __init__(self, reading: LoaderSpec, files: dict[str, Segment]):
        self._reading, self._files = reading, files

    def __iter__(self) -> Iterator[FileBatch | Failure]:
        worker = get_worker_info()
        names = list(self._files)[worker.id :: worker.num_workers] if worker else list(self._files)
        guard, tally = Guard(self._reading.max_empty_shards), Tally()
        reader = Reader(tally, guard, self._reading.retries)
        try:
            for name in names:
                yield from self._batches(name, reader, guard, tally)
        except NothingUsable as error:
            yield Failure(nothing_usable(self._reading.names, error, tally))

    def _batches(self, name: str, reader: Reader, guard: Guard, tally: Tally) -> Iterator[FileBatch]:
        reading = self._reading
        images: list[Tensor] = []
        captions: list[str] = []
        for sample in reader.slots(self._files[name]):
            if sample is None:
                continue
            try:
                image = to_pixels(sample.image, reading)
            except BadImage as error:
                tally.note(sample.source, error.cause, 1, f"{label(sample.shard)} {shown(sample.key)}")
                guard.decoded(sample, good=False)
                continue
            guard.decoded(sample, good=True)
            if len(images) == reading.batch_size:  # there is at least one more, so this one is not the last
                yield self._batch(name, images, captions, tally, last=False)
                images, captions = [], []
            images.append(image)
            captions.append(sample.caption[: CHARACTERS_PER_TOKEN * reading.context_length])
        yield self._batch(name, images, captions, tally, last=True)

    def _batch(self, name: str, images: list[Tensor], captions: list[str], tally: Tally, last: bool) -> FileBatch:
        if not images:
            return FileBatch(name, None, None, tally.take(), last)
        texts = self._reading.tokenizer(captions)
        if self._reading.pad is not None:
            texts = cut_texts(texts, self._reading.pad)
        return FileBatch(name, torch.stack(images), texts, tally.take(), last)


class _Progress:
    """The progress of all ranks, shown by rank 0: a bar in a terminal, lines in the log, a warning for each cause."""

    def __init__(self, names: tuple[str, ...], total: int, rank: int):
        self.tally = Tally()
        self._names, self._total, self._leads = names, total, rank == 0
        self._since = self._said = time.monotonic()
        terminal = self._leads and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit=" samples", unit_scale=True, desc="cache", disable=not terminal, leave=False)

    def add(self, tally: Tally) -> None:
        new = tally.first.keys() - self.tally.first.keys()
        self.tally.add(tally)
        self._bar.update(tally.met)
        if not self._leads:
            return
        for source, cause in sorted(new):
            where = tally.first[source, cause]
            logging.warning("Cache: %s: %s: %s (further ones are only counted)", self._names[source], cause, where)
        now = time.monotonic()
        if now - self._said > REPORT_S:
            self._said, rate = now, self.tally.met / (now - self._since)
            logging.info("Cache: %d of %d samples, %.1f samples/s", self.tally.met, self._total, rate)

    def close(self) -> None:
        self._bar.close()
