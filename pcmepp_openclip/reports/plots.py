"""Figures for reports and model cards; matplotlib is imported only when one is drawn.

figure, axes = new("Loss", x="step", y="loss")
axes.plot(steps, losses)
png(figure, Path("loss.png")); html = svg(figure)
"""

import io
import re
from pathlib import Path
from typing import Any

INK = "#767676"  # It is readable on white and on black; `svg` lets the page choose it.


def new(title: str = "", x: str = "", y: str = "", size: tuple[float, float] = (5.0, 3.2)) -> tuple[Any, Any]:
    """Return a figure and its axes, in no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    axes.set_facecolor("none")
    return figure, axes


def png(figure: Any, path: Path, dpi: int = 150) -> Path:
    figure.savefig(path, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return path


def svg(figure: Any) -> str:
    """Return the figure as an element of HTML; what is drawn in `INK` takes the colour of the text around it."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pcmepp"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    element = file.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(re.escape(INK), "currentColor", element, flags=re.IGNORECASE)
