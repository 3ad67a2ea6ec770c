"""The table of a run as Markdown and JSON, and the change against an earlier run."""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .measure import CONFIDENCE, Row

HEADS = ["what", "ours", "theirs", "ratio", "spread", "bar", ""]
LEGEND = f"Medians of alternating repeats; spread: {CONFIDENCE:.0%} bootstrap interval of the ratio."


def machine() -> str:
    """Return the machine and the versions that the numbers come from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "open_clip_torch"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {cpu}, {memory:.0f} GiB, Python {platform.python_version()}, {packages}"


def parser(command: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command that writes its table into a folder."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"python -m {command}", description=description, epilog=epilog, formatter_class=raw
    )
    folder = Path("benchmarks/results")
    parser.add_argument("--out", type=Path, default=folder, help="output folder (default: %(default)s)")
    return parser


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *body = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([first, "|---" * len(heads) + "|", *body])


def table(rows: list[Row], earlier: dict[str, dict[str, Any]] | None = None) -> str:
    """Return the rows as Markdown; given the rows of an `earlier` run, with the change."""
    heads = HEADS if earlier is None else [*HEADS, "earlier", "change"]
    lines = []
    for row in rows:
        bar = "" if row.bar is None else f"{'≥' if row.least else '≤'} {row.bar:.4g}"
        values = (f"{value:.4g} {row.unit}".strip() for value in (row.ours, row.theirs))
        spread = f"{number(row.spread[0])} to {number(row.spread[1])}" if row.spread else ""
        cells = [row.what, *values, number(row.ratio), spread, bar, "; ".join(filter(None, (row.verdict, row.note)))]
        if earlier is not None:
            before = earlier.get(row.what)
            cells += ["", "new"] if before is None else [number(before["ratio"]), change(row, before)]
        lines.append(cells)
    return markdown(heads, lines)


def number(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.1 else f"{ratio:.2g}"


def change(row: Row, before: dict[str, Any]) -> str:
    """Return the change in per cent, with a remark if the spreads overlap, since it then says nothing."""
    low, high = row.spread or (row.ratio, row.ratio)
    low_before, high_before = before["spread"] or (before["ratio"], before["ratio"])
    overlap = low <= high_before and low_before <= high and (row.spread or before["spread"])
    return f"{100 * (row.ratio / before['ratio'] - 1):+.1f} %{' (within the spread)' if overlap else ''}"


def write(rows: list[Row], folder: Path, text: str) -> None:
    records = [
        {**dataclasses.asdict(row), "ratio": row.ratio, "spread": row.spread, "verdict": row.verdict} for row in rows
    ]
    save(folder, "table", text, {"machine": machine(), "rows": records})


def save(folder: Path, name: str, text: str, content: Any) -> None:
    """Write NAME.md and NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the machine of an earlier run, and its rows by name."""
    try:
        run = json.loads(path.read_text())
        return run["machine"], {row["what"]: {key: row[key] for key in ("ratio", "spread")} for row in run["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--compare: {path} is not a table.json of an earlier run ({error!r}).") from error
