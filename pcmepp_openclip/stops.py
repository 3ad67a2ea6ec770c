"""How the ranks of a run agree, between steps, to save or to stop.

TERM or USR2 to any rank, or a file `stop` in the run folder, asks for a stop; the clock of rank 0 asks for a save. A
signal is only noted. Every few steps the ranks take the maximum of their wishes in one small all-reduce over CPUs,
which does not wait for a GPU, and so all act at the same step. A second signal ends a process at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXIT_STOPPED = 75  # what the launch scripts know as: saved, start me again
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
SAME_REQUEST = 3.0  # seconds within which a signal is the first one again: Slurm and torchrun both send it
AGREE_SECONDS = 2.0  # about how often the ranks ask each other
START_UP = timedelta(hours=1)  # for building, resuming, compiling and evaluating


_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch < 2.15


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are started meanwhile never see the signals: a job's TERM must not kill a rank's data workers
    before the rank has stopped. What comes in meanwhile is noted afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stopped(Exception):
    """All ranks have saved and leave."""


class Agreement:
    """The wishes of all ranks.

    Arguments:
        args: open_clip's arguments, with `save_every_minutes` and `stall_minutes`.
    """

    def __init__(self, args: Any):
        self.args = args
        self.folder: Path = Path(args.logs) / args.name
        self.first_signal: float | None = None
        self.saved_at = time.monotonic()
        self.asked_at = time.monotonic()
        self.interval = self.countdown = 1
        self.wants_stop = False
        self.group: Any = dist.new_group(backend="gloo", timeout=START_UP) if args.distributed else None
        self._listen()

    def _listen(self) -> None:
        """Take note of signals in a thread: Python's own handlers wait while a collective does."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, lambda _number, _frame: None)
        signal.set_wakeup_fd(writer)
        threading.Thread(target=self._note, args=(reader,), daemon=True).start()

    def _note(self, reader: int) -> None:
        while True:
            number = os.read(reader, 1)[0]
            if number not in SIGNALS:
                continue
            if self.first_signal is None:
                self.first_signal = time.monotonic()
            elif time.monotonic() - self.first_signal > SAME_REQUEST:
                os._exit(128 + number)

    @property
    def stop_file(self) -> Path:
        return self.folder / "stop"

    def after_step(self) -> tuple[bool, bool]:
        """(stop, save), the same on every rank. To be called by all of them behind every step."""
        self.countdown -= 1
        if self.countdown > 0:
            return False, False
        now = time.monotonic()
        lead = self.args.rank == 0
        minutes = self.args.save_every_minutes
        stop = self.first_signal is not None or (lead and self.stop_file.exists())
        save = lead and minutes > 0 and now - self.saved_at >= 60 * minutes
        steps = round(self.interval * AGREE_SECONDS / max(now - self.asked_at, 1e-3)) if lead else 0
        wishes = torch.tensor([stop, save, min(max(steps, 1), 10)], dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(wishes, dist.ReduceOp.MAX, group=self.group)
        self.asked_at, self.interval = now, int(wishes[2])
        self.countdown = self.interval
        self.wants_stop = bool(wishes[0])
        return self.wants_stop, bool(wishes[1])

    def saved(self) -> None:
        self.saved_at = time.monotonic()

    def gather(self, item: Any) -> list[Any]:
        """`item` of every rank, on every rank."""
        if self.group is None:
            return [item]
        items = [None] * self.args.world_size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def expect_steps(self, running: bool) -> None:
        """Tight time-outs while steps run, generous ones around them, so that a rank that stalls ends the job."""
        if self.group is not None:
            limit = timedelta(minutes=self.args.stall_minutes) if running else START_UP
            for group in (self.group, dist.group.WORLD):
                _set_timeout(limit, group)

    def mark(self, name: str, text: str) -> None:
        """A file in the run folder that tells the launch scripts how the run ended: `done` or `stopped`."""
        if self.args.rank == 0:
            for other in {"done", "stopped"} - {name}:
                (self.folder / other).unlink(missing_ok=True)
            (self.folder / name).write_text(text + "\n")
            self.stop_file.unlink(missing_ok=True)
