"""How the benchmarks measure: us and the alternative on the same work, in turns, as a ratio with its spread."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio of ours to theirs and the bar it should stay under.

    Arguments:
        ours, theirs: medians, in `unit`.
        spread: of the ratio over the repeats, the middle half of them; None for counts.
        bar: the highest ratio that is claimed, or None where nothing is.
        least: the bar is a lowest ratio instead.
        note: what else should be known of it.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    bar: float | None = None
    spread: tuple[float, float] | None = None
    least: bool = False
    note: str = ""

    @property
    def ratio(self) -> float:
        """The middle of the repeats' ratios is within the spread; this ratio of medians may be a little off it."""
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        held = {value >= self.bar if self.least else value <= self.bar for value in self.spread or (self.ratio,)}
        if len(held) == 2:
            return "too wide a spread to say"
        return "met" if held.pop() else "not met"


def row(what: str, pairs: Sequence[tuple[float, float]], unit: str, bar: float | None = None, **more: Any) -> Row:
    """A row of repeats (ours, theirs), each pair measured one right after the other."""
    ratios = [a / b for a, b in pairs]
    quarters = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios
    ours, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
    return Row(what, ours, theirs, unit, bar, (quarters[0], quarters[-1]), **more)


def timed(
    what: str,
    ours: Callable,
    theirs: Callable,
    bar: float | None,
    repeats: int = 5,
    before: Callable = lambda: None,
    **more: Any,
) -> Row:
    """Seconds of both, in turns, after a warm-up of each; who begins changes, so that neither is always second.

    `before` is called before each, and not timed.
    """
    pairs = []
    for number in range(repeats + 1):
        seconds = {}
        for work in (ours, theirs) if number % 2 else (theirs, ours):
            before()
            start = time.perf_counter()
            work()
            seconds[work] = time.perf_counter() - start
        pairs.append((seconds[ours], seconds[theirs]))
    return row(what, pairs[1:], "s", bar, **more)


def elsewhere(module: str, *arguments: object) -> Any:
    """What `python -m MODULE ARGUMENTS` prints last, as JSON: for what must be measured in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory() -> float:
    """The most memory, in MB, that this process has held since `reset_peak_memory`. Linux only."""
    return _status("VmHWM")


def reset_peak_memory() -> float:
    """Forget the peak so far; the MB that the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024
