"""Numbers that one would like an uncertainty to have, and whether it was reached by each estimator in several seeds.

for target in targets([numbers_of_seed_0, numbers_of_seed_1]):
    print(target["meaning"], target["estimator"], target["mean"], target["reached"])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

ESTIMATORS = {"variance": "", "bank": "bank/"}  # the prefixes of their numbers
Runs = Sequence[Mapping[str, float]]  # the numbers of each seed


@dataclass(frozen=True)
class Goal:
    """A number of `measure` and the value that one would like it to have: at least, or at most if `below`.

    Arguments:
        name: the name of the number, without the prefix of an estimator.
        references: further numbers that it should be read with, by name, and their labels: they need no estimator, or
            are the best that one could do.
    """

    name: str
    value: float
    words: str
    references: tuple[tuple[str, str], ...] = ()
    below: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.value if self.below else value >= self.value

    @property
    def target(self) -> str:
        return f"{'at most' if self.below else 'at least'} {self.value:g}"

    def count(self, values: Sequence[float]) -> int:
        """Return in how many seeds it is reached."""
        return sum(map(self.reached, values))

    def verdict(self, values: Sequence[float]) -> str:
        """Return whether it is reached: only a goal that every seed reaches is called reached."""
        reached, seeds = self.count(values), len(values)
        return (
            f"reached in {seeds} of {seeds} seeds" if reached == seeds else f"not reached ({reached} of {seeds} seeds)"
        )


GOALS = (
    Goal(
        "caption_matches_spearman",
        0.8,
        "captions that fit more images are told from those that fit fewer (Spearman, each wording once)",
        (("caption_shortness_spearman", "the number of words alone"),),
    ),
    Goal("blurred_auroc", 0.8, "blurred images are more uncertain than clean ones (AUROC)"),
    Goal("covered_auroc", 0.8, "half covered images are more uncertain than clean ones (AUROC)"),
    Goal(
        "covered_by_paper_auroc",
        0.8,
        "so are those whose cover is invisible, since it has the colour of the background (AUROC)",
        (("covered_by_paper_auroc_ceiling", "counting the shapes that can be seen"),),
    ),
    Goal(
        "text_to_image_bins",
        -0.8,
        "uncertain captions find their own image less often (correlation over 10 bins)",
        (("text_to_image_cosine_bins", "the largest cosine alone"),),
        below=True,
    ),
    Goal(
        "image_to_text_bins",
        -0.8,
        "uncertain images find their own caption less often (correlation over 10 bins)",
        (("image_to_text_cosine_bins", "the largest cosine alone"),),
        below=True,
    ),
    Goal(
        "csd_gain_R@1",
        0.0,
        "CSD finds the own item first at least as often as the mean does (difference of R@1, both directions)",
        (("own_R@1", "R@1 by the mean"),),
    ),
    Goal(
        "entailment_gain_mAP@R",
        0.0,
        "the entailment score ranks the captions that are true of an image at least as well as the mean does "
        "(difference of mAP@R, each wording once)",
        (
            ("wording_mAP@R", "mAP@R by the mean"),
            ("wording_prior_mAP@R", "mAP@R by the variance alone, without the image"),
            ("bank/wording_prior_mAP@R", "mAP@R by the bank's multiplicity alone, without the image"),
            ("wording_oracle_mAP@R", "mAP@R with the true share of images"),
        ),
    ),
)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format the mean, and in brackets the lowest and the highest of several seeds."""
    mean, low, high = (f"{value:.{digits}f}" for value in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def values(runs: Runs, name: str) -> list[float]:
    return [numbers[name] for numbers in runs]


def targets(runs: Runs) -> list[dict[str, Any]]:
    """Return every goal with its value by each estimator, as demo.json has them."""
    return [
        {
            "name": prefix + goal.name,
            "estimator": estimator,
            "target": goal.target,
            "meaning": goal.words,
            "mean": fmean(seeds := values(runs, prefix + goal.name)),
            "min": min(seeds),
            "max": max(seeds),
            "reached": goal.count(seeds),
        }
        for goal in GOALS
        for estimator, prefix in ESTIMATORS.items()
    ]
