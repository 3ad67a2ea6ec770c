"""A report: one self-contained HTML page, in light and dark, for screens and phones.

    figure, axes = plots.new(x="step", y="loss")
    write_report(Path("out"), "A run", [Section("Loss", "It falls.", plots=[Plot("loss", figure, "of all terms")])])

writes out/index.html and out/loss.png. All text is plain text: it is escaped, and a blank line starts a paragraph.
"""

import base64
import html
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.redact import printable
from ..system.version import __version__
from . import plots

THUMBNAIL = 192  # The longer side has at most this many pixels.
SMALL = 96  # An image below this is drawn, not photographed: its pixels stay sharp.
NUMBER = re.compile(r"[-+−±<>~]?\s*(\d[\d.,]*|nan|inf)([eE][-+]?\d+)?(\s*±\s*[\d.]+)?\s*%?|[-–—]?")


@dataclass
class Thumbnail:
    """An image, shown small."""

    image: Any  # It is a PIL.Image.Image.
    caption: str = ""


@dataclass
class Plot:
    """A figure of `plots.new`; `name` is that of its PNG file, without the suffix."""

    name: str
    figure: Any
    caption: str = ""


@dataclass
class Row:
    """A title, images side by side, and lines of text, such as a query and what it finds."""

    title: str = ""
    thumbnails: Sequence[Thumbnail] = ()
    lines: Sequence[str] = ()


@dataclass
class Section:
    title: str
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    header: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    thumbnails: Sequence[Thumbnail] = ()
    examples: Sequence[Row] = ()


def write_report(folder: Path, title: str, sections: Iterable[Section], lead: str = "") -> Path:
    """Write `folder`/index.html, and `folder`/NAME.png for each plot; return the path of the page."""
    import jinja2

    sections = list(sections)
    names = [plot.name for section in sections for plot in section.plots]
    assert len(set(names)) == len(names), f"two plots of one name: {names}"
    assert all(re.fullmatch(r"[\w.@-]+", name) for name in names), f"a plot's name must do for a file: {names}"
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for plot in section.plots:
            plots.png(plot.figure, folder / f"{plot.name}.png")
    # Text may come from the data: autoescape leaves no markup in it, `printable` no characters that hide text.
    environment = jinja2.Environment(
        autoescape=True, finalize=_printable, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "embed": _embed,
        "numeric_columns": _numeric_columns,
        "split_paragraphs": _split_paragraphs,
        "svg": _svg,
    }
    here = Path(__file__).parent
    template = environment.from_string((here / "report.html").read_text(encoding="utf-8"))
    style = (here / "report.css").read_text(encoding="utf-8")
    page = template.render(title=title, sections=sections, lead=lead, style=style, version=__version__)
    path = folder / "index.html"
    path.write_text(page + "\n", encoding="utf-8")
    return path


def _printable(value: Any) -> Any:
    return value if hasattr(value, "__html__") else printable(str(value))  # The template's own markup has __html__.


def _split_paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _numeric_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether it holds numbers, which are aligned to the right."""
    return [all(NUMBER.fullmatch(str(row[i]).strip()) for row in rows) for i in range(len(rows[0]))]


def _svg(plot: Plot) -> str:
    element = plots.svg(plot.figure)
    # Ids are per page, not per figure; matplotlib's style is for its own elements only.
    element = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match[1]}{plot.name}-", element)
    element = re.sub(r"<style.*?</style>", "", element, flags=re.DOTALL)
    label = html.escape(printable(f"{plot.name}: {plot.caption}" if plot.caption else plot.name))
    return element.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _embed(image: Any) -> dict[str, Any]:
    """Return an image, made small, as a data URL, and whether it is `drawn` rather than photographed."""
    image = image.convert("RGB")
    drawn = max(image.size) < SMALL
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    kind = "png" if drawn else "jpeg"
    image.save(file, kind, **({} if drawn else {"quality": 85}))
    return {"drawn": drawn, "data": f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"}
