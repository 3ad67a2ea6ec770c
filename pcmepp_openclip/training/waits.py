"""Waiting for batches: a long wait is logged and has a limit, and a stop request ends it.

The main thread may wait in any code, a DataLoader's or a reader's own. A timer that runs only during a wait interrupts
it every second; the handler logs a long wait, and ends it after a stop request or at its limit.
"""

import contextlib
import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..system.errors import RunFailed
from ..system.processes import signals_blocked
from .config import RunConfig
from .coordination import START_UP_TIMEOUT
from .monitor import last_checkpoint

FIRST_WARNING_S = 10.0  # the next warning comes after twice this time
TICK_S = 1.0
PATIENCE_S = 5.0  # how long data may still take after a stop request
END = object()


class StopAsked(BaseException):
    """A stop was requested during a wait. Not an Exception, so that a reader does not take it for a bad sample."""


class TooLong(BaseException):
    """A wait reached its limit."""


class Stalled(RunFailed):
    """No data arrived for too long, or a stop request could not be carried out."""


@dataclass
class _Wait:
    name: str
    limit: float
    patience: float
    since: float = field(default_factory=time.monotonic)
    next_warning_s: float = FIRST_WARNING_S


class Waiter:
    """Watches over the waits of the main thread.

    Arguments:
        stop_asked: whether the run was asked to stop.
    """

    def __init__(self, settings: RunConfig, stop_asked: Callable[[], bool]):
        self.settings, self._stop_asked = settings, stop_asked
        self.first_wait: float | None = None  # seconds until the first batch of the run arrived
        self._wait: _Wait | None = None

    @contextlib.contextmanager
    def waiting(self, name: str = "", limit: float = math.inf, patience: float = PATIENCE_S) -> Iterator[None]:
        """Raise StopAsked in the body on a stop request after `patience` seconds, and TooLong after `limit` seconds.

        Without a `name` nothing is logged. The context may be nested.
        """
        outer, self._wait = self._wait, _Wait(name, limit, patience)
        before = signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, min(TICK_S, limit), TICK_S)
        try:
            yield
        finally:
            self._wait = outer  # first, so that a pending tick raises nothing outside
            if outer is None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _tick(self, _signal: int, _frame: object) -> None:
        wait = self._wait
        if wait is None:
            return
        waited = time.monotonic() - wait.since
        if waited >= wait.patience and self._stop_asked():
            self._wait = None  # once is enough
            raise StopAsked
        if waited >= wait.limit:
            self._wait = None
            raise TooLong
        if wait.name and waited >= wait.next_warning_s:
            wait.next_warning_s = 2 * waited
            logging.warning("Waited %.0f s for %s; the run ends after %.0f s.", waited, wait.name, wait.limit)

    def batches(self, loader: Any, name: str, first: float, later: float, **waiting: Any) -> Iterator[Any]:
        """Yield the batches of a loader.

        Raises StopAsked on a stop request, and Stalled when the first batch takes more than `first` seconds, or a later
        one more than `later`.
        """
        iterator, seconds = None, first
        while True:
            try:
                with self.waiting(name, seconds, **waiting):
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

    def epoch(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Return the batches of an epoch, after the first one has arrived and the workers have been started."""
        stall, since = 60 * self.settings.rank_timeout_minutes, time.monotonic()
        # Buffers are filled before the first batch of each epoch, which takes about as long every time.
        longest = START_UP_TIMEOUT.total_seconds() if self.first_wait is None else max(stall, 10 * self.first_wait)
        iterator = self.batches(loader, f"a batch of epoch {epoch}", longest, stall)
        with signals_blocked():  # the workers are started here
            head = list(itertools.islice(iterator, 1))
        self.first_wait = self.first_wait or time.monotonic() - since
        return itertools.chain(head, iterator)

    def patient(self, loader: Any, name: str) -> Iterator[Any]:
        """Yield the batches of work that is no step, which may take long, and which a stop request ends at once."""
        limit = START_UP_TIMEOUT.total_seconds()
        return self.batches(loader, name, first=limit, later=limit, patience=0.0)
