"""The batches of an epoch: waits have a limit, a stop request ends them, and a resumed epoch begins in its middle."""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..host.data import image_and_text
from ..runs import rng
from ..system.errors import RunFailed
from ..system.processes import signals_blocked
from .config import RunConfig
from .coordination import START_UP_TIMEOUT, RankCoordinator
from .monitor import last_checkpoint, progress_bar
from .waits import StopAsked, TooLong, Waiter

__all__ = ["Batches", "EpochStart", "StopAsked", "Waiter", "epoch_batches", "progress_bar"]
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


class Batches:
    """Waits for batches: a long wait is logged and has a limit, and a stop request ends it."""

    def __init__(self, settings: RunConfig, waiter: Waiter):
        self.settings, self.waiter = settings, waiter
        self.first_wait: float | None = None  # seconds until the first batch of the run arrived

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

    def of_epoch(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch, after the first one has arrived and the workers have been started."""
        stall, since = 60 * self.settings.rank_timeout_minutes, time.monotonic()
        # Buffers are filled before the first batch of each epoch, which takes about as long every time.
        longest = START_UP_TIMEOUT.total_seconds() if self.first_wait is None else max(stall, 10 * self.first_wait)
        iterator = self.of(loader, f"a batch of epoch {epoch}", longest, stall)
        with signals_blocked():  # the workers are started here
            head = list(itertools.islice(iterator, 1))
        self.first_wait = self.first_wait or time.monotonic() - since
        return itertools.chain(head, iterator)

    def of_validation(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a validation, which a stop request ends at once."""
        limit = START_UP_TIMEOUT.total_seconds()
        return self.of(loader, "a batch of the validation", first=limit, later=limit, patience=0.0)


def starts_anywhere(train: Any) -> bool:
    """Return whether training data can be entered at any batch; others skip the batches before it."""
    return hasattr(train, "position")


def start_random_numbers(train: Any, start: EpochStart, settings: RunConfig) -> dict[str, Any] | None:
    """Return the random numbers at the start of an epoch, by which open_clip's own loaders shuffle; None for ours.

    A resumed epoch is shuffled as it was before.
    """
    if starts_anywhere(train):
        return None
    before = (start.restored or {}).get("epoch_rng") or ()
    if start.batch and len(before) == settings.world_size:
        rng.restore(before[settings.rank], settings.device)
    return rng.state(settings.device)


def epoch_batches(
    train: Any, epoch: int, start: EpochStart, settings: RunConfig, batches: Batches
) -> Iterator[tuple[int, Any]]:
    """Yield (index, batch) of an epoch from its start on, with the random numbers of the checkpoint if it is resumed.

    Arguments:
        train: the training data, by open_clip's `DataInfo` or ours.
    """
    if starts_anywhere(train):
        train.set_epoch(epoch, first_batch=start.batch)
    else:
        train.set_epoch(epoch)
    iterator = batches.of_epoch(train.dataloader, epoch)
    if start.batch and not starts_anywhere(train):
        logging.info("Skipping %d batches that were seen before the restart.", start.batch)
        for _ in range(start.batch):
            next(iterator)
    if start.restored and len(start.restored["rng"]) == settings.world_size:
        rng.restore(start.restored["rng"][settings.rank], settings.device)
    yield from enumerate(map(image_and_text, iterator), start.batch)


def stop_while_waiting(coordinator: RankCoordinator, settings: RunConfig) -> None:
    """Agree with the other ranks to stop while this one waits for data; Stalled where another rank is in a step."""
    if not coordinator.all_wait():
        raise Stalled(
            f"Asked to stop while rank {settings.rank} waited for data that another rank had: nothing could be "
            f"saved. {last_checkpoint(settings.checkpoints)} Start again with --resume latest."
        ) from None
