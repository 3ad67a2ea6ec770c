"""One number of an evaluation, as a record: reports select by its fields, and its key in files is made in one place."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Metric:
    """A value, with what it measures and on what.

    Arguments:
        name: such as "R@1", "mAP@R", "miss_AUROC".
        value: nan where it is not defined.
        distance: the distance that items are ranked by, a name in `DISTANCES`, or "bank" or "bank_entailment" for those
            of a bank of reference pairs; empty where none is involved.
        direction: "image_to_text" or "text_to_image", or empty.
        samples: "images" or "captions" for a number about their uncertainty, "pairs" for one about the probability that
            they belong together, or empty.
        hit: what counts as a hit there, such as "csd_R@1", or empty.
        score: what is judged in place of the uncertainty, such as "bank" or "max_softmax", or empty for the uncertainty
            itself: the sum of the variances.
        group: the group of samples that it is about, such as "condition=blurred", or empty.
        low, high: the ends of its interval, where it has one.
    """

    name: str
    value: float
    distance: str = ""
    direction: str = ""
    samples: str = ""
    hit: str = ""
    group: str = ""
    score: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def key(self) -> str:
        """Return the name in files and logs. A ranking by the cosine has open_clip's own name, "image_to_text_R@1"; one
        by another distance has that in front, "csd/image_to_text_R@1". Numbers about uncertainties read like
        "captions/csd_R@1/miss_AUROC" and "images/condition=blurred/AUROC", and those about another score
        "captions/csd_R@1/max_softmax/miss_AUROC"."""
        distance = "" if self.distance == "cosine" else self.distance
        parts = [self.samples, self.hit, self.group, self.score] if self.samples else [distance]
        return "/".join([*filter(None, parts), "_".join(filter(None, (self.direction, self.name)))])


def labelled(metrics: Iterable[Metric], **labels: str) -> Iterator[Metric]:
    """Yield the metrics with these fields, which say what they are about."""
    return (replace(metric, **labels) for metric in metrics)  # type: ignore[arg-type]


def as_dict(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return values by key; the ends of an interval have the key of the value and "_low" or "_high" after it."""
    values = {}
    for metric in metrics:
        values[metric.key] = metric.value
        ends = (("low", metric.low), ("high", metric.high))
        values |= {f"{metric.key}_{end}": value for end, value in ends if value is not None}
    return values
