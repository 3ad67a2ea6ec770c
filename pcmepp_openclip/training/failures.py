"""End all ranks when one fails: at once, on all nodes, with the message of the one that failed.

Otherwise the others would wait for it in a collective until the time-out. A rank that fails puts its message into the
store of the process group. A thread of every rank looks for one every two seconds, which is one small request, and ends
the process even if its main thread is blocked.

The error files of torchrun (`torch.distributed.elastic...errors.record`) are not enough: only its agent reads them, on
its own node, and gives the other ranks half a minute; under srun there is no agent.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from ..system import network
from ..system.errors import RunFailed
from ..system.processes import kill_children
from ..system.redact import printable, redact
from .coordination import Stopped

INTERVAL_S = 2.0  # the time between two looks
EXIT_TIMEOUT_S = 30.0  # the time that the last checkpoint has to reach the disk
SEEN_TIMEOUT_S = 3 * INTERVAL_S  # the time that the other ranks have to see a failure
REPORT_TIMEOUT_S = 3 * SEEN_TIMEOUT_S  # the time that the store has to answer
KEY = "pcmepp/failure"
SEEN = "pcmepp/failure/seen"


class Failure(NamedTuple):
    """A failed rank, as the other ranks learn of it.

    Arguments:
        group: the index of its node, "" if the launcher gives none.
        code: its exit code.
    """

    rank: int
    host: str
    group: str
    code: int
    sentence: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed: {self.sentence}"


class OtherRankFailed(RunFailed):
    """Raised in place of an error that follows from the failure of another rank, such as a lost connection."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class FailureWatch:
    """The context in which a rank trains: an exception that leaves it ends the other ranks, and theirs end this one.

    Arguments:
        rank, world_size: this rank and the number of ranks, as the launcher gives them.
        leads_node: whether this rank prints the message of a rank that failed on another node.
        before_exit: a function that is called before the thread ends the process.
    """

    def __init__(self, rank: int, world_size: int, leads_node: bool, before_exit: Callable[[], None]):
        self.rank, self.world_size, self.leads_node, self.before_exit = rank, world_size, leads_node, before_exit
        self.node = socket.gethostname(), os.environ.get("GROUP_RANK", "")
        self._store: Any = None
        self._closed = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends the process
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look for failures from now on; without a process group there is nothing to look for."""
        self._store = network.run_store() if self.world_size > 1 else None
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="failures")
            self._thread.start()

    def __enter__(self) -> "FailureWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        first = self._reported(error) if error is not None and not isinstance(error, Stopped) else None
        self._close()
        if first is not None and first.rank != self.rank and not isinstance(error, KeyboardInterrupt):
            raise OtherRankFailed(first) from None

    def say(self, failure: Failure) -> None:
        """Print a failure once per node. On the node of the failed rank, that rank prints its own error."""
        if self.leads_node and self.node != (failure.host, failure.group):
            print(f"pcmepp train: {printable(str(failure))}", file=sys.stderr, flush=True)

    def _reported(self, error: BaseException) -> Failure | None:
        """Return the first failure of the run, or None if the store does not answer because its rank is stopped."""
        failures: list[Failure | None] = []
        thread = threading.Thread(target=lambda: failures.append(self._report(error)), daemon=True)
        thread.start()
        thread.join(REPORT_TIMEOUT_S)
        return failures[0] if failures else None

    def _report(self, error: BaseException) -> Failure | None:
        """Return the first failure of the run, which is this one if no other rank has failed before."""
        self._store = self._store or (network.run_store() if self.world_size > 1 else None)
        if self._store is None:
            return None
        mine = Failure(self.rank, *self.node, *_code_and_sentence(error))
        try:
            first = Failure(*json.loads(self._store.compare_set(KEY, "", json.dumps(mine))))
            self._let_others_see()
        except RuntimeError:  # the store has ended with the node that held it
            return None
        return first

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            try:
                if not self._store.check([KEY]):
                    continue
                failure = Failure(*json.loads(self._store.get(KEY)))
            except RuntimeError:
                return
            if failure.rank != self.rank and self._ending.acquire(blocking=False):
                self._end(failure)
            return

    def _end(self, failure: Failure) -> None:
        threading.Timer(EXIT_TIMEOUT_S, os._exit, (failure.code,)).start()
        self.say(failure)
        with contextlib.suppress(Exception):
            self._let_others_see()
            self.before_exit()
        kill_children()
        os._exit(failure.code)

    def _let_others_see(self) -> None:
        """Wait until all ranks have looked, if this node or rank holds the store that they look into."""
        seen = self._store.add(SEEN, 1)
        end = time.monotonic() + SEEN_TIMEOUT_S
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, on the first node
        holds_store = os.environ.get("GROUP_RANK") == "0" if by_agent else self.rank == 0
        while holds_store and seen < self.world_size and time.monotonic() < end:
            time.sleep(0.05)
            seen = self._store.add(SEEN, 0)

    def _close(self) -> None:
        self._closed.set()
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the thread ends the process
        if self._thread is not None:
            self._thread.join(INTERVAL_S)


def _code_and_sentence(error: BaseException) -> tuple[int, str]:
    """Return the exit code that `pcmepp` has for an error, and what other ranks learn of it."""
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, ValueError) else 1
    lines = str(error).strip().splitlines()
    named = isinstance(error, (ValueError, RunFailed))
    return code, redact(str(error) if named else ": ".join([type(error).__name__, *lines[:1]]))
