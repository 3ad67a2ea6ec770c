"""The share of each source in a resampled epoch."""

import random
from collections.abc import Sequence


def parse_mix(text: str, names: Sequence[str], flag: str = "--train-data-mix") -> list[float]:
    """Return the shares of `cc3m=1,cc12m=1,redcaps=0.5`, which sum to 1, in the order of `names`."""
    wanted: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            value = float(weight)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise ValueError(f"{flag}: '{part.strip()}' is not NAME=NUMBER, as in cc3m=1,redcaps=0.5.")
        if name not in names:
            raise ValueError(f"{flag}: --train-data has no source '{name}'; it has {', '.join(names)}.")
        if name in wanted:
            raise ValueError(f"{flag} names '{name}' twice.")
        wanted[name] = value
    for name in names:
        if name not in wanted:
            raise ValueError(f"{flag} has no entry for '{name}': add {name}=NUMBER (0 for none).")
    return _normalise([wanted[name] for name in names], flag)


def natural_mix(samples: Sequence[int], factors: str | None = None) -> list[float]:
    """Return the shares in proportion to the samples, times open_clip's upsampling factor of each source (`2::1`)."""
    flag = "--train-data-upsampling-factors"
    weights = [1.0] * len(samples)
    if factors is not None:
        try:
            weights = [float(factor) for factor in factors.split("::")]
        except ValueError:
            raise ValueError(f"{flag} must be numbers joined by '::', not '{factors}'.") from None
        if len(weights) != len(samples):
            raise ValueError(f"{flag} has {len(weights)} numbers for {len(samples)} sources of --train-data.")
        if any(not 0 <= weight < float("inf") for weight in weights):
            raise ValueError(f"{flag} must not be negative: '{factors}'.")
    return _normalise([weight * count for weight, count in zip(weights, samples, strict=True)], flag)


def _normalise(weights: list[float], flag: str) -> list[float]:
    total = sum(weights)
    if total <= 0:
        raise ValueError(f"{flag} leaves nothing to train on: at least one source needs a positive number.")
    return [weight / total for weight in weights]


class Mixer:
    """Chooses the source of each sample: the one that is furthest below its share.

    Drawing whole shards with weights keeps the shares only on average: a hundred thousand samples may be ten shards.
    This keeps them exact to one sample, whatever the sizes of the shards.
    """

    def __init__(self, shares: Sequence[float], rng: random.Random):
        """Set the shares. `rng` shifts the phase, so that several mixers do not all start with the same source."""
        self._shares = list(shares)
        self._credit = [rng.random() if share else 0.0 for share in shares]

    def next(self) -> int:
        self._credit = [credit + share for credit, share in zip(self._credit, self._shares, strict=True)]
        chosen = max(range(len(self._shares)), key=lambda i: (self._shares[i] > 0, self._credit[i]))
        self._credit[chosen] -= 1
        return chosen
