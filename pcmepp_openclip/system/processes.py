"""Child processes: end them with this one, whatever ends it, and hide signals from them."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # these ask a run to save and end
EXIT_TIMEOUT_S = 20.0  # seconds that a process with nothing left to do may take to end
_PR_SET_PDEATHSIG = 1

_starting_workers = False  # True while a child that is forked belongs to this process alone
_parent = 0


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Hide the signals from processes that are started meanwhile: a job's TERM or Ctrl-C must not kill a rank's data
    workers before the rank has stopped. They die with this process, and by `end_children`. The thread of
    `RankCoordinator` notes those that come in meanwhile."""
    global _starting_workers
    _watch_forks()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT})
    outer, _starting_workers = _starting_workers, True
    try:
        yield
    finally:
        _starting_workers = outer
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _before_fork() -> None:
    global _parent
    # The system watches the thread that forks: a thread that ends before the process would get its child killed.
    mine = _starting_workers and threading.current_thread() is threading.main_thread()
    _parent = os.getpid() if mine else 0


def _die_with_parent() -> None:
    """Have the system kill this new child when its parent dies, even if it is stopped or spins."""
    global _starting_workers
    _starting_workers = False
    if _parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != _parent:  # the parent died meanwhile
            os._exit(1)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(before=_before_fork, after_in_child=_die_with_parent)


def end_children(spared: Iterable[Any] = ()) -> None:
    """Kill the processes that `multiprocessing` has started here and what those have started, but not the `spared`.

    It sends SIGKILL: data workers ignore TERM, and one that is stopped or stuck would obey nothing else."""
    kept = {child.pid for child in spared}
    children = [child for child in multiprocessing.active_children() if child.pid not in kept]
    if not children:
        return
    # torch's own handler would raise an error for each child.
    before = signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    try:
        _kill(children)
        for child in children:
            child.join(EXIT_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGCHLD, before)


def kill_children() -> None:
    """Kill the children from any thread, right before the process ends itself, and wait for none of them."""
    _kill(multiprocessing.active_children())


def _kill(children: Iterable[Any]) -> None:
    pids = [pid for child in children for pid in (child.pid, *_descendants(child.pid))]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int | None) -> list[int]:
    """Return the ids of the processes that a data worker has started, such as commands that it reads from, on Linux."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                pids += [child, *_descendants(child)]
    return pids


def leave_soon(code: int) -> None:
    """End the process after a while even if a thread of a library or the lock of a dead worker hangs.

    Call it last of all."""

    def end() -> None:
        time.sleep(EXIT_TIMEOUT_S)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()
