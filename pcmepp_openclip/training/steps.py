"""The batches that open_clip's loop iterates over: waits have a limit, and our code runs between the steps."""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..host.flags import RunSettings
from ..runs import rng
from ..system.errors import RunFailed
from ..system.processes import signals_blocked
from .coordination import START_UP_TIMEOUT, RankCoordinator
from .monitor import Monitor, last_checkpoint, progress_bar
from .waits import StopAsked, TooLong, Waiter

END = object()


class Stalled(RunFailed):
    """No data arrived for too long, or a stop request could not be carried out."""


@dataclass(frozen=True)
class EpochStart:
    """The position at which an epoch starts.

    Arguments:
        batch: the index of the first batch.
        samples_before: the number of samples of the epoch that were seen before.
        outdated: checkpoints of this epoch whose names count batches of another size. They are deleted once there is a
            newer one, or the next restart would take them for the newest.
        restored: the `training` entry of the checkpoint, with the RNG states of every rank; None for a new epoch.
    """

    batch: int = 0
    samples_before: int = 0
    outdated: list[Path] = field(default_factory=list)
    restored: dict[str, Any] | None = None


@dataclass
class Progress:
    """The progress of a run."""

    samples_seen: int = 0
    unsaved: bool = False  # whether there were steps since the last checkpoint
    first_wait: float | None = None  # seconds until the first batch of the run arrived


class Batches:
    """Waits for batches: a long wait is logged and has a limit, and a stop request ends it."""

    def __init__(self, settings: RunSettings, waiter: Waiter):
        self.settings, self.waiter = settings, waiter

    def of(self, loader: Any, name: str, first: float, later: float, **waiting: Any) -> Iterator[Any]:
        """Yield the batches of a loader.

        Raises StopAsked on a stop request, and Stalled when the first batch takes more than `first` seconds, or a later
        one more than `later`.
        """
        iterator, seconds = None, first
        while True:
            try:
                with self.waiter.waiting(name, seconds, **waiting):
                    iterator = iterator or iter(loader)
                    batch = next(iterator, END)
            except TooLong:
                raise Stalled(
                    f"Rank {self.settings.rank} waited {seconds:.0f} s for {name} in vain: the data or "
                    f"its workers are stuck. {last_checkpoint(self.settings.checkpoints)} See --rank-timeout-minutes."
                ) from None
            if batch is END:
                return
            seconds = later
            yield batch

    def of_validation(self, loader: Any) -> Iterator[Any]:
        limit = START_UP_TIMEOUT.total_seconds()
        return self.of(loader, "a batch of the validation", first=limit, later=limit, patience=0.0)


class EpochSteps:
    """The steps of one epoch.

    Arguments:
        index: the index of the epoch.
        start: the position at which it starts.
        save: a function that saves a checkpoint, given the number of batches of the epoch that are done.
        stop: a function that ends the run, given a function that saves a checkpoint and the number of steps so far.
        supports_position: whether the loader can start at the batch of `start`; otherwise batches are skipped.
        augment: a function of (batch, index of the epoch, index of the batch) that returns the batch to train on.
        before_first: a function that is called with the first batch, before its step.
    """

    def __init__(
        self,
        index: int,
        start: EpochStart,
        settings: RunSettings,
        coordinator: RankCoordinator,
        monitor: Monitor,
        progress: Progress,
        batches: Batches,
        *,
        save: Callable[[int], None],
        stop: Callable[[Callable[[], None], int], None],
        supports_position: bool,
        tb_writer: Any,
        augment: Callable[[Any, int, int], Any] | None = None,
        before_first: Callable[[Any], None] = lambda _batch: None,
    ):
        self.index, self.start, self.settings, self.coordinator = index, start, settings, coordinator
        self.monitor, self.progress, self.waited = monitor, progress, batches
        self.save, self.stop = save, stop
        self.supports_position, self.tb_writer, self.augment = supports_position, tb_writer, augment
        self.before_first = before_first
        self.batches_done, self.accumulated = start.batch, 0
        self.start_rng: dict[str, Any] | None = None  # the state at the epoch's start, by which open_clip shuffles

    def __call__(self, loader: Any) -> Iterator[tuple[int, Any]]:
        """Yield (index, batch) for open_clip's loop."""
        settings, first, restored = self.settings, self.start.batch, self.start.restored
        if not self.supports_position:
            if first and restored and len(restored.get("epoch_rng") or ()) == settings.world_size:
                rng.restore(restored["epoch_rng"][settings.rank], settings.device)
            self.start_rng = rng.state(settings.device)
        try:
            iterator = self._first_waited(loader)
            if first and not self.supports_position:
                logging.info("Skipping %d batches that were seen before the restart.", first)
                for _ in range(first):
                    next(iterator)
            if restored and len(restored["rng"]) == settings.world_size:
                rng.restore(restored["rng"][settings.rank], settings.device)
            yield from self.steps(iterator, loader.num_batches)
        except StopAsked:
            if not self.coordinator.all_wait():
                raise Stalled(
                    f"Asked to stop while rank {settings.rank} waited for data that another rank had: nothing could be "
                    f"saved. {last_checkpoint(settings.checkpoints)} Start again with --resume latest."
                ) from None
            self.progress.samples_seen -= self.accumulated * settings.samples_per_batch
            per_epoch = loader.num_batches // settings.accum_freq
            self._stop(self.index * per_epoch + self.batches_done // settings.accum_freq)

    def _first_waited(self, loader: Any) -> Iterator[Any]:
        """Return the batches, once the first one has arrived and the workers have been started."""
        stall, since = 60 * self.settings.rank_timeout_minutes, time.monotonic()
        wait = self.progress.first_wait
        # Buffers are filled before the first batch of each epoch, which takes about as long every time.
        longest = START_UP_TIMEOUT.total_seconds() if wait is None else max(stall, 10 * wait)
        iterator = self.waited.of(loader, f"a batch of epoch {self.index}", longest, stall)
        with signals_blocked():  # the workers are started here
            head = list(itertools.islice(iterator, 1))
        self.progress.first_wait = wait or time.monotonic() - since
        return itertools.chain(head, iterator)

    def steps(self, iterator: Iterator[Any], batches: int) -> Iterator[tuple[int, Any]]:
        settings, first, accum = self.settings, self.start.batch, self.settings.accum_freq
        per_epoch, per_batch = batches // accum, settings.samples_per_batch
        bar = progress_bar(self.index, batches * per_batch, first * per_batch, settings.rank)
        with contextlib.closing(bar):
            for i, batch in enumerate(iterator, first):
                in_epoch = i // accum
                step = self.index * per_epoch + in_epoch
                logged = in_epoch % settings.log_every_n_steps == 0 or in_epoch + 1 == per_epoch
                self.monitor.loss.before_step(step, self.index, logged)
                batch = batch if self.augment is None else self.augment(batch, self.index, i)
                if i == first:
                    self.before_first(batch)
                yield i, batch
                self.progress.samples_seen += per_batch
                self.accumulated += 1
                bar.update(per_batch)
                if (i + 1) % accum:
                    continue
                self.batches_done, self.accumulated, self.progress.unsaved = i + 1, 0, True
                if i + 1 == first + accum:
                    self.coordinator.expect_steps(running=True)
                if logged:
                    self.monitor.report(step, self.progress.samples_seen, self.tb_writer)
                stop, wants_save = self.coordinator.after_step()
                if i + 1 < batches:  # otherwise the end-of-epoch checkpoint follows at once
                    if stop:
                        self._stop(step + 1)
                    if wants_save:
                        self.save(i + 1)

    def _stop(self, step: int) -> None:
        self.stop(lambda: self.save(self.batches_done), step)
