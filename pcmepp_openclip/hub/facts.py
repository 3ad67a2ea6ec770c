"""What is known of a model that goes to the Hub, from its checkpoint and the files of its run."""

import math
from dataclasses import dataclass, field
from typing import Any

from ..ambiguity import Calibration


@dataclass(frozen=True)
class Facts:
    """What is known of a model.

    Arguments:
        config: content of `open_clip_config.json`.
        parameters: how many numbers the weights are.
        about: the checkpoint's part of that name, see `record`; {} if it has none.
        step, epochs, samples_seen: how far it was trained, None where that is not known.
        metrics: of the last validation, open_clip's names.
        history: lines of history.jsonl.
        bins: a line of uncertainty.jsonl, by direction [uncertainties, R@1].
        base_models: repos of the Hub whose weights the run began with.
        bank_size: pairs in the bank that is pushed along; None without one.
        calibration: the one that is pushed along.
    """

    repo_id: str
    config: dict
    parameters: int
    license: str = "mit"
    about: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    epochs: int | None = None
    samples_seen: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    bins: dict[str, list[list[float]]] = field(default_factory=dict)
    base_models: list[str] = field(default_factory=list)
    bank_size: int | None = None
    calibration: Calibration | None = None

    @property
    def probabilistic(self) -> bool:
        return "pcmepp_cfg" in self.config["model_cfg"]

    @property
    def scores(self) -> dict[str, float]:
        """The metrics that are scores, not counts."""
        counts = ("epoch", "num_samples")
        return {name: value for name, value in self.metrics.items() if name not in counts and math.isfinite(value)}
