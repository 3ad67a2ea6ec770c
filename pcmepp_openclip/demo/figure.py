"""The demo's results in one image: held-out drawn scenes and their captions in order of the model's confusion.

figure = draw(result)
plots.png(figure, Path("uncertainty.png"))

Nothing is hand-picked: the items are those at equal steps from the least to the most confusing one.
"""

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from ..gaussian import Gaussian
from .drawing import render
from .measure import Result

IMAGES, CAPTIONS, COLUMNS = 12, 9, 4
BAR_END, NUMBER_ENDS = 0.58, (0.79, 1.0)  # of the bar of a caption that fits everything, and of the two numbers
PAPER, INK, FAINT, BAR = "#ffffff", "#1f2328", "#59636e", "#4c78a8"  # on its own ground: readable in light and dark


def equal_steps(uncertainty_N: Tensor, count: int) -> list[int]:
    """Return indices from the most certain to the most uncertain item, at equal steps in rank."""
    order_N = uncertainty_N.argsort(stable=True)
    return order_N[torch.linspace(0, len(order_N) - 1, min(count, len(order_N))).round().long()].tolist()


def wordings(result: Result) -> pd.DataFrame:
    """Return `CAPTIONS` different captions at equal steps of confusion, each with the share of the bank's images that
    it is confused among, and the share that it is true of; captions of the same words count once."""
    captions = list(map(str, result.held_out.captions))
    first = [i for i, text in enumerate(captions) if text not in captions[:i]]
    share_M, true_M = _share(result, result.texts, "texts"), result.truth.fits_MN.float().mean(dim=1)
    shown = [first[i] for i in equal_steps(share_M[first], CAPTIONS)]
    shares = {"confused": share_M[shown].tolist(), "true": true_M[shown].tolist()}
    return pd.DataFrame(shares, index=[captions[i] for i in shown])


def draw(result: Result) -> Any:
    """Return a matplotlib figure: images on the left, captions on the right, each with the share that it is confused
    among."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.3), facecolor=PAPER)
    halves: Any = figure.subfigures(1, 2, width_ratios=(4.2, 5.8))
    titles = ("Drawn scenes, by confusion", "Their captions, by confusion")
    for part, title in zip(halves, titles, strict=True):
        part.set_facecolor(PAPER)
        part.text(0.03, 0.93, title, color=INK, fontsize=12, fontweight="bold")
    _draw_images(halves[0], result)
    _draw_captions(halves[1], wordings(result))
    note = "share of a bank's captions or images that the model confuses it among; ticks: images that it is true of"
    figure.text(0.988, 0.025, note, color=FAINT, fontsize=9, ha="right")
    return figure


def _draw_images(part: Any, result: Result) -> None:
    share_N = _share(result, result.images, "images")
    grid = part.add_gridspec(IMAGES // COLUMNS, COLUMNS, left=0.03, right=0.97, bottom=0.09, top=0.88, hspace=0.35)
    for place, i in enumerate(equal_steps(share_N, IMAGES)):
        axes = part.add_subplot(grid[divmod(place, COLUMNS)])
        axes.imshow(render(result.held_out.scenes[i]), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color(FAINT)
        axes.set_xlabel(percent(share_N[i].item()), color=INK, fontsize=10, labelpad=3)


def _draw_captions(part: Any, shares: pd.DataFrame) -> None:
    axes = part.add_axes((0.6, 0.09, 0.38, 0.75))
    low = shares.min().min() / 2
    high, lines = low ** (1 - 1 / BAR_END), range(len(shares))
    axes.set_xscale("log")
    axes.barh(lines, shares["confused"] - low, left=low, color=BAR, height=0.6)
    axes.scatter(shares["true"], lines, marker="|", s=260, linewidths=2.2, color=INK, zorder=3)
    axes.set(ylim=(len(shares) - 0.5, -0.5), xlim=(low, high), facecolor=PAPER)
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    axes.set_yticks(lines, shares.index, color=INK, fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    where = {"xycoords": ("axes fraction", "data"), "va": "center", "ha": "right", "fontsize": 10}
    for x, (name, numbers), colour in zip(NUMBER_ENDS, shares.items(), (INK, FAINT), strict=True):
        part.text(0.6 + 0.38 * x, 0.86, name, color=colour, fontsize=10, ha="right")
        for y, number in enumerate(numbers):
            axes.annotate(percent(number), (x, y), color=colour, **where)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _share(result: Result, items: Gaussian, of: str) -> Tensor:
    """Return the confusion as a share of the references."""
    return result.bank.confusion(items.mean, of) / len(result.bank)
