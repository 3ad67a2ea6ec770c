"""Small image-text shards: drawn shapes with captions that name them, so that a model can learn something."""

import io
import itertools
import tarfile
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "yellow", "black", "purple", "orange", "pink")
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("left", "right", "top", "bottom")
SCENES = list(itertools.product(COLOURS, SHAPES, PLACES))


def caption(colour: str, shape: str, place: str) -> str:
    return f"a {colour} {shape} at the {place}"


def draw(colour: str, shape: str, place: str, size: int = 32) -> Image.Image:
    image = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(image)
    dx, dy = {"left": (-6, 0), "right": (6, 0), "top": (0, -6), "bottom": (0, 6)}[place]
    x, y, r = size // 2 + dx, size // 2 + dy, 7
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        pen.line((x - r, y, x + r, y), fill=colour, width=4)
        pen.line((x, y - r, x, y + r), fill=colour, width=4)
    return image


def write_shards(folder: Path, shards: int = 4, samples: int = 32) -> str:
    """`shards` tars of `samples` image-caption pairs each; the pattern that open_clip takes for them."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = itertools.cycle(SCENES)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for i in range(samples):
                scene = next(scenes)
                png = io.BytesIO()
                draw(*scene).save(png, "PNG")
                for suffix, content in (("png", png.getvalue()), ("txt", caption(*scene).encode())):
                    info = tarfile.TarInfo(f"{shard:05d}{i:04d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def write_csv(folder: Path, samples: int = 32) -> str:
    """A CSV file of image paths and captions, in open_clip's columns."""
    rows = ["filepath,title"]
    for i, scene in enumerate(SCENES[:samples]):
        draw(*scene).save(folder / f"{i}.png")
        rows.append(f"{folder / f'{i}.png'},{caption(*scene)}")
    (folder / "pairs.csv").write_text("\n".join(rows))
    return str(folder / "pairs.csv")
