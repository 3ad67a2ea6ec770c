"""Waits for data and for a validation that are logged and have a limit.

The main thread may wait in any code, a DataLoader's or a reader's own. A timer that runs only during a wait interrupts
it every second; the handler logs a long wait, and ends it after a stop request or at its limit.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FIRST_WARNING_S = 10.0  # the next warning comes after twice this time
TICK_S = 1.0
PATIENCE_S = 5.0  # how long data may still take after a stop request


class StopAsked(BaseException):
    """A stop was requested during a wait. Not an Exception, so that a reader does not take it for a bad sample."""


class TooLong(BaseException):
    """A wait reached its limit."""


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

    def __init__(self, stop_asked: Callable[[], bool]):
        self._stop_asked = stop_asked
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
