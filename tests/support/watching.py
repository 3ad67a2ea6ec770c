"""Runs watched from outside: waits for what they log, and the processes that they start."""

import re
import time
from pathlib import Path


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def log_of(run):
    """The log of a run folder, "" before there is one."""
    path = run / "out.log"
    return path.read_text() if path.exists() else ""


def in_middle(run, epoch=0, samples=32):
    """Whether a run has logged a step of an epoch, by the samples that it has seen of it."""
    return re.search(rf"Train Epoch: {epoch} \[ *{samples}/", log_of(run)) is not None


def children(pid: int) -> list[int]:
    """The processes that a process has started, from any thread."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
