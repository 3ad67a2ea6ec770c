"""The columns of the paper's tables: which metrics of `pcmepp eval` they are on COCO, and what stands for them on the
drawn scenes.

`pcmepp eval` writes {"metrics": {key: value}, "bins": {...}} for a dataset; a column computes its value from these
results. Scores are in per cent, as in the paper.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]  # one dataset in the results.json of `pcmepp eval`
Measure = Callable[[Results, str], float]  # takes the results and the name of the distance that the row ranks by


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Arguments:
        name: the paper's name for it.
        coco, scenes: the measure at either scale; None where there is no such metric.
        meaning: the meaning of the column on the scenes.
        digits: decimals shown.
    """

    name: str
    coco: Measure | None
    scenes: Measure | None
    meaning: str
    digits: int = 1

    def is_measured(self, data: str) -> bool:
        """Return whether there is such a metric at that scale."""
        return (self.scenes if data == "scenes" else self.coco) is not None

    def value(self, results: Results, by: str, data: str) -> float:
        """Return the number of a row that ranks by a distance; nan where there is no such metric."""
        measure = self.scenes if data == "scenes" else self.coco
        return math.nan if measure is None else measure(results, by)


def both(i2t: str, t2i: str) -> Measure:
    """Measure the mean of two metrics, one of each direction, in per cent."""
    return lambda results, by: 50 * (metric(results, by, i2t) + metric(results, by, t2i))


def metric(results: Results, by: str, name: str) -> float:
    """Return a metric of the ranking by a distance, nan where it is undefined; those by the cosine have no prefix."""
    value = results["metrics"][name if by == "cosine" else f"{by}/{name}"]
    return math.nan if value is None else value


def mean_uncertainty(results: Results, by: str) -> float:
    """Return the mean of sum sigma^2 over images and over captions, the mean of both; nan without variances."""
    sides = [results.get("bins", {}).get(f"{samples}/{by}_R@1", []) for samples in ("images", "captions")]
    if not all(sides):
        return math.nan
    means = [sum(mean * n for mean, _, n in bins) / sum(n for _, _, n in bins) for bins in sides]
    return sum(means) / 2


def negative_correlation(hit: str) -> Measure:
    """Measure -rho of the paper over 10 bins, the mean of both sides.

    Arguments:
        hit: the name of R@1, with "{by}" for the distance.
    """

    def measure(results: Results, by: str) -> float:
        keys = [f"{samples}/{hit.format(by=by)}/bin_correlation" for samples in ("images", "captions")]
        values = [results["metrics"].get(key) for key in keys]
        return math.nan if None in values else -sum(values) / 2

    return measure


def accuracy(results: Results, by: str) -> float:
    """Return the best of the zero-shot accuracies of these names, in per cent; `by` has one or several, with "|"
    between."""
    values = [results["metrics"][name] for name in by.split("|") if name in results["metrics"]]
    return 100 * max(values) if values else math.nan


RETRIEVAL = (
    Column(
        "EC mAP@R",
        both("eccv_map_at_r_i2t", "eccv_map_at_r_t2i"),
        both("image_to_text_mAP@R", "text_to_image_mAP@R"),
        "mAP@R with all captions that are true of an image",
    ),
    Column(
        "EC R-P",
        both("eccv_rprecision_i2t", "eccv_rprecision_t2i"),
        both("image_to_text_R-Precision", "text_to_image_R-Precision"),
        "R-Precision with all captions that are true of an image",
    ),
    Column(
        "EC R@1",
        both("eccv_r1_i2t", "eccv_r1_t2i"),
        both("image_to_text_any_match_R@1", "text_to_image_any_match_R@1"),
        "the share of queries whose first item is a true match, be it the own one or not",
    ),
    Column("CxC R@1", both("cxc_r1_i2t", "cxc_r1_t2i"), None, ""),
    Column(
        "1K R@1",
        both("coco_1k_r1_i2t", "coco_1k_r1_t2i"),
        both("image_to_text_R@1", "text_to_image_R@1"),
        "R@1 among the held-out images and their captions, where only the own item counts",
    ),
    Column("5K R@1", both("coco_5k_r1_i2t", "coco_5k_r1_t2i"), None, ""),
    Column(
        "RSUM",
        lambda results, by: metric(results, by, "coco_1k_rsum"),
        lambda results, by: metric(results, by, "RSUM"),
        "the sum of R@1, R@5 and R@10 of both directions, where only the own item counts",
    ),
)
UNCERTAINTY = (
    Column("uncertainty", mean_uncertainty, mean_uncertainty, "the mean of sum sigma^2", digits=2),
    Column(
        "-rho",
        negative_correlation("coco_1k_csd_R@1"),
        negative_correlation("{by}_R@1"),
        "minus the correlation of the uncertainty with 1K R@1 over 10 bins, the mean of images and captions",
        digits=2,
    ),
)
ZEROSHOT = (Column("Top-1", None, accuracy, "accuracy over scenes of one thing, 24 classes by colour and shape", 2),)
