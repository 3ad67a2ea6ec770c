"""The results as Markdown: one table per question, a row per estimator and a column per number and collection."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Result = dict[str, Any]  # question, estimator, sees, data, number, seed, values: the value, then resampled ones


def tables(results: Sequence[Result]) -> str:
    """All tables: means over seeds, and 95 % intervals over seeds and resampled photographs."""
    found = []
    for question in dict.fromkeys(row["question"] for row in results):
        rows = [row for row in results if row["question"] == question]
        columns = list(dict.fromkeys((row["data"], row["number"]) for row in rows))
        found += ["", f"## {question}", "", f"| | sees | {' | '.join(', '.join(c) for c in columns)} |"]
        found.append("|---|---|" + "---|" * len(columns))
        for name, sees in dict.fromkeys((row["estimator"], row["sees"]) for row in rows):
            own = [row for row in rows if (row["estimator"], row["sees"]) == (name, sees)]
            cells = [cell([r["values"] for r in own if (r["data"], r["number"]) == column]) for column in columns]
            found.append(f"| {name} | {sees} | {' | '.join(cells)} |")
    return "\n".join(found).strip() + "\n"


def cell(values: Sequence[Sequence[float]]) -> str:
    """The mean over seeds, and the interval of the resampled values of all seeds."""
    if not values:
        return ""
    mean = np.mean([value[0] for value in values])
    digits = 3 if abs(mean) < 0.3 else 2
    drawn = [x for value in values for x in value[1:]]
    if not drawn:
        return f"{mean:.{digits}f}"
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
