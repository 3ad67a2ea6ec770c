"""The method of the benchmarks: this package and the alternative do the same work in turns.

The result is the ratio of both with its spread.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.context import BaseContext
from pathlib import Path
from random import Random
from typing import Any

import torch

CONFIDENCE = 0.9


@dataclass(frozen=True)
class Row:
    """One row of the table: a ratio of ours to theirs, and the bar it should stay below.

    Arguments:
        ours, theirs: counts, or medians of the repeats, in `unit`.
        bar: the highest ratio that is claimed, or None if nothing is claimed.
        repeats: the pairs (ours, theirs), measured one right after the other; none for counts.
        least: whether the bar is a lowest ratio instead.
        note: a remark that is shown in the last column.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    bar: float | None = None
    repeats: tuple[tuple[float, float], ...] = ()
    least: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Return the interval in which the ratio would lie if everything were measured again, see `resampled`."""
        return resampled(self.repeats) if len(self.repeats) > 1 else None

    @property
    def verdict(self) -> str:
        low, high = self.spread or (self.ratio, self.ratio)
        if self.bar is None:
            return ""
        held = {value >= self.bar if self.least else value <= self.bar for value in (low, high)}
        if len(held) == 2:
            return "bar within the spread"
        return "met" if held.pop() else "not met"


def resampled(repeats: Sequence[tuple[float, float]], draws: int = 2000) -> tuple[float, float]:
    """Return a bootstrap interval, in which the ratio of medians lies in `CONFIDENCE` of the draws.

    Pairs are drawn as pairs, because a machine that is slow for a while is slow for both.
    """
    random = Random(0)
    ratios = []
    for _ in range(draws):
        ours, theirs = zip(*random.choices(repeats, k=len(repeats)), strict=True)
        ratios.append(statistics.median(ours) / statistics.median(theirs))
    ratios.sort()
    beyond = round((1 - CONFIDENCE) / 2 * draws)
    return ratios[beyond], ratios[-1 - beyond]


def row(
    what: str, ours: Sequence[float], theirs: Sequence[float], unit: str, bar: float | None = None, **more: Any
) -> Row:
    """Return a row of repeats. The first of ours was measured right beside the first of theirs, and so on."""
    repeats = tuple(zip(ours, theirs, strict=True))
    return Row(what, statistics.median(ours), statistics.median(theirs), unit, bar, repeats, **more)


def turns(
    works: Sequence[Callable[[], Any]], repeats: int, before: Callable[[], Any] = lambda: None
) -> list[list[float]]:
    """Return the seconds of each work, after a warm-up. The works alternate, and their order is reversed every time.

    `before` is called before each work, and is not timed.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        order = list(zip(works, seconds, strict=True))
        for work, its in order if turn % 2 else reversed(order):
            before()
            start = time.perf_counter()
            work()
            its.append(time.perf_counter() - start)
    return [its[1:] for its in seconds]


def timed(
    what: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    bar: float | None,
    repeats: int = 5,
    before: Callable[[], Any] = lambda: None,
) -> Row:
    """Return a row that compares the time of two works."""
    our_seconds, their_seconds = turns((ours, theirs), repeats, before)
    return row(what, our_seconds, their_seconds, "s", bar)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> contextlib.AbstractContextManager[None]:
    """Compute on one thread, for long work: two threads that wait for each other are as slow as the slower core."""
    return threads(1)


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Run as many other processes that never wait, as on a machine that is shared."""
    context = multiprocessing.get_context("spawn")
    neighbours = [context.Process(target=_never_wait, daemon=True) for _ in range(number)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.join()


def _never_wait() -> None:
    while True:
        pass


def new_processes() -> BaseContext:
    """Return a context that starts processes in which only imports have run, once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["open_clip", "pcmepp_openclip"])
    return context


def alone(function: Callable, *calls: tuple) -> list:
    """Return the results of a function for the arguments of each call, each in a new process.

    Only imports have run in a new process. The processes run in parallel, each on one thread: use this for memory, not
    for time.
    """
    context = new_processes()
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ProcessPoolExecutor(1, context, _start_alone)) for _ in calls]
        futures = [pool.submit(function, *call) for pool, call in zip(pools, calls, strict=True)]
        return [future.result() for future in futures]


def _start_alone() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    # Otherwise the C library keeps freed blocks, and the peak would depend on how well they fit later ones.
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)


def added_memory(work: Callable[[], Any]) -> float:
    """Return the peak memory of a work in MB, beyond the memory of the process before it. Linux only.

    Call it with `alone`.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024
