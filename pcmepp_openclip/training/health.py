"""Warnings about a run whose uncertainty loses its meaning, each issued once, with the flag to change.

They go by what is logged (see `losses/diagnostics.py`). A single batch is noisy, and the first steps say little, so all
but the plainest wait until the run has settled, and then for five logged steps that are at least 1 % of the run apart.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..system.text import flag_of

VARIANCE_SHARE = 0.9  # share of the variance in the CSD above which the means hardly count
RATIO = 0.85  # 2a / s above which the variance has little left to say
RISING_RATIO = 0.7  # 2a / s above which its trend is looked at
MATCHES = 3.0  # factor by which the expected matches may be off
AGREEMENT, SIGMAS = -0.1, 4.0  # a correlation counts as negative below this, and by this many standard errors
SATURATED = 50.0  # |log m| of the expected matches, which no healthy start comes near
WINDOW = 5
SETTLED_SHARE, SETTLED_STEPS = 0.2, 10_000  # a run has settled after that share of its steps, or after that many


class HealthCheck:
    """The checks of one run for an uncertainty that loses its meaning. Each warning is given once.

    Arguments:
        cfg: the model's `pcmepp_cfg` with all keys.
        batch: the number of pairs that the loss compares with each other, on all ranks together.
        warmup: the steps of --warmup.
    """

    def __init__(self, cfg: dict[str, Any], batch: int, warmup: int):
        self.cfg, self.batch, self.warmup = cfg, batch, warmup
        self.issued: set[str] = set()
        self.window: deque[tuple[int, dict[str, float]]] = deque(maxlen=WINDOW)
        self.started = False

    def warnings(self, step: int, steps: int, seen: dict[str, float]) -> Iterator[str]:
        """Yield the warnings that are due at a logged step.

        Arguments:
            step, steps: the step and the number of steps of the run.
            seen: the diagnostics by name.
        """
        settled = step >= max(self.warmup, min(SETTLED_SHARE * steps, SETTLED_STEPS))
        if settled and (not self.window or step - self.window[-1][0] >= 0.01 * steps):
            self.window.append((step, seen))
        for name, text in (
            ("saturated", self._saturated(seen)),
            ("variance_share", self._variance_share(seen)),
            ("match_ratio", self._match_ratio(steps, seen["match_ratio"])),
            ("agreement", self._agreement()),
            ("expected_matches", self._expected_matches()),
        ):
            if text and name not in self.issued:
                self.issued.add(name)
                yield text

    @property
    def _calibrates(self) -> bool:
        """Return whether the variances are trained by the matching loss with CSD, which the theory is about."""
        return self.cfg["match_weight"] > 0 and self.cfg["distance"] == "csd"

    @property
    def _has_contrastive(self) -> bool:
        """Return whether InfoNCE is trained: without it nothing ties s to the means."""
        return self.cfg["contrastive_weight"] > 0

    def _saturated(self, seen: dict[str, float]) -> str | None:
        """Return a warning if the matching loss is saturated at the first logged step.

        CSD has limits of its own, see `_variance_share`.
        """
        first, self.started = not self.started, True
        if not first or self.cfg["match_weight"] == 0 or self.cfg["distance"] == "csd":
            return None
        none = seen["image_miscalibration"] > SATURATED
        if not none and not seen["expected_matches"] > 0.999 * self.batch > 1:
            return None
        bias, shift, distance = (self.cfg[key] for key in ("init_logvar_bias", "init_match_shift", "distance"))
        change = [] if bias is None else [f"raise --init-logvar-bias (now {bias:g})"]
        if self.cfg["match_logit"] != "siglip":  # SigLIP's logit has no shift of its own
            change.append(f"{'raise' if none else 'lower'} --init-match-shift (now {shift:g})")
        return (
            f"The matching loss starts saturated: by --distance {distance} {'no pair' if none else 'every pair'} of "
            "the batch is a match, beyond all doubt. "
            f"Start a new run: {' or '.join(change) or 'choose another distance'}."
        )

    def _variance_share(self, seen: dict[str, float]) -> str | None:
        share = seen["variance_share"]
        if not self._calibrates or not share > VARIANCE_SHARE:
            return None
        return (
            f"The variances dominate the means: they are {100 * share:.0f} % of the CSD between an image and a text. "
            f"Lower --init-logvar-bias (now {self.cfg['init_logvar_bias']}) or --vib-weight "
            f"(now {self.cfg['vib_weight']:g})."
        )

    def _match_ratio(self, steps: int, ratio: float) -> str | None:
        logit = self.cfg["match_logit"]
        if not self._calibrates or logit == "siglip" or not self._has_contrastive:
            return None  # SigLIP's ratio is 1 by its definition
        rising = len(self.window) == WINDOW and ratio > RISING_RATIO and self._ratio_at(steps) >= 1
        if not ratio > RATIO and not rising:
            return None
        going = " and reaches 1 before the end of the run if it goes on like this" if rising else ""
        change = (
            f"Lower --match-ratio (now {self.cfg['match_ratio']:g})."
            if logit == "tied"
            else "Start a new run with --match-logit tied, which holds it at --match-ratio; --pretrained takes over "
            "the weights of this one."
        )
        return (
            f"The variance is about to lose its meaning: 2a / s, match_ratio in the log, is {ratio:.2f}{going}. At 1 "
            f"the variance has nothing to say, and beyond that it says the opposite. {change}"
        )

    def _ratio_at(self, step: int) -> float:
        """Return 2a / s at another step, on the line through the first and the last entry of the window."""
        (start, first), (end, last) = self.window[0], self.window[-1]
        rate = (last["match_ratio"] - first["match_ratio"]) / max(1, end - start)
        return last["match_ratio"] + rate * (step - end)

    def _agreement(self) -> str | None:
        if not self._calibrates or not self._has_contrastive or len(self.window) < WINDOW:
            return None
        limit = min(AGREEMENT, -SIGMAS / math.sqrt(WINDOW * self.batch))  # 1 / sqrt(batch) is the error of one value
        correlations = {}
        for side in ("image", "text"):
            values = [seen[f"{side}_agreement"] for _, seen in self.window]
            if all(value < 0 for value in values) and statistics.fmean(values) < limit:  # nan is not below 0
                correlations[side] = statistics.fmean(values)
        if not correlations:
            return None
        sides = " and ".join(f"{side}s (correlation {value:.2f})" for side, value in correlations.items())
        wanted = {"train_means_by": "contrastive", "match_logit": "tied"}
        if self.cfg["match_logit"] == "siglip":  # its means are not trained by InfoNCE
            wanted = {}
        flags = [f"{flag_of(key)} {value}" for key, value in wanted.items() if self.cfg[key] != value]
        change = f"Start a new run with {' '.join(flags)}, or use" if flags else "Use"
        return (
            f"The variance says the opposite of the means for {sides}: those whose means fit many others have the "
            f"smaller variances. {change} the estimate of `pcmepp bank`, which needs no variance."
        )

    def _expected_matches(self) -> str | None:
        if not self.cfg["match_weight"] or self.cfg["pp_weight"] or len(self.window) < WINDOW:
            return None  # pseudo-positives count as matches, too
        matches = statistics.median(seen["expected_matches"] for _, seen in self.window)
        if 1 / MATCHES <= matches <= MATCHES or math.isnan(matches):
            return None
        shift = (
            "the logit bias of the model"
            if self.cfg["match_logit"] == "siglip"
            else f"--init-match-shift (now {self.cfg['init_match_shift']:g})"
        )
        way = "Lower" if matches > 1 else "Raise"
        return (
            f"The matching loss is not calibrated: a sample expects {matches:.2g} matches in a batch and has one. "
            f"{way} {shift} in a new run, or raise --match-weight (now {self.cfg['match_weight']:g})."
        )
