"""What one would like of an uncertainty, and whether it was reached: by each estimator, in each of several seeds.

for outcome in outcomes([numbers_of_seed_0, numbers_of_seed_1]):
    print(outcome.goal.words, outcome.estimator, outcome.mean, outcome.verdict)
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ESTIMATORS = {"variance": "", "bank": "bank/"}  # the prefixes of their numbers
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Goal:
    """A number of `measure` and the value that one would like it to have: at least, or at most if `below`.

    Arguments:
        name: of the number, without the prefix of an estimator.
        beside: further numbers that it should be read with, by name: what no estimator is needed for, or what is the
            best that one could do. The values are how to call them.
    """

    name: str
    value: float
    words: str
    beside: tuple[tuple[str, str], ...] = ()
    below: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.value if self.below else value >= self.value

    @property
    def target(self) -> str:
        return f"{'at most' if self.below else 'at least'} {self.value:g}"


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


@dataclass(frozen=True)
class Spread:
    """The values of one number in several seeds, in their order."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        return f"{self:.3f}"

    def __format__(self, spec: str) -> str:
        """The mean, and in brackets the lowest and the highest; without a format of numbers as text."""
        if not spec.endswith("f"):
            return format(str(self), spec)
        if len(self.values) == 1:
            return format(self.mean, spec)
        return f"{self.mean:{spec}} ({min(self.values):{spec}} to {max(self.values):{spec}})"


@dataclass(frozen=True)
class Outcome:
    """What became of a goal, by one estimator."""

    goal: Goal
    estimator: str
    spread: Spread

    @property
    def reached(self) -> int:
        """In how many seeds."""
        return sum(map(self.goal.reached, self.spread.values))

    @property
    def verdict(self) -> str:
        """Only what every seed reaches is called reached."""
        seeds = len(self.spread.values)
        if self.reached == seeds:
            return f"reached in {seeds} of {seeds} seeds"
        return f"not reached ({self.reached} of {seeds} seeds)"

    def as_json(self) -> dict[str, Any]:
        low, high = min(self.spread.values), max(self.spread.values)
        about = {"name": ESTIMATORS[self.estimator] + self.goal.name, "estimator": self.estimator}
        about |= {"target": self.goal.target, "meaning": self.goal.words}
        return {**about, "mean": self.spread.mean, "min": low, "max": high, "reached": self.reached}


def spread(runs: Sequence[Numbers], name: str) -> Spread:
    return Spread(tuple(numbers[name] for numbers in runs))


def outcomes(runs: Sequence[Numbers]) -> list[Outcome]:
    """Of every goal by every estimator, from the numbers of each seed; the estimators of a goal follow each other."""
    return [
        Outcome(goal, estimator, spread(runs, prefix + goal.name))
        for goal in GOALS
        for estimator, prefix in ESTIMATORS.items()
    ]
