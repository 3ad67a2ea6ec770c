"""The result of a table: on the terminal, and as results.json, table.md and index.html.

Cells read "paper → ours": our number is the mean over seeds, and ± is half of the range from the lowest to the highest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from scipy.stats import kendalltau

from pcmepp_openclip.reports.report import Section, write_report
from pcmepp_openclip.system import files

from .columns import Column
from .runs import Outcome
from .tables import Table

LEAD = {
    "scenes": """The paper's numbers are of COCO; ours are of small models on drawn scenes, with the analogue of each
column that is listed below. The two are on different scales: what can be compared is the order of the rows. Ours are
means over seeds, ± half of the range from the lowest to the highest.""",
    "coco": "Both are of COCO. Ours are means over seeds, ± half of the range from the lowest to the highest.",
}
Baselines = Mapping[str, Mapping[str, float]]  # the numbers of each baseline by column


@dataclass(frozen=True)
class Agreement:
    """The agreement of an order of ours with the paper's, in one column.

    Arguments:
        tau: Kendall's tau-b between the paper's numbers and our means over seeds; nan if one of both is constant.
        low, high: the lowest and the highest tau of a single seed.
        pairs: number of pairs of rows that the paper orders.
        held, reversed: number of those that every seed orders alike, and that every seed orders the other way.
        paper_best, our_best: keys of the rows with the highest number.
    """

    tau: float
    low: float
    high: float
    pairs: int
    held: int
    reversed: int
    paper_best: tuple[str, ...]
    our_best: tuple[str, ...]

    def __str__(self) -> str:
        spread = "" if self.low == self.high else f" ({self.low:.2f} to {self.high:.2f} over seeds)"
        mixed = self.pairs - self.held - self.reversed
        return (
            f"Kendall's tau {self.tau:.2f}{spread}; of {self.pairs} pairs that the paper orders, {self.held} hold in "
            f"every seed, {self.reversed} are reversed in every seed, {mixed} differ between seeds or tie"
        )


def agreement(paper: Mapping[str, float], ours: Mapping[str, Mapping[int, float]]) -> Agreement | None:
    """Compare two orders; None where fewer than two rows have numbers of both.

    Arguments:
        paper: the paper's number by row.
        ours: our number by row and seed.
    """
    rows = [key for key in paper if ours.get(key) and not math.isnan(fmean(ours[key].values()))]
    if len(rows) < 2:
        return None
    seeds = sorted(set.intersection(*(set(ours[key]) for key in rows)))
    theirs, means = {key: paper[key] for key in rows}, {key: fmean(ours[key].values()) for key in rows}
    tau, *taus = (
        float(kendalltau(list(theirs.values()), numbers).statistic)
        for numbers in (list(means.values()), *([ours[key][seed] for key in rows] for seed in seeds))
    )
    taus = [each for each in taus if not math.isnan(each)] or [tau]  # nan: all rows of a seed are equal
    pairs = [(a, b) if paper[a] > paper[b] else (b, a) for a, b in combinations(rows, 2) if paper[a] != paper[b]]
    held = sum(all(ours[a][seed] > ours[b][seed] for seed in seeds) for a, b in pairs)
    reverse = sum(all(ours[a][seed] < ours[b][seed] for seed in seeds) for a, b in pairs)
    return Agreement(tau, min(taus), max(taus), len(pairs), held, reverse, _best(theirs), _best(means))


def _best(numbers: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(key for key, value in numbers.items() if value == max(numbers.values()))


def orders(table: Table, outcomes: Sequence[Outcome], data: str) -> list[tuple[str, str, Agreement]]:
    """Return (group, column, agreement) for every group and column in which two rows can be compared."""
    results = []
    for group in dict.fromkeys(outcome.row.group for outcome in outcomes):
        inside = [outcome for outcome in outcomes if outcome.row.group == group and not outcome.logs]
        for column in table.columns:
            if not column.is_measured(data):
                continue
            paper = {o.row.key: o.row.paper[column.name] for o in inside if column.name in o.row.paper}
            ours = {o.row.key: {seed: v[column.name] for seed, v in o.values.items()} for o in inside}
            if (result := agreement(paper, ours)) is not None:
                results.append((group, column.name, result))
    return results


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean, and half of the range; "–" where a value is missing or undefined."""
    if not values or any(map(math.isnan, values)):
        return "–"
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{(max(values) - min(values)) / 2:.{digits}f}"


def cells(columns: Sequence[Column], outcomes: Sequence[Outcome], baselines: Baselines) -> pd.DataFrame:
    """Return the table as text, with the paper's numbers and ours in pairs of columns; the first column has names."""
    rows = []
    for outcome in outcomes:
        line = [outcome.row.full_name]
        for column in columns:
            ours = [values[column.name] for values in outcome.values.values()]
            paper = outcome.row.paper.get(column.name)
            line += ["–" if paper is None else f"{paper:g}"]
            line += ["failed" if outcome.logs else spread(ours, column.digits)]
        rows.append(line)
    for name, numbers in baselines.items():
        rows.append([name, *(x for c in columns for x in ("–", spread([numbers[c.name]], c.digits)))])
    return pd.DataFrame(rows, columns=["", *(x for c in columns for x in (f"{c.name}, paper", "ours"))])


def notes(outcomes: Sequence[Outcome], data: str) -> list[str]:
    """Return the remarks on rows: which failed, which are not run, and how others differ from the paper's."""
    remarks = []
    for outcome in outcomes:
        row = outcome.row
        remarks += [f"{row.full_name}, seed {seed}: failed, see {log}." for seed, log in outcome.logs.items()]
        if row.note:
            remarks.append(f"{row.full_name}: {row.note}.")
        if row.start != "none" and not row.runs_on(data):
            remarks.append(f"{row.full_name}: run on {row.only} only.")
    return remarks


def markdown(frame: pd.DataFrame) -> str:
    lines = [list(frame.columns), ["---"] * frame.shape[1], *frame.values.tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_json(
    table: Table, outcomes: Sequence[Outcome], scale: Mapping[str, Any], baselines: Baselines
) -> dict[str, Any]:
    """Return the content of results.json; numbers that are not defined are left out."""
    data = str(scale["data"])
    return {
        "table": table.summary,
        "where": table.where,
        **scale,
        "columns": {column.name: column.meaning for column in table.columns if column.is_measured(data)},
        "rows": [
            {
                "key": outcome.row.key,
                "name": outcome.row.name,
                "group": outcome.row.group,
                "flags": outcome.row.flags or None,
                "ranked_by": outcome.row.by,
                "paper": {column.name: outcome.row.paper.get(column.name) for column in table.columns},
                "ours": {str(seed): _defined(values) for seed, values in outcome.values.items()},
                "failed": {str(seed): str(log) for seed, log in outcome.logs.items()},
            }
            for outcome in outcomes
        ],
        "baselines": {name: _defined(numbers) for name, numbers in baselines.items()},
        "order": [
            {"group": group, "column": column, **vars(result)}
            for group, column, result in orders(table, outcomes, data)
            if not math.isnan(result.tau)
        ],
    }


def _defined(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def write_pages(
    folder: Path, table: Table, outcomes: Sequence[Outcome], scale: Mapping[str, Any], baselines: Baselines
) -> str:
    """Write results.json, table.md and index.html. Returns the text for the terminal."""
    data, title = str(scale["data"]), f"PCME++, {table.where}: {table.summary}"
    columns = [column for column in table.columns if column.is_measured(data)]
    frame, remarks = cells(columns, outcomes, baselines), notes(outcomes, data)
    order = [f"{f'{group}, ' if group else ''}{name}: {x}." for group, name, x in orders(table, outcomes, data)]
    meanings = [[c.name, c.meaning] for c in columns] if data == "scenes" else []
    content = json.dumps(as_json(table, outcomes, scale, baselines), indent=1)
    parts = [f"# {title}", LEAD[data], markdown(frame), *(f"- {x}" for x in [*order, *remarks])]
    if meanings:
        parts.append(markdown(pd.DataFrame(meanings, columns=["column", "on the scenes"])))
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / "results.json", lambda path: path.write_text(f"{content}\n"))
    files.write_whole(folder / "table.md", lambda path: path.write_text("\n\n".join(parts) + "\n"))
    sections = [Section("The table", "\n\n".join(remarks), frame.values.tolist(), list(frame.columns))]
    if order:
        sections.append(Section("Does the paper's order hold?", "\n\n".join(order)))
    if meanings:
        sections.append(Section("Columns", "", meanings, ["column", "on the scenes"]))
    page = write_report(folder, title, sections, LEAD[data])
    printed = [
        title,
        frame.set_index("").rename_axis(None).to_string(),
        *(["Does the paper's order hold?", *order] if order else []),
    ]
    return "\n".join(["", *printed, *remarks, f"{folder / 'results.json'}, {folder / 'table.md'}, {page}"])
