"""The demo's results in one image: held-out images and captions in order of their uncertainty.

figure = draw(held_out, images, texts, truth)
plots.png(figure, Path("uncertainty.png"))

Nothing is hand-picked: the items are those at equal steps from the most certain to the most uncertain one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .dataset import HeldOut
from .drawing import render
from .measure import Truth

IMAGES, CAPTIONS, COLUMNS = 12, 9, 4
PAPER, INK, FAINT, BAR = "#ffffff", "#1f2328", "#59636e", "#4c78a8"  # on its own ground: readable in light and dark


@dataclass(frozen=True)
class Wording:
    """A caption's text, its uncertainty, and how many of the held-out images it is true of."""

    text: str
    uncertainty: float
    images: int


def equal_steps(uncertainty_N: Tensor, count: int) -> list[int]:
    """Indices from the most certain to the most uncertain item, at equal steps in rank."""
    order_N = uncertainty_N.argsort(stable=True)
    return order_N[torch.linspace(0, len(order_N) - 1, min(count, len(order_N))).round().long()].tolist()


def wordings(held_out: HeldOut, texts: Gaussian, truth: Truth) -> list[Wording]:
    """`CAPTIONS` different captions at equal steps of uncertainty; captions of the same words count once."""
    first = list({str(caption): i for i, caption in reversed(list(enumerate(held_out.captions)))}.values())
    uncertainty_M, images_M = texts.uncertainty, truth.fits_MN.sum(dim=1)
    shown = [first[i] for i in equal_steps(uncertainty_M[first], CAPTIONS)]
    return [Wording(str(held_out.captions[i]), uncertainty_M[i].item(), int(images_M[i])) for i in shown]


def draw(held_out: HeldOut, images: Gaussian, texts: Gaussian, truth: Truth) -> Any:
    """A matplotlib figure: images with their uncertainties on the left, captions with theirs on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.3), facecolor=PAPER)
    halves: Any = figure.subfigures(1, 2, width_ratios=(4.2, 5.8))
    left, right = halves
    for part, title in ((left, "Images, from certain to uncertain"), (right, "Captions, from certain to uncertain")):
        part.set_facecolor(PAPER)
        part.text(0.03, 0.93, title, color=INK, fontsize=12, fontweight="bold")
    shown = equal_steps(images.uncertainty, IMAGES)
    grid = left.add_gridspec(IMAGES // COLUMNS, COLUMNS, left=0.03, right=0.97, bottom=0.09, top=0.88, hspace=0.35)
    for place, i in enumerate(shown):
        axes = left.add_subplot(grid[divmod(place, COLUMNS)])
        axes.imshow(render(held_out.scenes[i]), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(FAINT)
        axes.set_xlabel(f"{images.uncertainty[i]:.3f}", color=INK, fontsize=10, labelpad=3)
    rows = wordings(held_out, texts, truth)
    axes = right.add_axes((0.6, 0.09, 0.38, 0.75))
    values = [row.uncertainty for row in rows]
    axes.barh(range(len(rows)), values, color=BAR, height=0.6)
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, 2.1 * max(values)), xticks=[], facecolor=PAPER)
    axes.set_yticks(range(len(rows)), [row.text for row in rows], color=INK, fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for y, row in enumerate(rows):
        axes.annotate(
            f"{row.uncertainty:.3f}",
            (row.uncertainty, y),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=10,
        )
        axes.annotate(
            f"fits {row.images:,}",
            (1, y),
            xycoords=("axes fraction", "data"),
            va="center",
            ha="right",
            color=FAINT,
            fontsize=10,
        )
    figure.text(
        0.988,
        0.025,
        f"uncertainty = sum of the variances; fits: images of {len(held_out.scenes):,} that the caption is true of",
        color=FAINT,
        fontsize=9,
        ha="right",
    )
    return figure
