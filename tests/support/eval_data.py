"""Small folders to evaluate on, in clip_benchmark's layout: the drawn scenes of `drawn_shards.py`."""

import io
import json
import tarfile
from pathlib import Path

from drawn_shards import COLOURS, SCENES, SHAPES, caption, draw

from pcmepp_openclip import Gaussian
from pcmepp_openclip.encode.store import Store

CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
TEMPLATES = ["a {c}", "a drawing of a {c}.", "one {c} on white paper", "the {c}", "a small {c} somewhere", "{c}"]


def captions(scene) -> list[str]:
    """Three of one image, the last one so vague that it fits many."""
    colour, shape, place = scene
    return [caption(*scene), f"at the {place} there is a {colour} {shape}", f"a {shape} at the {place}"]


def write_tar(path: Path, samples) -> None:
    """`samples`: for each its members' contents by suffix, bytes or str."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i, sample in enumerate(samples):
            for suffix, content in sample.items():
                content = content.encode() if isinstance(content, str) else content
                info = tarfile.TarInfo(f"s{i:04d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def png(scene) -> bytes:
    file = io.BytesIO()
    draw(*scene).save(file, "PNG")
    return file.getvalue()


def write_retrieval(folder: Path, scenes=SCENES[:48], matches: bool = False, captions=captions) -> Path:
    """Two shards of images with three captions each."""
    facts = [{"condition": "round" if scene[1] == "circle" else "edged"} for scene in scenes]
    samples = [
        {"png": png(scene), "txt": "\n".join(captions(scene)), "json": json.dumps(fact)}
        for scene, fact in zip(scenes, facts, strict=True)
    ]
    half = len(samples) // 2
    write_tar(folder / "test/0.tar", samples[:half])
    write_tar(folder / "test/1.tar", samples[half:])
    (folder / "test/nshards.txt").write_text("2")
    (folder / "dataset_type.txt").write_text("retrieval")
    if matches:
        (folder / "test/matches.json").write_text(json.dumps({"images_of_caption": true_matches(scenes)}))
    return folder


def read_embeddings(path: Path) -> Gaussian | None:
    """A file that `pcmepp eval` wrote; None if it is damaged."""
    rows = Store(path.parent, path.parent.name.rpartition("-")[2]).read(path.stem)
    return None if rows is None else Gaussian(**rows)


def true_matches(scenes) -> list[list[int]]:
    """The images of each caption: the first two name a scene, the last one leaves out its colour."""
    found = []
    for i, scene in enumerate(scenes):
        found += [[i], [i], [j for j, other in enumerate(scenes) if other[1:] == scene[1:]]]
    return found


def write_zeroshot(folder: Path, scenes=SCENES, splits=("test", "val")) -> Path:
    """Images of the 32 coloured shapes, those of each split at other places."""
    for number, split in enumerate(splits):
        own = scenes[number :: len(splits)]
        samples = [{"png": png(scene), "cls": str(CLASSES.index(f"{scene[0]} {scene[1]}"))} for scene in own]
        write_tar(folder / split / "0.tar", samples)
        (folder / split / "nshards.txt").write_text("1")
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    return folder
