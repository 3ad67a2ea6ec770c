"""Does the paper's order of methods hold? By Kendall's tau, and pair by pair over the seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean


@dataclass(frozen=True)
class Agreement:
    """How far an order of ours agrees with the paper's, in one column.

    Arguments:
        tau: Kendall's tau-b between the paper's numbers and our means over seeds; nan if one of both is constant.
        low, high: the lowest and the highest tau of a single seed.
        pairs: number of pairs of rows that the paper orders.
        held, reversed: number of those that every seed orders alike, and that every seed orders the other way.
        paper_best, our_best: keys of the rows with the highest number.
    """

    tau: float
    low: float
    high: float
    pairs: int
    held: int
    reversed: int
    paper_best: tuple[str, ...]
    our_best: tuple[str, ...]

    def __str__(self) -> str:
        spread = "" if self.low == self.high else f" ({self.low:.2f} to {self.high:.2f} over seeds)"
        mixed = self.pairs - self.held - self.reversed
        return (
            f"Kendall's tau {self.tau:.2f}{spread}; of {self.pairs} pairs that the paper orders, {self.held} hold in "
            f"every seed, {self.reversed} are reversed in every seed, {mixed} differ between seeds or tie"
        )


def agreement(paper: Mapping[str, float], ours: Mapping[str, Mapping[int, float]]) -> Agreement | None:
    """None where fewer than two rows have numbers of both.

    Arguments:
        paper: the paper's number by row.
        ours: our number by row and seed.
    """
    rows = [key for key in paper if ours.get(key) and not math.isnan(fmean(ours[key].values()))]
    if len(rows) < 2:
        return None
    seeds = sorted(set.intersection(*(set(ours[key]) for key in rows)))
    means = {key: fmean(ours[key].values()) for key in rows}
    taus = [kendall([paper[key] for key in rows], [ours[key][seed] for key in rows]) for seed in seeds]
    taus = [tau for tau in taus if not math.isnan(tau)]  # of a seed whose rows are all equal
    held = reverse = pairs = 0
    for a, b in combinations(rows, 2):
        if paper[a] == paper[b]:
            continue
        pairs += 1
        signs = {_sign(paper[a] - paper[b]) * _sign(ours[a][seed] - ours[b][seed]) for seed in seeds}
        held += signs == {1}
        reverse += signs == {-1}
    tau = kendall([paper[key] for key in rows], list(means.values()))
    low, high = (min(taus), max(taus)) if taus else (tau, tau)
    return Agreement(tau, low, high, pairs, held, reverse, _best({key: paper[key] for key in rows}), _best(means))


def kendall(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b: (concordant - discordant) / sqrt(pairs untied in a * pairs untied in b); nan if undefined."""
    signs = [(_sign(a[i] - a[j]), _sign(b[i] - b[j])) for i, j in combinations(range(len(a)), 2)]
    untied = [sum(sign[side] != 0 for sign in signs) for side in (0, 1)]
    return sum(x * y for x, y in signs) / math.sqrt(untied[0] * untied[1]) if all(untied) else math.nan


def _best(numbers: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(key for key, value in numbers.items() if value == max(numbers.values()))


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
