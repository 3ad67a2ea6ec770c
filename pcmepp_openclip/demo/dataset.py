"""The demo's data on disk: shards to train on, and two held-out sets in the layout that clip_benchmark reads.

FOLDER/train/00000.tar ..., sizes.json        pairs: NAME.png, NAME.txt
FOLDER/retrieval/test/0.tar, nshards.txt      NAME.png, NAME.txt with one caption per line, NAME.json with the facts
                     matches.json             {"images_of_caption": [[image, ...], ...]}: all that truly fit
FOLDER/zeroshot/test/0.tar, nshards.txt       NAME.png, NAME.cls, NAME.json; one thing each
               classnames.txt, zeroshot_classification_templates.txt
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from .drawing import render
from .scenes import COLOURS, SHAPES, Caption, Scene, draw_caption, draw_scene, fitting

SHARD = 4000
CAPTIONS_PER_IMAGE = 4
CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
TEMPLATES = ["a {c}", "a small {c}", "a large {c}", "a {c} and a shape", "a {c} left of a shape", "a shape above a {c}"]


@dataclass(frozen=True)
class HeldOut:
    """Held-out scenes and their captions, `CAPTIONS_PER_IMAGE` in a row for each scene."""

    scenes: list[Scene]
    captions: list[Caption]

    @property
    def own(self) -> list[int]:
        """Return the scene that each caption was written for."""
        return [i // CAPTIONS_PER_IMAGE for i in range(len(self.captions))]


def write_train(folder: Path, size: int, seed: int, quiet: bool = False) -> str:
    """Write `size` pairs. Returns the pattern that `--train-data` takes."""
    sizes = {f"{start // SHARD:05d}.tar": min(SHARD, size - start) for start in range(0, size, SHARD)}
    with tqdm(total=size, desc="drawing", unit=" pairs", disable=quiet or None) as bar:
        for name, number in sizes.items():
            _write_tar(folder / name, _pairs(Random(f"train {seed} {name}"), number))
            bar.update(number)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return f"{folder}/{{00000..{len(sizes) - 1:05d}}}.tar"


def _pairs(random: Random, number: int) -> Iterator[dict[str, Any]]:
    for _ in range(number):
        scene = draw_scene(random)
        yield {"png": render(scene), "txt": str(draw_caption(random, scene))}


def draw_held_out(size: int, seed: int) -> HeldOut:
    random = Random(f"test {seed}")
    scenes = [draw_scene(random) for _ in range(size)]
    return HeldOut(scenes, [draw_caption(random, scene) for scene in scenes for _ in range(CAPTIONS_PER_IMAGE)])


def write_retrieval(folder: Path, held_out: HeldOut) -> None:
    captions = [map(str, held_out.captions)] * CAPTIONS_PER_IMAGE  # one iterator, from which each scene takes its own
    own = ("\n".join(texts) for texts in zip(*captions, strict=True))
    samples = [
        {"png": render(scene), "txt": text, "json": asdict(scene)}
        for scene, text in zip(held_out.scenes, own, strict=True)
    ]
    _write_test(folder, samples)
    (folder / "dataset_type.txt").write_text("retrieval")
    matches = [row.nonzero()[0].tolist() for row in fitting(held_out.captions, held_out.scenes)]
    (folder / "test" / "matches.json").write_text(json.dumps({"images_of_caption": matches}))


def write_zeroshot(folder: Path, size: int, seed: int) -> None:
    random = Random(f"zero-shot {seed}")
    scenes = [draw_scene(random, things=1) for _ in range(size)]
    label = {name: i for i, name in enumerate(CLASSES)}
    _write_test(
        folder,
        [
            {"png": render(x), "cls": label[f"{x.things[0].colour} {x.things[0].shape}"], "json": asdict(x)}
            for x in scenes
        ],
    )
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))


def _write_test(folder: Path, samples: Iterable[dict[str, Any]]) -> None:
    _write_tar(folder / "test" / "0.tar", samples)
    (folder / "test" / "nshards.txt").write_text("1")


def _write_tar(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """Write samples with the same bytes whenever they are the same."""
    import webdataset

    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), mtime=0) as tar:
        for i, sample in enumerate(samples):
            tar.write({"__key__": f"{i:06d}", **sample})
