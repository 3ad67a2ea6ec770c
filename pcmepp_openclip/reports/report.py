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

THUMBNAIL = 192  # pixels of the longer side
SMALL = 96  # below this an image is drawn, not photographed: its pixels stay sharp
NUMBER = re.compile(r"[-+−±<>~]?\s*(\d[\d.,]*|nan|inf)([eE][-+]?\d+)?(\s*±\s*[\d.]+)?\s*%?|[-–—]?")
_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    # The browser itself sees to it that nothing is loaded from anywhere.
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
    '<link rel="icon" href="data:,">'
)


@dataclass
class Thumbnail:
    """An image, shown small."""

    image: Any  # PIL.Image.Image
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
    """Write `folder`/index.html, and `folder`/NAME.png for each plot; the path of the page."""
    sections = list(sections)
    names = [plot.name for section in sections for plot in section.plots]
    assert len(set(names)) == len(names), f"two plots of one name: {names}"
    assert all(re.fullmatch(r"[\w.@-]+", name) for name in names), f"a plot's name must do for a file: {names}"
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for plot in section.plots:
            plots.png(plot.figure, folder / f"{plot.name}.png")
    links = "".join(f'<a href="#s{i}">{_escaped(section.title)}</a>' for i, section in enumerate(sections))
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head>{_HEAD}<title>{_escaped(title)}</title>\n'
        f"<style>\n{style}</style></head>\n<body>\n"
        f"<header><h1>{_escaped(title)}</h1>{_paragraphs(lead)}</header>\n<nav>{links}</nav>\n<main>\n"
        + "\n".join(_section(f"s{i}", section) for i, section in enumerate(sections))
        + f"\n</main>\n<footer>pcmepp-openclip {__version__}</footer>\n</body></html>\n"
    )
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _escaped(text: str) -> str:
    """Text as a page may hold it, which may be of the data: no markup, and no characters that hide text."""
    return html.escape(printable(text))


def _section(anchor: str, section: Section) -> str:
    parts = [f'<h2 id="{anchor}">{_escaped(section.title)}</h2>', _paragraphs(section.text)]
    if section.rows:
        parts.append(_table(section.title, section.header, section.rows))
    if section.plots:
        parts.append(f'<div class="plots">{"".join(map(_plot, section.plots))}</div>')
    if section.thumbnails:
        parts.append(f'<div class="thumbnails">{"".join(map(_thumbnail, section.thumbnails))}</div>')
    parts += map(_row, section.examples)
    return f"<section>{''.join(parts)}</section>"


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_escaped(part.strip())}</p>" for part in re.split(r"\n\s*\n", text) if part.strip())


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers are aligned to the right. It scrolls by itself where it is wider than the page."""
    numeric = [all(NUMBER.fullmatch(str(row[i]).strip()) for row in rows) for i in range(len(rows[0]))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="number"' if number else "" for number in numeric)
        columns = zip(cells, kinds, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{_escaped(str(cell))}</{tag}>' for cell, kind in columns)}</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    body = "".join(line(row, "td") for row in rows)
    table = f"<table>{head}<tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_escaped(title)}: table">{table}</div>'


def _plot(plot: Plot) -> str:
    element = plots.svg(plot.figure)
    # Ids are per page, not per figure; matplotlib's style is for its own elements only.
    element = re.sub(r'(\bid="|href="#|url\(#)', lambda found: f"{found[1]}{plot.name}-", element)
    element = re.sub(r"<style.*?</style>", "", element, flags=re.DOTALL)
    label = _escaped(f"{plot.name}: {plot.caption}" if plot.caption else plot.name)
    element = element.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return f"<figure>{element}{_caption(plot.caption)}</figure>"


def _thumbnail(thumbnail: Thumbnail) -> str:
    image = thumbnail.image.convert("RGB")
    small = max(image.size) < SMALL
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    kind = "png" if small else "jpeg"
    image.save(file, kind, **({} if small else {"quality": 85}))
    data = base64.b64encode(file.getvalue()).decode()
    alt, look = _escaped(thumbnail.caption or "an image"), ' class="small"' if small else ""
    tag = f'<img{look} alt="{alt}" src="data:image/{kind};base64,{data}">'
    return f"<figure>{tag}{_caption(thumbnail.caption)}</figure>"


def _row(row: Row) -> str:
    title = f"<h3>{_escaped(row.title)}</h3>" if row.title else ""
    lines = "".join(f"<li>{_escaped(line)}</li>" for line in row.lines)
    images = f'<div class="thumbnails">{"".join(map(_thumbnail, row.thumbnails))}</div>' if row.thumbnails else ""
    return f'<div class="row">{title}{images}{f"<ol>{lines}</ol>" if lines else ""}</div>'


def _caption(text: str) -> str:
    return f"<figcaption>{_escaped(text)}</figcaption>" if text else ""
