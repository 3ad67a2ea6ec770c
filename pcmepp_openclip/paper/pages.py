"""What a table gives: on the terminal, and as results.json, table.md and index.html.

Cells read "paper → ours": our number is the mean over seeds, and ± is half of the range from the lowest to the highest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..reports.report import Section, write_report
from ..system import files
from .agreement import Agreement, agreement
from .columns import Column
from .rows import Table
from .runner import Outcome

LEAD = {
    "scenes": """The paper's numbers are of COCO; ours are of small models on drawn scenes, with the analogue of each
column that is listed below. The two are on different scales: what can be compared is the order of the rows. Ours are
means over seeds, ± half of the range from the lowest to the highest.""",
    "coco": "Both are of COCO. Ours are means over seeds, ± half of the range from the lowest to the highest.",
}
Baselines = Mapping[str, Mapping[str, float]]  # by name, and by column


def shown_columns(table: Table, data: str) -> list[Column]:
    """Those that there is a metric for."""
    return [column for column in table.columns if (column.scenes if data == "scenes" else column.coco) is not None]


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, and half of the range; "–" where a value is missing or undefined."""
    if not values or any(map(math.isnan, values)):
        return "–"
    mean = f"{math.fsum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ±{(max(values) - min(values)) / 2:.{digits}f}"


def cells(
    table: Table, outcomes: Sequence[Outcome], data: str, baselines: Baselines
) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table, with the paper's numbers and ours in pairs of columns."""
    columns = shown_columns(table, data)
    header = ["", *(cell for column in columns for cell in (f"{column.name}, paper", "ours"))]
    rows = []
    for outcome in outcomes:
        row = outcome.row
        paper = dict(zip((column.name for column in table.columns), row.paper, strict=True))
        line = [f"{row.group}: {row.name}" if row.group else row.name]
        for column in columns:
            number, ours = paper[column.name], [values[column.name] for values in outcome.values.values()]
            line += [
                "–" if number is None else f"{number:g}",
                "failed" if outcome.logs else spread(ours, column.digits),
            ]
        rows.append(line)
    for name, numbers in baselines.items():
        rows.append([name, *(x for c in columns for x in ("–", spread([numbers[c.name]], c.digits)))])
    return header, rows


def orders(table: Table, outcomes: Sequence[Outcome], data: str) -> list[tuple[str, str, Agreement]]:
    """(group, column, agreement) for every group and column in which two rows can be compared."""
    found = []
    for group in dict.fromkeys(outcome.row.group for outcome in outcomes):
        inside = [outcome for outcome in outcomes if outcome.row.group == group and not outcome.logs]
        for column in shown_columns(table, data):
            place = table.columns.index(column)
            paper = {o.row.key: o.row.paper[place] for o in inside if o.row.paper[place] is not None}
            ours = {o.row.key: {seed: v[column.name] for seed, v in o.values.items()} for o in inside}
            result = agreement(paper, ours)  # type: ignore[arg-type]
            if result is not None:
                found.append((group, column.name, result))
    return found


def notes(table: Table, outcomes: Sequence[Outcome], data: str) -> list[str]:
    """What must be said of rows: which failed, which are not run, and how others differ from the paper's."""
    found = []
    for outcome in outcomes:
        row = outcome.row
        name = f"{row.group}: {row.name}" if row.group else row.name
        found += [f"{name}, seed {seed}: failed, see {log}." for seed, log in outcome.logs.items()]
        if row.note:
            found.append(f"{name}: {row.note}.")
        if row.runs and not row.runs_on(data):
            found.append(f"{name}: run on {row.only} only.")
    return found


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *padded[1:]])

    return "\n".join([line(header), "-" * len(line(header)), *map(line, rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def order_lines(found: Sequence[tuple[str, str, Agreement]]) -> list[str]:
    return [f"{f'{group}, ' if group else ''}{column}: {result}." for group, column, result in found]


def as_json(
    table: Table, outcomes: Sequence[Outcome], scale: Mapping[str, Any], baselines: Baselines
) -> dict[str, Any]:
    data, names = str(scale["data"]), [column.name for column in table.columns]
    return {
        "table": table.about,
        "where": table.where,
        **scale,
        "columns": {column.name: column.meaning for column in shown_columns(table, data)},
        "rows": [
            {
                "key": outcome.row.key,
                "name": outcome.row.name,
                "group": outcome.row.group,
                "flags": outcome.row.flags,
                "ranked_by": outcome.row.by,
                "paper": dict(zip(names, outcome.row.paper, strict=True)),
                "ours": {
                    str(seed): {name: value for name, value in values.items() if not math.isnan(value)}
                    for seed, values in outcome.values.items()
                },
                "failed": {str(seed): str(log) for seed, log in outcome.logs.items()},
            }
            for outcome in outcomes
        ],
        "baselines": {
            name: {column: value for column, value in numbers.items() if not math.isnan(value)}
            for name, numbers in baselines.items()
        },
        "order": [
            {"group": group, "column": column, **vars(result)}
            for group, column, result in orders(table, outcomes, data)
            if not math.isnan(result.tau)
        ],
    }


def write_pages(
    folder: Path, title: str, table: Table, outcomes: Sequence[Outcome], scale: Mapping[str, Any], baselines: Baselines
) -> str:
    """Write results.json, table.md and index.html; what to print."""
    data = str(scale["data"])
    header, rows = cells(table, outcomes, data, baselines)
    order, said = order_lines(orders(table, outcomes, data)), notes(table, outcomes, data)
    meanings = [[c.name, c.meaning] for c in shown_columns(table, data)] if data == "scenes" else []
    content = json.dumps(as_json(table, outcomes, scale, baselines), indent=1)
    markdown = "\n\n".join(
        [f"# {title}", LEAD[data], markdown_table(header, rows), *(f"- {x}" for x in [*order, *said])]
        + ([markdown_table(["column", "on the scenes"], meanings)] if meanings else [])
    )
    folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(folder / "results.json", lambda path: path.write_text(f"{content}\n"))
    files.write_whole(folder / "table.md", lambda path: path.write_text(f"{markdown}\n"))
    sections = [Section("The table", "\n\n".join(said), rows, header)]
    if order:
        sections.append(Section("Does the paper's order hold?", "\n\n".join(order)))
    if meanings:
        sections.append(Section("Columns", "", meanings, ["column", "on the scenes"]))
    page = write_report(folder, title, sections, LEAD[data])
    parts = [title, text_table(header, rows), *(["Does the paper's order hold?", *order] if order else []), *said]
    return "\n".join(["", *parts, f"{folder / 'results.json'}, {folder / 'table.md'}, {page}"])
