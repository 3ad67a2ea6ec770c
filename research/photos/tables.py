"""The results as Markdown: one table per question, a row per estimator and a column per number and collection."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

Result = dict[str, Any]  # question, estimator, sees, data, number, seed, values: the value, then resampled ones
PRECISE = ("Pairs", "Calibration")


def tables(results: Sequence[Result], without: Collection[str] = ()) -> str:
    """Return all tables: means over seeds, and 95 % intervals over seeds and resampled photographs.

    Arguments:
        without: the collections that are left out.
    """
    lines = []
    for question in dict.fromkeys(row["question"] for row in results):
        rows = [row for row in results if row["question"] == question and row["data"] not in without]
        columns = list(dict.fromkeys((row["data"], row["number"]) for row in rows))
        lines += ["", f"## {question}", "", f"| | sees | {' | '.join(f'{n}, {data}' for data, n in columns)} |"]
        lines.append("|---|---|" + "---|" * len(columns))
        digits = 3 if question in PRECISE else 2
        for name, sees in dict.fromkeys((row["estimator"], row["sees"]) for row in rows):
            own = [row for row in rows if (row["estimator"], row["sees"]) == (name, sees)]
            cells = [cell([r["values"] for r in own if (r["data"], r["number"]) == c], digits) for c in columns]
            lines.append(f"| {name} | {sees} | {' | '.join(cells)} |")
    return "\n".join(lines).strip() + "\n"


def cell(values: Sequence[Sequence[float]], digits: int = 2) -> str:
    """Return the mean over seeds, and the interval of the resampled values of all seeds."""
    if not values:
        return ""
    mean = np.mean([value[0] for value in values])
    digits = 1 if abs(mean) >= 10 else digits
    drawn = [x for value in values for x in value[1:]]
    if not drawn:
        return f"{mean:.{digits}f}"
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
