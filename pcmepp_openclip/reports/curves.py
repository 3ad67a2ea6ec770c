"""Curves of a training run, from the lines of its history.jsonl. Each is None where there is nothing to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import plots

Lines = Sequence[Mapping[str, Any]]


def loss(history: Lines) -> Any:
    """Draw the sum of the loss terms, and each of them where there are several, by samples seen."""
    if len(history) < 2:
        return None
    figure, axes = plots.new("Loss", x="samples seen", y="loss")
    samples = [line["samples"] for line in history]
    names = [name for name in history[-1] if name.endswith("loss")]
    axes.plot(samples, [sum(line.get(name, 0.0) for name in names) for line in history], label="sum")
    for name in names if len(names) > 1 else ():
        axes.plot(samples, [line.get(name, math.nan) for line in history], label=name, linewidth=0.8)
    axes.legend(frameon=False, labelcolor=plots.INK)
    return figure


def pseudo_positives(history: Lines) -> Any:
    """Draw how many pairs of a batch of all ranks are nearer than a true pair, over both directions, by samples seen.
    They are counted whether or not the loss has a weight for them."""
    counted = [line for line in history if "pseudo_positives" in line]
    if len(counted) < 2:
        return None
    figure, axes = plots.new("Pseudo-positives", x="samples seen", y="pseudo-positives per batch")
    axes.plot([line["samples"] for line in counted], [line["pseudo_positives"] for line in counted], color="#2a8c86")
    axes.set_ylim(bottom=0)
    return figure
