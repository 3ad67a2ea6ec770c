"""Waiting that is heard of and can end: for data, and for a validation.

The main thread may wait in any code, a DataLoader's or a reader's own. A timer that only runs meanwhile interrupts it
every second; the handler says that the run waits, and ends the wait if the run was asked to stop or nothing came for
too long.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FIRST_WARNING_S = 10.0  # seconds; the next words come after twice the time
TICK_S = 1.0
PATIENCE_S = 5.0  # seconds that data may still take once a stop was asked for


class StopAsked(BaseException):
    """The run was asked to stop while it waited. Not an Exception: a reader must not take it for a bad sample."""


class TooLong(BaseException):
    """Nothing came for the whole time."""


@dataclass
class _Wait:
    what: str
    limit: float
    patience: float
    since: float = field(default_factory=time.monotonic)
    next_warning_s: float = FIRST_WARNING_S


class Waiter:
    """Watches over the waits of the main thread.

    Arguments:
        stop_asked: whether the run was asked to stop.
    """

    def __init__(self, stop_asked: Callable[[], bool]):
        self._stop_asked = stop_asked
        self._wait: _Wait | None = None

    @contextlib.contextmanager
    def waiting(self, what: str = "", limit: float = math.inf, patience: float = PATIENCE_S) -> Iterator[None]:
        """StopAsked in the body if a stop is asked for and `patience` seconds have passed; TooLong after `limit`.
        Without `what` nothing is said. May be nested."""
        outer, self._wait = self._wait, _Wait(what, limit, patience)
        before = signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, min(TICK_S, limit), TICK_S)
        try:
            yield
        finally:
            self._wait = outer  # first: a tick that is under way must not be raised outside
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
        if wait.what and waited >= wait.next_warning_s:
            wait.next_warning_s = 2 * waited
            logging.warning("Waiting for %s for %.0f s now; after %.0f s the run ends.", wait.what, waited, wait.limit)
