"""One number of an evaluation, as a record: reports select by its fields, and its key in files is made in one place."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value and what it is of.

    Arguments:
        name: such as "R@1", "mAP@R", "miss_AUROC".
        value: nan where it is not defined.
        distance: the distance that items are ranked by, a name in `DISTANCES`; empty where none is involved.
        direction: "image_to_text" or "text_to_image", or empty.
        samples: "images" or "captions" for a number about their uncertainty, or empty.
        hit: what counts as a hit there, such as "csd_R@1", or empty.
        group: the group of samples that it is about, such as "condition=blurred", or empty.
    """

    name: str
    value: float
    distance: str = ""
    direction: str = ""
    samples: str = ""
    hit: str = ""
    group: str = ""

    @property
    def key(self) -> str:
        """The name in files and logs. A ranking by the cosine has open_clip's own name, "image_to_text_R@1"; one by
        another distance has that in front, "csd/image_to_text_R@1". Numbers about uncertainties read like
        "captions/csd_R@1/miss_AUROC" and "images/condition=blurred/AUROC"."""
        distance = "" if self.distance == "cosine" else self.distance
        parts = [self.samples, self.hit, self.group] if self.samples else [distance]
        return "/".join([*filter(None, parts), "_".join(filter(None, (self.direction, self.name)))])


def as_dict(metrics: Iterable[Metric]) -> dict[str, float]:
    """Values by key."""
    return {metric.key: metric.value for metric in metrics}
