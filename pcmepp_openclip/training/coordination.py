"""Let the ranks of a run agree, between steps, to save or to stop.

TERM or USR2 to any rank, or a file `stop` in the run folder, asks for a stop; the clock of rank 0 asks for a save. A
signal is only noted. Every few steps the ranks take the maximum of their wishes in one small all-reduce over CPUs,
which does not wait for a GPU, and so all act at the same step. A second signal ends a process at once.

However a run ends, its data workers are ended by `end_children`, since they do not hear TERM, or by the system if the
rank was killed.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..system import network
from ..system.processes import STOP_SIGNALS

EXIT_STOPPED = 75  # tells the launch scripts: saved, start again
SAME_REQUEST_S = 3.0  # signals within this time count as one: Slurm and torchrun both send it
AGREE_EVERY_S = 2.0  # the ranks communicate about this often
START_UP_TIMEOUT = timedelta(hours=1)  # the limit for building, resuming, compiling and evaluating
ALL_WAIT_TIMEOUT = timedelta(seconds=20)  # the time that all ranks have to agree that they wait for data
SAVE_RETRY_S = 60.0  # a failed save is retried after this time
LEAVE_TIMEOUT_S = 10.0  # the main thread has this time to notice Ctrl-C, which it cannot within a collective

_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch < 2.15


class Stopped(Exception):
    """Raised on all ranks, after they have saved, to end the run."""


class RankCoordinator:
    """Lets all ranks save or stop at the same step.

    Arguments:
        folder: the run folder.
        save_every_minutes: how often all ranks are asked to save; 0 for never.
        timeout_minutes: how long a rank may take for a step before the others give up.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        distributed: bool,
        save_every_minutes: float,
        timeout_minutes: float,
    ):
        self.folder, self.rank, self.world_size, self.stop_file = folder, rank, world_size, folder / "stop"
        self.save_every_minutes, self.timeout = save_every_minutes, timedelta(minutes=timeout_minutes)
        self.first_signal: float | None = None
        self.saved_at = self.asked_at = time.monotonic()
        self.interval = self.countdown = 1
        self.wants_stop = False
        self.leaving = False  # the main thread is ending the run
        self.group: Any = network.cpu_group(START_UP_TIMEOUT) if distributed else None
        self._ranks = self.gather((socket.gethostname(), os.getpid()))
        self._listen()

    def _listen(self) -> None:
        """Take note of signals in a thread: Python's own handlers wait while a collective does."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for stop_signal in STOP_SIGNALS:
            signal.signal(stop_signal, lambda _signal, _frame: None)
        signal.set_wakeup_fd(writer)
        threading.Thread(target=self._note, args=(reader,), daemon=True).start()

    def _note(self, reader: int) -> None:
        while True:
            received = os.read(reader, 1)[0]
            if received == signal.SIGINT:
                threading.Thread(target=self._leave_anyway, daemon=True).start()
            if received not in STOP_SIGNALS:
                continue
            if self.first_signal is None:
                self.first_signal = time.monotonic()
            elif time.monotonic() - self.first_signal > SAME_REQUEST_S:
                os._exit(128 + received)

    def _leave_anyway(self) -> None:
        """End the process some seconds after Ctrl-C, even if the main thread is blocked by a rank that is gone."""
        time.sleep(LEAVE_TIMEOUT_S)
        if not self.leaving:
            os._exit(128 + signal.SIGINT)

    def leave(self, failed: bool) -> None:
        """Note that the main thread is ending the run.

        After a failure it wakes up the other ranks of this machine: a rank that was stopped by a signal then notices
        the failure and ends too, instead of keeping the job until it is killed.
        """
        self.leaving = True
        for host, pid in self._ranks if failed else ():
            if host == socket.gethostname() and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)

    def stop_asked(self) -> bool:
        """Return whether this rank knows of a stop request; the other ranks may not yet."""
        return self.wants_stop or self.first_signal is not None or self.stop_file.exists()

    def ask_stop(self) -> None:
        """Pass a request to stop on to ranks that received no signal."""
        self.stop_file.touch()

    def after_step(self) -> tuple[bool, bool]:
        """Return (stop, save), the same on every rank. Must be called on every rank after every step."""
        self.countdown -= 1
        if self.countdown > 0:
            return False, False
        now = time.monotonic()
        lead = self.rank == 0
        minutes = self.save_every_minutes
        stop = self.first_signal is not None or (lead and self.stop_file.exists())
        save = lead and minutes > 0 and now - self.saved_at >= 60 * minutes
        steps = round(self.interval * AGREE_EVERY_S / max(now - self.asked_at, 1e-3)) if lead else 0
        wishes = torch.tensor([stop, save, min(max(steps, 1), 10)], dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self.group)
        self.asked_at, self.interval = now, int(wishes[2])
        self.countdown = self.interval
        self.wants_stop = bool(wishes[0])
        return self.wants_stop, bool(wishes[1])

    def saved(self, well: bool = True) -> None:
        """Restart the clock of --save-every-minutes. A failed save is retried after a minute."""
        minutes = self.save_every_minutes
        self.saved_at = time.monotonic() - (0 if well else max(0, 60 * minutes - SAVE_RETRY_S))

    def all_wait(self) -> bool:
        """Return whether all ranks wait for data, so that the run can stop here.

        It is called on a rank that waits for data and was asked to stop. A rank within a step cannot stop: its
        collectives need this one.
        """
        if self.group is None:
            return True
        try:
            self.ask_stop()
            dist.monitored_barrier(self.group, timeout=ALL_WAIT_TIMEOUT)
        except (OSError, RuntimeError):
            return False
        return True

    def gather(self, item: Any) -> list[Any]:
        """Return `item` of every rank, on every rank."""
        if self.group is None:
            return [item]
        items = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def expect_steps(self, running: bool) -> None:
        """Set tight time-outs while steps run and generous ones around them, so that a stalled rank ends the job."""
        if self.group is not None:
            limit = self.timeout if running else START_UP_TIMEOUT
            for group in (self.group, dist.group.WORLD):
                _set_timeout(limit, group)

    def mark(self, name: str, text: str) -> None:
        """Write a file into the run folder that tells the launch scripts how the run ended: `done` or `stopped`."""
        if self.rank == 0:
            for outdated in {"done", "stopped"} - {name}:
                (self.folder / outdated).unlink(missing_ok=True)
            temporary = self.folder / f".{name}.tmp"  # on a full disk, an empty file must not appear
            temporary.write_text(text + "\n")
            os.replace(temporary, self.folder / name)
            self.stop_file.unlink(missing_ok=True)
