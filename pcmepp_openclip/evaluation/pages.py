"""Outcomes to the sections of a report, and to a table for the terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..data.decode import decode_image
from ..reports import plots
from ..reports.report import Picture, Plot, Section
from . import uncertainty
from .retrieval import DISTANCES
from .tasks import QueryResults, TaskResult

EXTREMES = 8  # the most and the least uncertain samples that are shown
COLOURS = ("#2a8c86", "#c8742c", "#7a68b3", "#b3456b", "#6b8e23")  # readable on light and on dark

RETRIEVAL = (
    "R@k is the share of queries whose own partner is among the first k; mAP@R and R-Precision count all right answers"
)
ZEROSHOT = """\
The share of images whose class is the most similar one. A class is the mean of its prompts; the rows differ in which
prompts are taken, or how they are weighted.

Rows with "oracle" choose on the very images that they are measured on: no result. "bprw_unlabelled"
has seen these images, without their classes. "chosen_on_validation", "best_K_per_class" and "bprw" use a validation
split."""
UNCERTAINTY = """\
The uncertainty of a sample is the sum of its variances. It has no unit: compare within one model. "bin_correlation" is
over 10 bins of equal size, -1 where hits fall steadily with uncertainty; "miss_AUROC" is how often a miss is more
uncertain than a hit, 0.5 by chance. Neither sign is given by the method. A column says what counts as a hit: by which
distance the own partner, or anything that truly fits, comes first; "coco 1k csd R@1" is the one of the paper."""


def report_sections(outcomes: Sequence[TaskResult]) -> Iterator[Section]:
    text = UNCERTAINTY  # said once
    for outcome in outcomes:
        yield _numbers(outcome)
        for side in outcome.sides:
            yield _side(outcome, side, text)
            text = "" if outcome.probabilistic else text
        if outcome.probabilistic:
            yield from _extremes(outcome)


def tables(outcome: TaskResult) -> tuple[list[list[str]], list[list[str]]]:
    """The metrics as rows: those of the task, for retrieval with a column a distance, and those of the uncertainty."""
    main: dict[str, dict[str, str]] = {}
    other: list[list[str]] = []
    for name, value in outcome.metrics.items():
        group, _, rest = name.partition("/")
        if group in DISTANCES:
            main.setdefault(rest, {})[group] = _number(value)
        elif rest:
            other.append([name, _number(value)])
        else:
            main[name] = {"mean": _number(value)}
    columns = [distance for distance in DISTANCES if any(distance in row for row in main.values())]
    return [[name, *(row.get(column, "") for column in columns)] for name, row in main.items()], other


def text_table(outcome: TaskResult) -> str:
    main, other = tables(outcome)
    header = ["", *DISTANCES[: len(main[0]) - 1]] if outcome.task == "retrieval" else ["", "accuracy"]
    rows = [header, *main, *([row + [""] * (len(header) - 2) for row in other])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = (
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _numbers(outcome: TaskResult) -> Section:
    main = [[_words_of(name), *cells] for name, *cells in tables(outcome)[0]]
    if outcome.task == "zeroshot":
        text = f"{len(outcome.data.images):,} images of {len(outcome.data.classes):,} classes. {ZEROSHOT}"
        return Section(f"Zero-shot: {outcome.name}", text, main, ["prompts", "accuracy"])
    known = outcome.data.images_of_caption is not None
    text = f"{len(outcome.data.images):,} images, {len(outcome.data.captions):,} captions. {RETRIEVAL}"
    text += ", of which all are known here." if known else ", which here are the pairs alone."
    return Section(f"Retrieval: {outcome.name}", text, main, ["", *DISTANCES[: len(main[0]) - 1]])


def _side(outcome: TaskResult, side: QueryResults, text: str) -> Section:
    prefix = f"{outcome.task}-{outcome.name}-{side.kind}"
    title = f"{outcome.name}: the {side.kind}"
    drawn = [Plot(f"{prefix}-reliability", _reliability(side), "confidence against hits; on the line they agree")]
    if not outcome.probabilistic:
        return Section(title, "Without uncertainties there is only the confidence of the softmax.", plots=drawn)
    drawn = [
        Plot(f"{prefix}-bins", _bins(side), "the samples in 10 bins of equal size, from certain to uncertain"),
        Plot(f"{prefix}-rejection", _rejection(side), "when the most uncertain are rejected; flat is chance"),
        *drawn,
        Plot(f"{prefix}-histogram", _histogram(side), "how uncertain the samples are"),
    ]
    if side.kind == "captions":
        drawn.append(Plot(f"{prefix}-words", _words(outcome, side), "mean uncertainty of captions of one length"))
    header = ["", *map(_words_of, side.hits)]
    return Section(f"{title} and their uncertainty", text, _side_rows(outcome, side), header, drawn)


def _side_rows(outcome: TaskResult, side: QueryResults) -> list[list[str]]:
    """A column for each kind of hit; what has to do with none is in the first."""
    rows: dict[str, list[str]] = {}
    for name, value in outcome.metrics.items():
        kind, _, rest = name.partition("/")
        if kind == side.kind:
            what, _, key = rest.partition("/")
            row = rows.setdefault(key if what in side.hits else rest, [""] * len(side.hits))
            row[list(side.hits).index(what) if what in side.hits else 0] = _number(value)
    return [[_words_of(name), *cells] for name, cells in rows.items()]


def _words_of(name: str) -> str:
    """A metric's name to read, and to break where a line is short."""
    return name.replace("_", " ").replace("/", ": ").replace("=", " = ")


def _bins(side: QueryResults) -> Any:
    figure, axes = plots.new(x="bin of uncertainty", y="hits")
    for (name, hit), colour in zip(side.hits.items(), COLOURS, strict=False):
        shares = [share for _, share, _ in uncertainty.bins(side.uncertainty, hit)]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=name, color=colour)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _rejection(side: QueryResults) -> Any:
    figure, axes = plots.new(x="share kept", y="hits among them")
    for (name, hit), colour in zip(side.hits.items(), COLOURS, strict=False):
        curve = uncertainty.rejection(side.uncertainty, hit)
        shown = torch.linspace(0.05, 1, 96).mul(len(curve)).ceil().long().clamp(1, len(curve)).unique()
        axes.plot((shown / len(curve)).tolist(), curve[shown - 1].tolist(), label=name, color=colour)
        axes.axhline(curve[-1].item(), color=colour, linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _reliability(side: QueryResults) -> Any:
    figure, axes = plots.new(x="confidence", y="hits")
    axes.plot([0, 1], [0, 1], color=plots.INK, linewidth=0.8, linestyle=":")
    for (name, hit), colour in zip(side.hits.items(), COLOURS, strict=False):
        found, _ = uncertainty.reliability(side.confidence, hit)
        axes.plot([x for x, _, _ in found], [y for _, y, _ in found], "o-", label=name, color=colour)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _histogram(side: QueryResults) -> Any:
    figure, axes = plots.new(x="uncertainty", y=side.kind)
    axes.hist(side.uncertainty.tolist(), bins=40, color=COLOURS[0])
    return figure


def _words(outcome: TaskResult, side: QueryResults) -> Any:
    figure, axes = plots.new(x="words in the caption", y="uncertainty")
    words = torch.tensor([len(caption.split()) for caption in outcome.data.captions])
    lengths = words.unique()
    means = [side.uncertainty[words == length].mean().item() for length in lengths]
    axes.plot(lengths.tolist(), means, "o-", color=COLOURS[0])
    return figure


def _extremes(outcome: TaskResult) -> Iterator[Section]:
    for side in outcome.sides:
        if side.kind == "images":
            order = side.uncertainty.argsort(descending=True).tolist()
            for what, numbers in (("Most", order[:EXTREMES]), ("Least", order[::-1][:EXTREMES])):
                pictures = [_picture(outcome, i, side.uncertainty[i].item()) for i in numbers]
                yield Section(f"{outcome.name}: {what.lower()} uncertain images", pictures=pictures)
        else:
            first = list({caption: i for i, caption in reversed(list(enumerate(outcome.data.captions)))}.values())
            first.sort(key=lambda i: -side.uncertainty[i].item())
            ends = first[:EXTREMES] + first[max(EXTREMES, len(first) - EXTREMES) :]
            rows = [[outcome.data.captions[i], _number(side.uncertainty[i].item())] for i in ends]
            text = f"The {EXTREMES} most uncertain captions, then the {EXTREMES} least uncertain ones."
            yield Section(f"{outcome.name}: most and least uncertain captions", text, rows, ["caption", "uncertainty"])


def _picture(outcome: TaskResult, number: int, value: float) -> Picture:
    data = outcome.data
    if outcome.task == "zeroshot":
        text = data.classes[data.labels[number]]
    else:
        text = data.captions[data.image_of_caption.index(number)]
    return Picture(decode_image(data.images[number].read()), f"{_number(value)}: {text}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
