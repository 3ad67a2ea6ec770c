"""The sections of a report and the table for the terminal, from the results of each task."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..reports import plots
from ..reports.report import Plot, Section
from ..system.redact import printable
from . import uncertainty
from .tasks import QueryResults, TaskResult

COLOURS = ("#2a8c86", "#c8742c", "#7a68b3", "#b3456b", "#6b8e23")  # They are readable on light and on dark.

RETRIEVAL = """\
{images:,} images, {captions:,} captions. \
R@k is the share of queries whose own partner is among the first k; mAP@R and R-Precision count all right answers"""
ZEROSHOT = """\
{images:,} images of {classes:,} classes. \
The share of images whose class is the most similar one. A class is the mean of its prompts; the rows differ in which
prompts are taken, or how they are weighted.

Rows with "oracle" choose on the very images that they are measured on: no result. "bprw_unlabelled"
has seen these images, without their classes. "chosen_on_validation", "best_K_per_class" and "bprw" use a validation
split."""
VAGUENESS = """\
{chains:,} chains, {images:,} images. \
Chains of captions of one image, from vague to exact. "kendall tau" is the mean agreement of the order in a chain with
the order by certainty, by the distance of the mean from that of the empty caption (radius), or by the number of words;
1 is full agreement, 0 is chance. The columns of distances are for HiMo@K, which correlates the place in the chain with
how near the caption is to the image."""
CORRESPONDENCE = """\
{images:,} pairs, {wrong_pairs:,} of them wrong. \
How often a pair with the wrong caption has the higher score than a right pair, 0.5 by chance. The distances are those
of the pair; "info nce" and "matching" are its losses among the others of a random batch; "uncertainty" is the sum of
the variances of its image and its caption. The number of words knows nothing of the pair."""
UNCERTAINTY = """\
The uncertainty of a sample is the sum of its variances. It has no unit: compare within one model. "bin_correlation" is
over 10 bins of equal size, -1 where hits fall steadily with uncertainty; "miss_AUROC" is how often a miss is more
uncertain than a hit, 0.5 by chance. Neither sign is given by the method. A column says what counts as a hit: by which
distance the paired item, or anything that truly fits, comes first; "coco 1k csd R@1" is the one of the paper."""
BANK = """\
The same numbers for the confusion by the bank: the effective number of the bank's references that a sample is confused
among. It comes from the means alone, so that any CLIP has it."""
PAIRS = """\
The probability that an image and a caption belong together, over all combinations, where pairs have the same total
weight as all others. On the line it means what it says; "match ECE" is the mean distance from the line. "sigmoid" is
the model's own logit with the constant shift that is best on these very pairs. A caption that happens to be true of
another image counts as no pair."""
TASKS = {  # the titles and the texts of the sections on numbers
    "retrieval": ("Retrieval", RETRIEVAL),
    "zeroshot": ("Zero-shot", ZEROSHOT),
    "vagueness": ("Vagueness", VAGUENESS),
    "correspondence": ("Noisy correspondence", CORRESPONDENCE),
}
SHOWN = {"": "uncertainty", "bank": "confusion by the bank"}  # These scores have sections of their own.


def report_sections(results: Sequence[TaskResult]) -> Iterator[Section]:
    texts = {"": UNCERTAINTY, "bank": BANK}  # Each is said once.
    for result in results:
        yield _numbers(result)
        if result.pairs:
            yield _pairs(result)
        for query in result.queries:
            for score in shown_scores(query):
                yield _uncertainty(result, query, score, texts.pop(score, ""))
            if not shown_scores(query):
                text = "Without uncertainties there is only the confidence of the softmax."
                yield Section(f"{result.name}: the {query.samples}", text, plots=[_reliability_plot(result, query)])


def shown_scores(query: QueryResults) -> list[str]:
    """Return the scores in `SHOWN` that the queries have."""
    return [score for score in query.uncertainties if score in SHOWN]


def metric_frame(results: Sequence[TaskResult]) -> pd.DataFrame:
    """Return every metric as a row: the dataset, the task, the key in results.json, the fields of `Metric`. Control
    characters that a group has from the data are escaped."""
    return pd.DataFrame(
        {"dataset": result.name, "task": result.task, "key": printable(metric.key)}
        | {**vars(metric), "group": printable(metric.group)}
        for result in results
        for metric in result.metrics
    )


def task_table(result: TaskResult) -> pd.DataFrame:
    """Return the metrics of the task, one row per metric and one column per distance, as text."""
    frame = metric_frame([result])
    if result.task == "vagueness":
        return _pivot(frame, frame["name"], (frame.score + frame.distance).replace("", "uncertainty"))
    if result.task == "correspondence":
        return _pivot(frame, frame.score, frame["name"])
    frame = frame[frame.samples == ""]
    labels = (frame.direction + "_" + frame["name"]).str.strip("_")
    return _pivot(frame, labels, frame.distance.replace("", "accuracy"))


def uncertainty_table(result: TaskResult, samples: str, score: str = "") -> pd.DataFrame:
    """Return the metrics about the uncertainty of the images or the captions, or about another score.

    There is one column per kind of hit, and a first column for metrics that have to do with none.
    """
    frame = metric_frame([result])
    frame = frame[(frame.samples == samples) & (frame.score == score)]
    table = _pivot(frame, (frame.group + " " + frame["name"]).str.strip(), frame.hit.replace("", "all samples"))
    return table[sorted(table.columns, key=lambda column: column != "all samples")]


def _pair_table(result: TaskResult) -> pd.DataFrame:
    """Return the metrics about pairs, one column per probability."""
    frame = metric_frame([result])
    frame = frame[frame.samples == "pairs"]
    return _pivot(frame, frame["name"], frame.score)


def cells(frame: pd.DataFrame) -> pd.Series:
    """Return the values as text, with their intervals."""
    columns = zip(frame.value, frame.low.astype(float), frame.high.astype(float), strict=True)
    return pd.Series([_with_interval(*cell) for cell in columns], frame.index, dtype=str)


def _with_interval(value: float, low: float, high: float) -> str:
    text = number(value)
    return f"{text} ({number(low)} to {number(high)})" if math.isfinite(low) and math.isfinite(high) else text


def _pivot(frame: pd.DataFrame, labels: pd.Series, columns: pd.Series) -> pd.DataFrame:
    """Return the cells of a frame of metrics by label and column, in the order in which these first occur."""
    frame = pd.DataFrame({"label": labels, "column": columns, "cell": cells(frame)})
    table = frame.pivot(index="label", columns="column", values="cell").fillna("")
    return table.loc[labels.unique(), columns.unique()].rename_axis(index=None, columns=None)


def text_table(result: TaskResult) -> str:
    """Return the numbers for the terminal."""
    tables = [task_table(result)]
    for query in result.queries:
        for score in dict.fromkeys(["", *shown_scores(query)]):  # "" also has the calibration error.
            prefix = " ".join(filter(None, (query.samples, score)))
            tables.append(uncertainty_table(result, query.samples, score).add_prefix(f"{prefix}: ", axis="index"))
    if result.pairs:
        tables.append(_pair_table(result))
    return printable("\n\n".join(table.to_string() for table in tables))


def words_of(name: str) -> str:
    """Return a metric's name in words, which can be broken into lines."""
    return name.replace("_", " ").replace("/", ": ").replace("=", " = ")


def number(value: float) -> str:
    """Return a number with four digits, or a dash where it is not finite."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def _section(title: str, text: str, table: pd.DataFrame, drawn: Sequence[Plot] = ()) -> Section:
    rows = [[words_of(str(label)), *cells] for label, *cells in table.itertuples()]
    return Section(title, text, rows, ["", *map(words_of, table.columns)], drawn)


def _numbers(result: TaskResult) -> Section:
    (title, text), table = TASKS[result.task], task_table(result)
    section = _section(f"{title}: {result.name}", text.format(**result.counts), table)
    if result.task == "retrieval":
        known = result.data.images_of_caption is not None
        section.text += ", of which all are known here." if known else ", which here are the pairs alone."
    if result.task in ("retrieval", "zeroshot"):
        section.header = ["prompts" if result.task == "zeroshot" else "", *table.columns]
    return section


def _pairs(result: TaskResult) -> Section:
    curves = {words_of(score): curve for score, (curve, _) in result.pairs.items()}
    figure = _calibration_plot(curves, "probability of a pair", "share of pairs")
    drawn = Plot(f"{result.task}-{result.name}-pairs", figure, "probability against truth; on the line they agree")
    return _section(f"{result.name}: probability of a pair", PAIRS, _pair_table(result), [drawn])


def _uncertainty(result: TaskResult, query: QueryResults, score: str, text: str) -> Section:
    """Return the numbers and the plots of one score in `SHOWN`."""
    uncertainty_N, label = query.uncertainties[score], SHOWN[score]
    prefix = "-".join(filter(None, (result.task, result.name, query.samples, score)))
    figures = {
        "bins": (_bins(query, uncertainty_N), "the samples in 10 bins of equal size, from certain to uncertain"),
        "rejection": (_rejection(query, uncertainty_N), "when the most uncertain are rejected; flat is chance"),
        "histogram": (_histogram(query, uncertainty_N, label), "how uncertain the samples are"),
    }
    if query.samples == "captions":
        figures["words"] = _words(result, uncertainty_N, label), f"mean {label} of captions of one length"
    drawn = [Plot(f"{prefix}-{name}", figure, caption) for name, (figure, caption) in figures.items()]
    if score == shown_scores(query)[0]:  # The curve is the same for all scores.
        drawn.insert(2, _reliability_plot(result, query))
    table = uncertainty_table(result, query.samples, score)
    return _section(f"{result.name}: the {query.samples} and their {label}", text, table, drawn)


def _reliability_plot(result: TaskResult, query: QueryResults) -> Plot:
    confidence_N = query.confidences["max_softmax"]
    curves = {name: uncertainty.reliability(confidence_N, hit)[0] for name, hit in query.hits.items()}
    figure = _calibration_plot(curves, "confidence", "hits")
    name = f"{result.task}-{result.name}-{query.samples}-reliability"
    return Plot(name, figure, "confidence against hits; on the line they agree")


def _bins(query: QueryResults, uncertainty_N: Tensor) -> Any:
    figure, axes = plots.new(x="bin of uncertainty", y="hits")
    for (name, hit), colour in zip(query.hits.items(), COLOURS, strict=False):
        shares = [share for _, share, _ in uncertainty.bins(uncertainty_N, hit)]
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=name, color=colour)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _rejection(query: QueryResults, uncertainty_N: Tensor) -> Any:
    figure, axes = plots.new(x="share kept", y="hits among them")
    for (name, hit), colour in zip(query.hits.items(), COLOURS, strict=False):
        curve = uncertainty.rejection(uncertainty_N, hit)
        kept = torch.linspace(0.05, 1, 96).mul(len(curve)).ceil().long().clamp(1, len(curve)).unique()
        axes.plot((kept / len(curve)).tolist(), curve[kept - 1].tolist(), label=name, color=colour)
        axes.axhline(curve[-1].item(), color=colour, linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _calibration_plot(curves: Mapping[str, Sequence[tuple[float, float, float]]], x: str, y: str) -> Any:
    """Draw the first two numbers of the points of each curve, and the diagonal on which both agree."""
    figure, axes = plots.new(x=x, y=y)
    axes.plot([0, 1], [0, 1], color=plots.INK, linewidth=0.8, linestyle=":")
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        axes.plot([point[0] for point in points], [point[1] for point in points], "o-", label=name, color=colour)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def _histogram(query: QueryResults, uncertainty_N: Tensor, label: str) -> Any:
    figure, axes = plots.new(x=label, y=query.samples)
    axes.hist(uncertainty_N.tolist(), bins=40, color=COLOURS[0])
    return figure


def _words(result: TaskResult, uncertainty_N: Tensor, label: str) -> Any:
    figure, axes = plots.new(x="words in the caption", y=label)
    words = torch.tensor([len(caption.split()) for caption in result.data.captions])
    lengths = words.unique()
    means = [uncertainty_N[words == length].mean().item() for length in lengths]
    axes.plot(lengths.tolist(), means, "o-", color=COLOURS[0])
    return figure
