"""The toy in one image, and as an animation: a panel for each method.

A dot is the mean of a certain point, in the colour of its class; a diamond is that of a confusing one, in the colours
of its two classes. Their areas grow with the variance. The radius of a circle is the root of a group's mean variance
in one dimension.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pcmepp_openclip.gaussian import Gaussian

from .points import CLASSES
from .training import METHODS, History, variances

COLOURS = ("#c8372c", "#e0a100", "#2a8c56")  # one for each class
INK, PAPER = "#1f2328", "#ffffff"
NOTE = "diamonds: confusing points, of two classes; radius of a circle: the root of their mean σ² per dimension"
AREA = 3.0  # area of a dot in square points per unit of variance
FRAMES, FRAME_MS, LAST_FRAME_MS = 48, 80, 2000


def frame_epochs(epochs: int) -> list[int]:
    """Return the epochs that are animated: dense at the start, where most happens."""
    return sorted({round(epochs * (i / (FRAMES - 1)) ** 2) for i in range(FRAMES)})


def draw(histories: Mapping[str, History], epoch: int) -> Any:
    """Return a matplotlib figure of the points after an epoch.

    Arguments:
        histories: the run to show of each method.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 8.6), facecolor=PAPER, layout="constrained")
    figure.supxlabel(NOTE, color=INK, fontsize=9)
    figure.suptitle(f"epoch {epoch}", color=INK, fontsize=11)
    grid: Any = figure.subplots(2, (len(histories) + 1) // 2, squeeze=False)
    for axes, (method, history) in zip(grid.flat, histories.items(), strict=False):
        _draw_panel(axes, method, history, history.snapshots[epoch])
    return figure


def _draw_panel(axes: Any, name: str, history: History, gaussian: Gaussian) -> None:
    from matplotlib.patches import Circle

    method, points, title = METHODS[name], history.points, METHODS[name].title
    radius = 0.0
    if method.probabilistic:
        certain, confusing = variances(gaussian, points.confusing_N)
        title += f": σ² {certain:.2f} and {confusing:.2f}, ratio {confusing / certain:.2f}"
        radius = (max(variances(history.final, points.confusing_N)) / 2) ** 0.5  # the largest circle at the end
    axes.set_title(title, color=INK, fontsize=10)
    axes.set(xticks=[], yticks=[], facecolor=PAPER, aspect="equal")
    axes.spines[:].set_color("#d0d4d8")
    # The square holds all means of all epochs, with room for circles around them.
    mean_N2 = torch.cat([snapshot.mean for snapshot in history.snapshots.values()])
    low_2, high_2 = mean_N2.amin(dim=0), mean_N2.amax(dim=0)
    middle_2, half = (low_2 + high_2) / 2, 0.53 * (high_2 - low_2).max() + 0.7 * radius
    (left, bottom), (right, top) = (middle_2 - half).tolist(), (middle_2 + half).tolist()
    axes.set(xlim=(left, right), ylim=(bottom, top))
    groups = [(confusing, label) for confusing in (True, False) for label in range(CLASSES)]  # certain points on top
    for confusing, label in groups:
        face, other = COLOURS[label], COLOURS[(label + 1) % CLASSES]
        edge, marker, line = (other, "D", "--") if confusing else (face, "o", "-")
        group_N = (points.class_N == label) & (points.confusing_N == confusing)
        mean_n2, variance_n = gaussian.mean[group_N], gaussian.uncertainty[group_N] / 2
        sizes = (AREA * variance_n + 2).tolist() if method.probabilistic else [8.0]
        axes.scatter(*mean_n2.T.numpy(), sizes, face, marker, edgecolors=edge, linewidths=0.6, alpha=0.75)
        if method.probabilistic:
            (x, y), size = mean_n2.mean(dim=0).tolist(), variance_n.mean().sqrt().item()
            axes.add_patch(Circle((x, y), size, fill=False, edgecolor=edge, linewidth=1.3, linestyle=line))


def animate(histories: Mapping[str, History], path: Path, after_frame: Callable[[], object] = lambda: None) -> None:
    """Write a GIF of all epochs that the histories have kept; the last one stays for a while."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    frames = []
    for epoch in sorted(next(iter(histories.values())).snapshots):
        figure = draw(histories, epoch)
        figure.set_dpi(72)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64))
        after_frame()
    duration = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(path, "gif", save_all=True, append_images=frames[1:], duration=duration, loop=0)
