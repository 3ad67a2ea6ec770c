"""The figures of a model card. Each is True if it was drawn, False where there is nothing to draw."""

from pathlib import Path
from typing import Any

from ..reports import curves, plots
from .facts import Facts

LOSS, PSEUDO_POSITIVES, UNCERTAINTY = "loss.png", "pseudo_positives.png", "uncertainty.png"


def loss(path: Path, facts: Facts) -> bool:
    return _saved(curves.loss(facts.history), path)


def pseudo_positives(path: Path, facts: Facts) -> bool:
    return _saved(curves.pseudo_positives(facts.history), path)


def uncertainty(path: Path, facts: Facts) -> bool:
    if not facts.bins:
        return False
    figure, axes = plots.new("R@1 of queries by their uncertainty", x="mean uncertainty of the bin", y="R@1")
    for name, (values, recall) in facts.bins.items():
        axes.plot(values, recall, marker="o", label=name.replace("_", " "))
    axes.legend(frameon=False)
    plots.png(figure, path)
    return True


def _saved(figure: Any, path: Path) -> bool:
    if figure is None:
        return False
    plots.png(figure, path)
    return True
