"""The demo's data on disk: shards to train on, and two held-out sets in the layout that clip_benchmark reads.

FOLDER/train/00000.tar ..., sizes.json        pairs: NAME.png, NAME.txt
FOLDER/retrieval/test/0.tar, nshards.txt      NAME.png, NAME.txt with one caption per line, NAME.json with the facts
                     matches.json             {"images_of_caption": [[image, ...], ...]}: all that truly fit
FOLDER/zeroshot/test/0.tar, nshards.txt       NAME.png, NAME.cls, NAME.json; one thing each
               classnames.txt, zeroshot_classification_templates.txt
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tqdm import tqdm

from .drawing import render
from .scenes import COLOURS, SHAPES, Caption, Scene, draw_caption, draw_scene, fitting

SHARD = 4000
CAPTIONS_PER_IMAGE = 4
CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
TEMPLATES = ["a {c}", "a small {c}", "a large {c}", "a {c} and a shape", "a {c} left of a shape", "a shape above a {c}"]


class HeldOut(NamedTuple):
    """Held-out scenes and their captions, `CAPTIONS_PER_IMAGE` in a row for each scene."""

    scenes: list[Scene]
    captions: list[Caption]


def write_train(folder: Path, size: int, seed: int, quiet: bool = False) -> str:
    """Write `size` pairs. Returns the pattern that `--train-data` takes."""
    sizes = {f"{start // SHARD:05d}.tar": min(SHARD, size - start) for start in range(0, size, SHARD)}
    with tqdm(total=size, desc="drawing", unit=" pairs", disable=quiet or None) as bar:
        for name, number in sizes.items():
            random = Random(f"train {seed} {name}")
            scenes = (draw_scene(random) for _ in range(number))  # its caption is drawn before the next scene
            _write_tar(folder / name, ({"png": render(x), "txt": str(draw_caption(random, x))} for x in scenes))
            bar.update(number)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return f"{folder}/{{00000..{len(sizes) - 1:05d}}}.tar"


def draw_held_out(size: int, seed: int) -> HeldOut:
    random = Random(f"test {seed}")
    scenes = [draw_scene(random) for _ in range(size)]
    return HeldOut(scenes, [draw_caption(random, scene) for scene in scenes for _ in range(CAPTIONS_PER_IMAGE)])


def write_retrieval(folder: Path, held_out: HeldOut) -> None:
    samples = []
    for i, scene in enumerate(held_out.scenes):
        own = held_out.captions[i * CAPTIONS_PER_IMAGE : (i + 1) * CAPTIONS_PER_IMAGE]
        samples.append({"png": render(scene), "txt": "\n".join(map(str, own)), "json": asdict(scene)})
    _write_tar(folder / "test" / "0.tar", samples)
    matches = [row.nonzero()[0].tolist() for row in fitting(held_out.captions, held_out.scenes)]
    _write_texts(
        folder, {"dataset_type.txt": "retrieval", "test/matches.json": json.dumps({"images_of_caption": matches})}
    )


def write_zeroshot(folder: Path, size: int, seed: int) -> None:
    random, samples = Random(f"zero-shot {seed}"), []
    for _ in range(size):
        scene = draw_scene(random, things=1)
        label = CLASSES.index(f"{scene.things[0].colour} {scene.things[0].shape}")
        samples.append({"png": render(scene), "cls": label, "json": asdict(scene)})
    _write_tar(folder / "test" / "0.tar", samples)
    templates = "\n".join(TEMPLATES)
    _write_texts(folder, {"classnames.txt": "\n".join(CLASSES), "zeroshot_classification_templates.txt": templates})


def _write_texts(folder: Path, texts: dict[str, str]) -> None:
    for name, text in ({"test/nshards.txt": "1"} | texts).items():
        (folder / name).write_text(text)


def _write_tar(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write samples with the same bytes whenever they are the same."""
    import webdataset

    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), mtime=0) as tar:
        for i, sample in enumerate(samples):
            tar.write({"__key__": f"{i:06d}", **sample})
