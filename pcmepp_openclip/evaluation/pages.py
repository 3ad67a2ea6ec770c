"""The sections of a report and the table for the terminal, from the results of each task."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch

from ..data.decode import decode_image
from ..reports import plots
from ..reports.report import Plot, Section, Thumbnail
from . import uncertainty
from .tasks import QueryResults, TaskResult

EXTREMES = 8  # the most and the least uncertain samples that are shown
COLOURS = ("#2a8c86", "#c8742c", "#7a68b3", "#b3456b", "#6b8e23")  # readable on light and on dark

TITLES = {"retrieval": "Retrieval", "zeroshot": "Zero-shot", "vagueness": "Vagueness"}
RETRIEVAL = (
    "R@k is the share of queries whose own partner is among the first k; mAP@R and R-Precision count all right answers"
)
ZEROSHOT = """\
The share of images whose class is the most similar one. A class is the mean of its prompts; the rows differ in which
prompts are taken, or how they are weighted.

Rows with "oracle" choose on the very images that they are measured on: no result. "bprw_unlabelled"
has seen these images, without their classes. "chosen_on_validation", "best_K_per_class" and "bprw" use a validation
split."""
VAGUENESS = """\
Chains of captions of one image, from vague to exact. "kendall tau" is the mean agreement of the order in a chain with
the order by certainty, by the distance of the mean from that of the empty caption (radius), or by the number of words;
1 is full agreement, 0 is chance. The columns of distances are for HiMo@K, which correlates the place in the chain with
how near the caption is to the image."""
UNCERTAINTY = """\
The uncertainty of a sample is the sum of its variances. It has no unit: compare within one model. "bin_correlation" is
over 10 bins of equal size, -1 where hits fall steadily with uncertainty; "miss_AUROC" is how often a miss is more
uncertain than a hit, 0.5 by chance. Neither sign is given by the method. A column says what counts as a hit: by which
distance the paired item, or anything that truly fits, comes first; "coco 1k csd R@1" is the one of the paper."""


def report_sections(results: Sequence[TaskResult]) -> Iterator[Section]:
    text = UNCERTAINTY  # said once
    for result in results:
        yield _numbers(result)
        for query in result.queries:
            yield _uncertainty(result, query, text)
            text = "" if result.probabilistic else text
        if result.probabilistic:
            yield from _extremes(result)


def metric_frame(results: Sequence[TaskResult]) -> pd.DataFrame:
    """Every metric as a row: the dataset, the task, the key in results.json, the fields of `Metric`."""
    return pd.DataFrame(
        {"dataset": result.name, "task": result.task, "key": metric.key, **vars(metric)}
        for result in results
        for metric in result.metrics
    )


def task_table(result: TaskResult) -> pd.DataFrame:
    """The metrics of the task, one row per metric and one column per distance, as text."""
    frame = metric_frame([result])
    if result.task == "vagueness":
        return _pivot(frame["name"], (frame.score + frame.distance).replace("", "uncertainty"), cells(frame))
    frame = frame[frame.samples == ""]
    labels = (frame.direction + "_" + frame["name"]).str.strip("_")
    return _pivot(labels, frame.distance.replace("", "accuracy"), cells(frame))


def uncertainty_table(result: TaskResult, samples: str) -> pd.DataFrame:
    """The metrics about the uncertainty of the images or the captions: one column per kind of hit, and a first column
    for those that have to do with none."""
    frame = metric_frame([result])
    frame = frame[(frame.samples == samples) & (frame.score == "")]
    labels = (frame.group + " " + frame["name"]).str.strip()
    table = _pivot(labels, frame.hit.replace("", "all samples"), cells(frame))
    return table[sorted(table.columns, key=lambda column: column != "all samples")]


def cells(frame: pd.DataFrame) -> pd.Series:
    """The values as text, with their intervals."""
    columns = zip(frame.value, frame.low.astype(float), frame.high.astype(float), strict=True)
    return pd.Series([_with_interval(*cell) for cell in columns], frame.index, dtype=str)


def _with_interval(value: float, low: float, high: float) -> str:
    text = _number(value)
    return f"{text} ({_number(low)} to {_number(high)})" if math.isfinite(low) and math.isfinite(high) else text


def _pivot(labels: pd.Series, columns: pd.Series, texts: pd.Series) -> pd.DataFrame:
    """Texts by label and column, in the order in which these first occur."""
    frame = pd.DataFrame({"label": labels, "column": columns, "cell": texts})
    table = frame.pivot(index="label", columns="column", values="cell").fillna("")
    return table.loc[labels.unique(), columns.unique()].rename_axis(index=None, columns=None)


def text_table(result: TaskResult) -> str:
    """The numbers for the terminal."""
    tables = [task_table(result)]
    for query in result.queries:
        tables.append(uncertainty_table(result, query.samples).add_prefix(f"{query.samples}: ", axis="index"))
    return "\n\n".join(table.to_string() for table in tables)


def _numbers(result: TaskResult) -> Section:
    table = task_table(result)
    data = result.data
    if result.task == "zeroshot":
        text = f"{len(data.images):,} images of {len(data.classes):,} classes. {ZEROSHOT}"
        return Section(f"Zero-shot: {result.name}", text, _rows(table), ["prompts", *table.columns])
    if result.task == "vagueness":
        text = f"{len(data.chains):,} chains, {len(data.images):,} images. {VAGUENESS}"
        return Section(f"Vagueness: {result.name}", text, _rows(table), ["", *map(words_of, table.columns)])
    text = f"{len(data.images):,} images, {len(data.captions):,} captions. {RETRIEVAL}"
    known = data.images_of_caption is not None
    text += ", of which all are known here." if known else ", which here are the pairs alone."
    return Section(f"Retrieval: {result.name}", text, _rows(table), ["", *table.columns])


def _uncertainty(result: TaskResult, query: QueryResults, text: str) -> Section:
    prefix = f"{result.task}-{result.name}-{query.samples}"
    title = f"{result.name}: the {query.samples}"
    drawn = [Plot(f"{prefix}-reliability", _reliability(query), "confidence against hits; on the line they agree")]
    if not result.probabilistic:
        return Section(title, "Without uncertainties there is only the confidence of the softmax.", plots=drawn)
    drawn = [
        Plot(f"{prefix}-bins", _bins(query), "the samples in 10 bins of equal size, from certain to uncertain"),
        Plot(f"{prefix}-rejection", _rejection(query), "when the most uncertain are rejected; flat is chance"),
        *drawn,
        Plot(f"{prefix}-histogram", _histogram(query), "how uncertain the samples are"),
    ]
    if query.samples == "captions":
        drawn.append(Plot(f"{prefix}-words", _words(result, query), "mean uncertainty of captions of one length"))
    table = uncertainty_table(result, query.samples)
    header = ["", *map(words_of, table.columns)]
    return Section(f"{title} and their uncertainty", text, _rows(table), header, drawn)


def _rows(table: pd.DataFrame) -> list[list[str]]:
    return [[words_of(str(label)), *cells] for label, *cells in table.itertuples()]


def words_of(name: str) -> str:
    """A metric's name to read, and to break where a line is short."""
    return name.replace("_", " ").replace("/", ": ").replace("=", " = ")


def _bins(query: QueryResults) -> Any:
    figure, axes = plots.new(x="bin of uncertainty", y="hits")
    for (name, hit), colour in zip(query.hits.items(), COLOURS, strict=False):
        shares = [share for _, share, _ in uncertainty.bins(query.uncertainty, hit)]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=name, color=colour)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _rejection(query: QueryResults) -> Any:
    figure, axes = plots.new(x="share kept", y="hits among them")
    for (name, hit), colour in zip(query.hits.items(), COLOURS, strict=False):
        curve = uncertainty.rejection(query.uncertainty, hit)
        shown = torch.linspace(0.05, 1, 96).mul(len(curve)).ceil().long().clamp(1, len(curve)).unique()
        axes.plot((shown / len(curve)).tolist(), curve[shown - 1].tolist(), label=name, color=colour)
        axes.axhline(curve[-1].item(), color=colour, linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _reliability(query: QueryResults) -> Any:
    figure, axes = plots.new(x="confidence", y="hits")
    axes.plot([0, 1], [0, 1], color=plots.INK, linewidth=0.8, linestyle=":")
    for (name, hit), colour in zip(query.hits.items(), COLOURS, strict=False):
        found, _ = uncertainty.reliability(query.confidences["max_softmax"], hit)
        axes.plot([x for x, _, _ in found], [y for _, y, _ in found], "o-", label=name, color=colour)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _histogram(query: QueryResults) -> Any:
    figure, axes = plots.new(x="uncertainty", y=query.samples)
    axes.hist(query.uncertainty.tolist(), bins=40, color=COLOURS[0])
    return figure


def _words(result: TaskResult, query: QueryResults) -> Any:
    figure, axes = plots.new(x="words in the caption", y="uncertainty")
    words = torch.tensor([len(caption.split()) for caption in result.data.captions])
    lengths = words.unique()
    means = [query.uncertainty[words == length].mean().item() for length in lengths]
    axes.plot(lengths.tolist(), means, "o-", color=COLOURS[0])
    return figure


def _extremes(result: TaskResult) -> Iterator[Section]:
    for query in result.queries:
        if query.samples == "images":
            order = query.uncertainty.argsort(descending=True).tolist()
            for what, indices in (("Most", order[:EXTREMES]), ("Least", order[::-1][:EXTREMES])):
                thumbnails = [_thumbnail(result, i, query.uncertainty[i].item()) for i in indices]
                yield Section(f"{result.name}: {what.lower()} uncertain images", thumbnails=thumbnails)
        else:
            first = list({caption: i for i, caption in reversed(list(enumerate(result.data.captions)))}.values())
            first.sort(key=lambda i: -query.uncertainty[i].item())
            ends = first[:EXTREMES] + first[max(EXTREMES, len(first) - EXTREMES) :]
            rows = [[result.data.captions[i], _number(query.uncertainty[i].item())] for i in ends]
            text = f"The {EXTREMES} most uncertain captions, then the {EXTREMES} least uncertain ones."
            yield Section(f"{result.name}: most and least uncertain captions", text, rows, ["caption", "uncertainty"])


def _thumbnail(result: TaskResult, index: int, value: float) -> Thumbnail:
    data = result.data
    if result.task == "zeroshot":
        text = data.classes[data.labels[index]]
    else:
        text = data.captions[data.image_of_caption.index(index)]
    return Thumbnail(decode_image(data.images[index].read()), f"{_number(value)}: {text}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
