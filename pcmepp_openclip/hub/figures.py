"""The figures of a model card. Each is True if it was drawn, False where there is nothing to draw."""

import math
from pathlib import Path

from ..reports import plots
from .facts import Facts

LOSS, UNCERTAINTY = "loss.png", "uncertainty.png"


def loss(path: Path, facts: Facts) -> bool:
    if len(facts.history) < 2:
        return False
    figure, axes = plots.new("Loss", x="samples seen", y="loss")
    samples = [line["samples"] for line in facts.history]
    names = [name for name in facts.history[-1] if name.endswith("loss")]
    axes.plot(samples, [sum(line.get(name, 0.0) for name in names) for line in facts.history], label="sum")
    for name in names if len(names) > 1 else ():
        axes.plot(samples, [line.get(name, math.nan) for line in facts.history], label=name, linewidth=0.8)
    axes.legend(frameon=False)
    plots.png(figure, path)
    return True


def uncertainty(path: Path, facts: Facts) -> bool:
    if not facts.bins:
        return False
    figure, axes = plots.new("R@1 of queries by their uncertainty", x="mean uncertainty of the bin", y="R@1")
    for name, (values, recall) in facts.bins.items():
        axes.plot(values, recall, marker="o", label=name.replace("_", " "))
    axes.legend(frameon=False)
    plots.png(figure, path)
    return True
