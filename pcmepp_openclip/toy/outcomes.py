"""What the toy shows, over several seeds, beside the paper's numbers.

outcome = outcome_of("csd", [history_of_seed_0, history_of_seed_1])
print(outcome.ratio, outcome.verdict)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..demo.goals import Goal, Spread
from .methods import METHODS
from .training import History, separation, variances


class Paper(NamedTuple):
    """The mean sigma^2 of certain and of confusing points in the paper, appendix A.2, and the goal for their ratio."""

    certain: float
    confusing: float
    goal: Goal


PAPER = {
    "csd": Paper(1.68, 3.05, Goal("ratio", 1.82, "confusing points have larger variances")),
    "wasserstein": Paper(2.69, 2.80, Goal("ratio", 1.04, "they do not, for this distance does not ask", below=True)),
}


@dataclass(frozen=True)
class Outcome:
    """One method in all seeds.

    Arguments:
        certain, confusing: the mean sigma^2 of the points of either kind.
        separation: how far the classes are apart, see `training.separation`.
    """

    method: str
    certain: Spread
    confusing: Spread
    separation: Spread

    @property
    def ratio(self) -> Spread | None:
        """Of the confusing points' mean sigma^2 to that of the certain ones; None if the variances are not trained."""
        if not METHODS[self.method].probabilistic:
            return None
        return Spread(tuple(b / a for a, b in zip(self.certain.values, self.confusing.values, strict=True)))

    @property
    def verdict(self) -> str:
        """Whether the paper's ratio was reached: only what every seed reaches is called reached."""
        if self.ratio is None:
            return "no variances"
        reached, seeds = self.reached, len(self.ratio.values)
        return f"{'reached' if reached == seeds else 'not reached'} ({reached} of {seeds} seeds)"

    @property
    def reached(self) -> int:
        """In how many seeds."""
        return sum(map(PAPER[self.method].goal.reached, self.ratio.values)) if self.ratio is not None else 0

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"separation": _numbers(self.separation)}
        if self.ratio is not None:
            paper = PAPER[self.method]
            found["certain"], found["confusing"] = _numbers(self.certain), _numbers(self.confusing)
            found["ratio"] = _numbers(self.ratio)
            found["paper"] = {"certain": paper.certain, "confusing": paper.confusing, "ratio": paper.goal.value}
            found["target"], found["reached"] = paper.goal.target, self.reached
        return found


def outcome_of(method: str, histories: Sequence[History]) -> Outcome:
    """From the runs of one method, one for each seed."""
    pairs = [variances(history.final, history.points.confusing_N) for history in histories]
    apart = [separation(history.final, history.points) for history in histories]
    return Outcome(method, *(Spread(tuple(values)) for values in (*zip(*pairs, strict=True), apart)))


def text_table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes for the terminal: means over seeds, with the lowest and the highest in brackets."""
    rows = [("", "certain", "confusing", "ratio", "paper", "", "separation")]
    for outcome in outcomes:
        title, apart = METHODS[outcome.method].title, f"{outcome.separation:.1f}"
        if outcome.ratio is None:
            rows.append((title, "-", "-", "-", "-", outcome.verdict, apart))
            continue
        goal = PAPER[outcome.method].goal
        sizes = f"{outcome.certain.mean:.2f}", f"{outcome.confusing.mean:.2f}", f"{outcome.ratio:.2f}"
        rows.append((title, *sizes, f"{goal.value:g}", f"{goal.target}: {outcome.verdict}", apart))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _numbers(spread: Spread) -> dict[str, Any]:
    return {"mean": spread.mean, "min": min(spread.values), "max": max(spread.values), "seeds": list(spread.values)}
