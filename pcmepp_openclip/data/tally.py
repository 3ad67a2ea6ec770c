"""The counts of used and unusable samples of an epoch, by source and cause, added up over workers and ranks."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Event = tuple[int, str]
"""A pair of source index and cause."""


@dataclass
class Tally:
    """Counts that travel from the workers along with the batches, and add up.

    Arguments:
        met: the samples read from shards, usable or not.
        used: the delivered samples, by source index.
        lost: the unusable samples, by source index and cause.
        retries: the resumed connections, by source index.
        filled: the samples delivered a second time to fill the last batch.
        stood_in: the samples delivered a second time in place of unusable ones.
        first: the place where each cause was first seen.
    """

    met: int = 0
    used: Counter[int] = field(default_factory=Counter)
    lost: Counter[Event] = field(default_factory=Counter)
    retries: Counter[int] = field(default_factory=Counter)
    filled: int = 0
    stood_in: int = 0
    first: dict[Event, str] = field(default_factory=dict)

    def note(self, source: int, cause: str, count: int, where: str) -> None:
        if cause == "retry":
            self.retries[source] += 1
        else:
            self.lost[source, cause] += count
            self.first.setdefault((source, cause), where)

    def add(self, part: "Tally") -> None:
        self.met += part.met
        self.used.update(part.used)
        self.lost.update(part.lost)
        self.retries.update(part.retries)
        self.filled += part.filled
        self.stood_in += part.stood_in
        self.first = {**part.first, **self.first}

    def take(self) -> "Tally":
        """Return the counts since the last call, and start from zero."""
        taken = Tally()
        for name in vars(self):
            ours, theirs = getattr(self, name), getattr(taken, name)
            setattr(self, name, theirs)
            setattr(taken, name, ours)
        return taken

    def to_plain(self) -> dict[str, Any]:
        """Return the counts as plain types for JSON. Dictionaries are lists of pairs, since JSON's keys are strings."""
        return {name: list(value.items()) if isinstance(value, dict) else value for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Tally":
        """Return the inverse of `to_plain`."""
        tally = cls(met=plain["met"], filled=plain["filled"], stood_in=plain["stood_in"])
        for name in ("used", "retries"):
            getattr(tally, name).update(dict(plain[name]))
        for name in ("lost", "first"):
            getattr(tally, name).update({(source, cause): value for (source, cause), value in plain[name]})
        return tally

    @property
    def bad_share(self) -> float:
        """Return the fraction of unusable samples among all samples read."""
        return sum(self.lost.values()) / max(1, self.met)

    def judge(self, names: list[str], most: float, enough: int) -> None:
        """Raise ValueError if a larger fraction than `most` is unusable, once `enough` samples were met."""
        if self.bad_share > most and self.met >= enough:
            raise ValueError(
                f"--train-data: {100 * self.bad_share:.1f} % of the samples are unusable, more than "
                f"--train-data-max-bad-fraction {most:g} allows: {'; '.join(self.lines(names)[1:])}."
            )

    def shares(self, names: list[str]) -> dict[str, float]:
        """Return the realised mix: the share of each source in the samples delivered."""
        total = max(1, sum(self.used.values()))
        return {name: self.used[source] / total for source, name in enumerate(names)}

    def by_source(self, names: list[str]) -> dict[str, dict[str, int]]:
        """Return the lost samples as {source: {cause: count}}, without sources that lost none."""
        out: dict[str, dict[str, int]] = {}
        for (source, cause), count in sorted((+self.lost).items()):
            out.setdefault(names[source], {})[cause] = count
        return out

    def lines(self, names: list[str], wanted: dict[str, float] | None = None) -> list[str]:
        """Return the summary as text."""
        total = sum(self.used.values())
        mix = [
            f"{name} {100 * share:.2f} %" + (f" (wanted {100 * wanted[name]:.2f} %)" if wanted else "")
            for name, share in self.shares(names).items()
        ]
        out = [f"{total} samples: {', '.join(mix)}"]
        if self.filled or self.stood_in:
            out.append(
                f"seen twice: {self.filled} to fill the last batch, {self.stood_in} in place of unusable samples"
            )
        for name, lost in self.by_source(names).items():
            source = names.index(name)
            causes = [f"{count} {cause} (first: {self.first[source, cause]})" for cause, count in lost.items()]
            out.append(f"{name}: unusable: {', '.join(causes)}")
        for source, count in sorted(self.retries.items()):
            out.append(f"{names[source]}: {count} resumed connections")
        return out
