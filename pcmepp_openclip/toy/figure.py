"""The toy in one image, and how it got there: a panel for each method.

A dot is the mean of a certain point, in the colour of its class; a diamond is that of a confusing one, in the colours
of its two classes. Their areas grow with the variance. The radius of a circle is the root of a group's mean variance
in one dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gaussian import Gaussian
from .methods import METHODS
from .points import CLASSES, Points
from .training import History, variances

COLOURS = ("#c8372c", "#e0a100", "#2a8c56")  # of the classes
INK, PAPER = "#1f2328", "#ffffff"
NOTE = "diamonds: confusing points, of two classes; radius of a circle: the root of their mean σ² per dimension"
AREA = 3.0  # of a dot, in square points, per unit of variance
FRAMES, FRAME_MS, LAST_FRAME_MS = 48, 80, 2000


def frame_epochs(epochs: int) -> list[int]:
    """The epochs that are animated: dense at the start, where most happens."""
    return sorted({round(epochs * (i / (FRAMES - 1)) ** 2) for i in range(FRAMES)})


class Panels:
    """A figure with one panel per method, in which the points can be moved on.

    Arguments:
        histories: by method, the run to show.
    """

    def __init__(self, histories: Mapping[str, History]):
        from matplotlib.figure import Figure

        self.histories = histories
        self.figure = Figure(figsize=(8.0, 8.6), facecolor=PAPER, layout="constrained")
        self.figure.supxlabel(NOTE, color=INK, fontsize=9)
        grid: Any = self.figure.subplots(2, (len(histories) + 1) // 2, squeeze=False)
        self.panels = {
            method: _Panel(axes, method, history)
            for axes, (method, history) in zip(grid.flat, histories.items(), strict=False)
        }

    def show(self, epoch: int) -> None:
        """Move all points to where they were after `epoch`."""
        for method, panel in self.panels.items():
            panel.show(self.histories[method].snapshots[epoch])
        self.figure.suptitle(f"epoch {epoch}", color=INK, fontsize=11)


class _Panel:
    def __init__(self, axes: Any, method: str, history: History):
        self.axes, self.method, self.points = axes, METHODS[method], history.points
        axes.set(xticks=[], yticks=[], facecolor=PAPER, aspect="equal")
        axes.spines[:].set_color("#d0d4d8")
        self.groups = [_Group(axes, group_N, *look) for group_N, *look in _groups(history.points)]
        radius = _largest_radius(history) if self.method.probabilistic else 0.0
        (left, bottom), (right, top) = _extent(list(history.snapshots.values()), radius)
        axes.set(xlim=(left, right), ylim=(bottom, top))

    def show(self, gaussian: Gaussian) -> None:
        for group in self.groups:
            group.show(gaussian, self.method.probabilistic)
        title = self.method.title
        if self.method.probabilistic:
            certain, confusing = variances(gaussian, self.points.confusing_N)
            title += f": σ² {certain:.2f} and {confusing:.2f}, ratio {confusing / certain:.2f}"
        self.axes.set_title(title, color=INK, fontsize=10)


class _Group:
    """The certain points of a class, or the confusing ones of two."""

    def __init__(self, axes: Any, group_N: Tensor, face: str, edge: str, marker: str):
        from matplotlib.patches import Circle

        self.group_N = group_N
        self.dots = axes.scatter([], [], facecolors=face, edgecolors=edge, marker=marker, linewidths=0.6, alpha=0.75)
        line = "-" if face == edge else "--"
        self.circle = Circle((0, 0), 0, fill=False, edgecolor=edge, linewidth=1.3, linestyle=line)
        axes.add_patch(self.circle)

    def show(self, gaussian: Gaussian, probabilistic: bool) -> None:
        mean_n2, variance_n = gaussian.mean[self.group_N], gaussian.uncertainty[self.group_N] / 2
        self.dots.set_offsets(mean_n2.numpy())
        self.dots.set_sizes((AREA * variance_n + 2).tolist() if probabilistic else [8.0])
        self.circle.set_center(tuple(mean_n2.mean(dim=0).tolist()))
        self.circle.set_radius(variance_n.mean().sqrt().item() if probabilistic else 0)


def _groups(points: Points) -> list[tuple[Tensor, str, str, str]]:
    """(which points, face, edge, marker) of the confusing points of each class, then of its certain ones on top."""
    found = []
    for confusing, marker in ((True, "D"), (False, "o")):
        for label in range(CLASSES):
            own, other = COLOURS[label], COLOURS[(label + 1) % CLASSES]
            group_N = (points.class_N == label) & (points.confusing_N == confusing)
            found.append((group_N, own, other if confusing else own, marker))
    return found


def _extent(snapshots: Sequence[Gaussian], radius: float) -> tuple[list[float], list[float]]:
    """The lower left and the upper right corner of a square around all means, with room for circles around them."""
    mean_N2 = torch.cat([snapshot.mean for snapshot in snapshots])
    low_2, high_2 = mean_N2.amin(dim=0), mean_N2.amax(dim=0)
    middle_2, half = (low_2 + high_2) / 2, 0.53 * (high_2 - low_2).max() + 0.7 * radius
    return (middle_2 - half).tolist(), (middle_2 + half).tolist()


def _largest_radius(history: History) -> float:
    return (max(variances(history.final, history.points.confusing_N)) / 2) ** 0.5


def draw(histories: Mapping[str, History]) -> Any:
    """A matplotlib figure of the points after training."""
    panels = Panels(histories)
    panels.show(max(next(iter(histories.values())).snapshots))
    return panels.figure


def animate(histories: Mapping[str, History], path: Path, after_frame: Callable[[], object] = lambda: None) -> None:
    """Write a GIF of all epochs that the histories have kept; the last one stays for a while."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    panels = Panels(histories)
    panels.figure.set_dpi(72)
    canvas = FigureCanvasAgg(panels.figure)
    frames = []
    for epoch in sorted(next(iter(histories.values())).snapshots):
        panels.show(epoch)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64))
        after_frame()
    duration = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(path, "gif", save_all=True, append_images=frames[1:], duration=duration, loop=0)
