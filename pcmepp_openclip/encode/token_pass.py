"""The first pass: the towers' output of every sample to disk. What is there already is kept.

Ranks take files in turn. Every few seconds they tell each other how far they are, so that they stop together: on a
request, for a mistake of one of them, or when all files are there.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from tqdm import tqdm

from ..data.batches import Failure, LoaderSpec
from ..data.loader import MIN_SAMPLES_TO_JUDGE
from ..data.tally import Tally
from ..models.cached import CachedTokens
from .store import Collected, Piece, Store
from .token_reading import PieceBatch, PieceBatches

ROUND_S = 5.0  # seconds of work between two agreements of the ranks
REPORT_S = 60.0  # seconds between two lines of progress in the log
OLD_S = 3600.0  # age in seconds of a temporary file that nobody writes to any more


class Interrupted(Exception):
    """The pass was asked to stop, on all ranks. What is complete is kept."""


class Ranks(Protocol):
    """What the pass needs of the run that it is part of."""

    rank: int
    world_size: int

    def gather(self, item: Any) -> list[Any]:
        """`item` of every rank, on every rank."""

    def stop_asked(self) -> bool:
        """Whether this rank knows of a request to stop."""

    def pass_on_stop(self) -> None:
        """Tell the other ranks of it."""

    def wait_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; a long wait for one is logged and has a limit. Ends early if a stop was asked."""


class Alone:
    """A single process that nobody asks to stop."""

    rank, world_size = 0, 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def stop_asked(self) -> bool:
        return False

    def pass_on_stop(self) -> None:
        pass

    def wait_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        return iter(batches)


class Encoder(Protocol):
    """Frozen towers, see `data.Towers`."""

    def images(self, images: Tensor) -> CachedTokens: ...

    def texts(self, texts: Tensor) -> tuple[CachedTokens, Tensor]: ...


@dataclass
class Told:
    """What a rank tells the others after each round."""

    finished: bool = False
    stop: bool = False
    problem: str | None = None
    tally: Tally = field(default_factory=Tally)


def fill(
    store: Store,
    missing: list[Piece],
    spec: LoaderSpec,
    towers: Encoder,
    workers: int,
    ranks: Ranks,
    max_bad: float,
) -> None:
    """Write the missing files of a store, on all ranks together.

    Arguments:
        max_bad: the fraction of unusable samples above which a ValueError ends the pass.
    """
    if ranks.rank == 0:
        _remove_old(store)
    mine = missing[ranks.rank :: ranks.world_size]
    work = _Work(store, mine, towers, ranks.wait_for(PieceBatches(spec, mine, workers) if mine else ()))
    progress = _Progress(spec, sum(map(len, missing)), ranks.rank)
    with contextlib.closing(progress):
        while True:
            told = ranks.gather(work.round(ranks))
            for other in told:
                progress.add(other.tally)
            problem = next((other.problem for other in told if other.problem), None)
            if problem:
                raise ValueError(problem)
            progress.tally.judge(list(spec.names), max_bad, MIN_SAMPLES_TO_JUDGE)
            if any(other.stop for other in told):
                raise Interrupted
            if all(other.finished for other in told):
                return


class _Work:
    """The files of this rank."""

    def __init__(self, store: Store, pieces: list[Piece], towers: Encoder, batches: Iterator[Any]):
        self._store, self._pieces, self._towers, self._batches = store, pieces, towers, batches
        self._collected: dict[int, Collected] = {}
        self._written = 0

    def round(self, ranks: Ranks) -> Told:
        """Work for some seconds, or until there is something that the other ranks must know."""
        told, end = Told(), time.monotonic() + ROUND_S
        try:
            while time.monotonic() < end:
                batch = None if ranks.stop_asked() else next(self._batches, None)
                if batch is None:
                    told.finished = self._written == len(self._pieces)
                    told.stop = not told.finished  # also where the wait for a batch was ended by a request
                    if told.stop:
                        ranks.pass_on_stop()
                    return told
                if isinstance(batch, Failure):
                    raise ValueError(batch.message)
                self._add(batch)
                told.tally.add(batch.tally)
        except ValueError as error:
            told.problem = str(error)
        return told

    def _add(self, batch: PieceBatch) -> None:
        collected = self._collected.setdefault(batch.piece, Collected())
        collected.tally.add(batch.tally)
        if batch.images is not None and batch.texts is not None:
            batch.tally.used[self._pieces[batch.piece].shard.source] += len(batch.images)
            collected.add(self._towers.images(batch.images), *self._towers.texts(batch.texts))
        if batch.last:
            del self._collected[batch.piece]
            self._store.write(self._pieces[batch.piece], collected.tensors(), collected.tally)
            self._written += 1


class _Progress:
    """How far all ranks are, as rank 0 shows it: a bar in a terminal, lines in the log, a warning for each cause."""

    def __init__(self, spec: LoaderSpec, total: int, rank: int):
        self.tally = Tally()
        self._names, self._total, self._leads = spec.names, total, rank == 0
        self._noted: set[tuple[int, str]] = set()
        self._since = self._said = time.monotonic()
        terminal = self._leads and sys.stderr.isatty()
        self._bar = tqdm(total=total, unit=" samples", unit_scale=True, desc="cache", disable=not terminal, leave=False)

    def add(self, tally: Tally) -> None:
        self.tally.add(tally)
        self._bar.update(tally.met)
        if not self._leads:
            return
        for (source, cause), where in tally.first.items():
            if (source, cause) not in self._noted:
                self._noted.add((source, cause))
                logging.warning("Cache: %s: %s: %s (further ones are only counted)", self._names[source], cause, where)
        now = time.monotonic()
        if now - self._said > REPORT_S:
            self._said, rate = now, self.tally.met / (now - self._since)
            logging.info("Cache: %d of %d samples, %.1f samples/s", self.tally.met, self._total, rate)

    def close(self) -> None:
        self._bar.close()


def _remove_old(store: Store) -> None:
    """Temporary files that a process left which was killed while it wrote."""
    for path in store.folder.glob(".*.safetensors.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_S:
                path.unlink()
