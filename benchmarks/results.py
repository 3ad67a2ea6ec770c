"""The table of a run, as Markdown and as JSON, and its change against an earlier one."""

import dataclasses
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

from .measure import Row


def machine() -> str:
    """What the numbers came from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "open_clip_torch"))
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, {packages}"


def table(rows: list[Row], earlier: dict[str, float] | None = None) -> str:
    """The rows as Markdown; with the ratios of an `earlier` run, how they changed."""
    heads = ["what", "ours", "theirs", "ratio", "spread", "bar", "", *(["earlier", "change"] if earlier else [])]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}" if row.spread else ""
        bar = "" if row.bar is None else f"{'≥' if row.least else '≤'} {row.bar:.4g}"
        verdict = "; ".join(filter(None, (row.verdict, row.note)))
        cells = [row.what, *(f"{value:.4g} {row.unit}".strip() for value in (row.ours, row.theirs))]
        cells += [f"{row.ratio:.3f}", spread, bar, verdict]
        if earlier:
            before = earlier.get(row.what)
            cells += ["", "new"] if before is None else [f"{before:.3f}", f"{100 * (row.ratio / before - 1):+.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: list[Row], folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"{text}\n\n{machine()}\n")
    records = [{**dataclasses.asdict(row), "ratio": row.ratio, "verdict": row.verdict} for row in rows]
    (folder / "table.json").write_text(json.dumps({"machine": machine(), "rows": records}, indent=1) + "\n")


def read(path: Path) -> dict[str, float]:
    """The ratios of an earlier run, by row."""
    try:
        return {row["what"]: float(row["ratio"]) for row in json.loads(path.read_text())["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--compare: {path} is not a table.json of an earlier run ({error}).") from error
