"""How the benchmarks measure: us and the alternative in one process, in turns, as a ratio with its spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio of ours to theirs and the bar it should stay under.

    Arguments:
        ours, theirs: medians, in `unit`.
        spread: of the ratio over the repeats, from the lowest to the highest; 0 for counts.
        bar: the highest ratio that is claimed, or None where nothing is.
        least: the bar is a lowest ratio instead.
    """

    what: str
    ours: float
    theirs: float
    unit: str
    bar: float | None = None
    spread: tuple[float, float] | None = None
    least: bool = False

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return ""
        held = [value >= self.bar if self.least else value <= self.bar for value in (self.ratio, *(self.spread or ()))]
        if held[0] and not all(held):
            return "met, but the spread crosses the bar"
        return "met" if held[0] else "not met"


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 5) -> tuple:
    """(median seconds of ours, of theirs, (lowest, highest) ratio over the repeats), after one warm-up of each."""
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        pair = []
        for work in (theirs, ours):
            start = time.perf_counter()
            work()
            pair.append(time.perf_counter() - start)
        times.append((pair[1], pair[0]))
    times = times[1:]
    ratios = [a / b for a, b in times]
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), (min(ratios), max(ratios))


def timed(what: str, ours: Callable, theirs: Callable, bar: float | None, repeats: int = 5) -> Row:
    a, b, spread = interleaved(ours, theirs, repeats)
    return Row(what, a, b, "s", bar, spread)


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


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | ours | theirs | ratio | spread | bar | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}" if row.spread else ""
        bar = "" if row.bar is None else f"{'>=' if row.least else '<='} {row.bar:g}"
        values = f"{row.ours:.4g} {row.unit} | {row.theirs:.4g} {row.unit} | {row.ratio:.3f}"
        lines.append(f"| {row.what} | {values} | {spread} | {bar} | {row.verdict} |")
    return "\n".join(lines)
