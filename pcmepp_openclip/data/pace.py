"""The rate of a source: a notice for a slow one, a time-out for one that delivers next to nothing."""

import logging
import time

SLOW_NOTICE_S = 10.0  # waiting time after which a slow source is reported
SLOW_BYTES_PER_S = 10_000  # a source below this rate is reported
MIN_BYTES_PER_S = 1_000  # a source below this rate for PATIENCE_S is reconnected
PATIENCE_S = 30.0
COMMAND_PATIENCE_S = 600.0  # a command may fetch everything before it prints its first byte


class Pace:
    """Measures the rate of a source while its reader waits. Time that the reader spends elsewhere does not count.

    Every wait must be reported to `received`, including waits for a connection, at least every `SLOW_NOTICE_S`.

    Arguments:
        name: the source as messages may show it.
        patience_s: how long the rate may stay below `MIN_BYTES_PER_S`.
    """

    def __init__(self, name: str, patience_s: float):
        self._name, self._patience_s = name, patience_s
        self._last = time.monotonic()
        self._seconds, self._bytes = 0.0, 0  # since the rate was last computed
        self._slow_s, self._next_notice_s, self._stalled_s = 0.0, SLOW_NOTICE_S, 0.0
        self.failures = 0  # consecutive time-outs

    def start_waiting(self) -> None:
        self._last = time.monotonic()

    def received(self, count: int) -> None:
        """Report that `count` bytes arrived, possibly none. Raises TimeoutError if the rate stays too low."""
        now = time.monotonic()
        self._seconds, self._bytes, self._last = self._seconds + now - self._last, self._bytes + count, now
        if self._seconds < SLOW_NOTICE_S:
            return
        seconds, rate = self._seconds, self._bytes / self._seconds
        self._seconds, self._bytes = 0.0, 0
        if rate >= MIN_BYTES_PER_S:
            self._stalled_s, self.failures = 0.0, 0
        else:
            self._stalled_s += seconds
        if rate < SLOW_BYTES_PER_S:
            self._slow_s += seconds
            if self._slow_s >= self._next_notice_s:
                self._next_notice_s = 2 * self._slow_s
                # The name comes last: a filter that redacts commands takes what follows for their arguments.
                logging.warning("Data: waited %.0f s at %.0f bytes per second for %s", self._slow_s, rate, self._name)
        if self._stalled_s >= self._patience_s:
            self._stalled_s = 0.0
            self.failures += 1
            raise TimeoutError
