"""The demo's data on disk: shards to train on, and two held-out sets in the layout that clip_benchmark reads.

FOLDER/train/00000.tar ..., sizes.json        pairs: NAME.png, NAME.txt
FOLDER/retrieval/test/0.tar, nshards.txt      NAME.png, NAME.txt with one caption per line, NAME.json with the facts
                     matches.json             {"images_of_caption": [[image, ...], ...]}: all that truly fit
FOLDER/zeroshot/test/0.tar, nshards.txt       NAME.png, NAME.cls, NAME.json; one thing each
               classnames.txt, zeroshot_classification_templates.txt
"""

import dataclasses
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from PIL import Image
from tqdm import tqdm

from .drawing import render
from .scenes import COLOURS, SHAPES, Caption, Scene, draw_caption, draw_scene, fitting

SHARD = 4000
CAPTIONS_PER_IMAGE = 4
CLASSES = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
TEMPLATES = ["a {c}", "a small {c}", "a large {c}", "a {c} and a shape", "a {c} left of a shape", "a shape above a {c}"]


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out scenes and their captions, `CAPTIONS_PER_IMAGE` in a row for each scene."""

    scenes: list[Scene]
    captions: list[Caption]

    @property
    def own(self) -> list[int]:
        """The scene that each caption was written for."""
        return [i // CAPTIONS_PER_IMAGE for i in range(len(self.captions))]


def write_train(folder: Path, size: int, seed: int, quiet: bool = False) -> str:
    """`size` pairs; the pattern that `--train-data` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {f"{start // SHARD:05d}.tar": min(SHARD, size - start) for start in range(0, size, SHARD)}
    with tqdm(total=size, desc="drawing", unit=" pairs", disable=quiet or None) as bar:
        for name, number in sizes.items():
            _write_tar(folder / name, _pairs(Random(f"train {seed} {name}"), number))
            bar.update(number)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return f"{folder}/{{00000..{len(sizes) - 1:05d}}}.tar"


def draw_held_out(size: int, seed: int) -> HeldOut:
    random = Random(f"test {seed}")
    scenes = [draw_scene(random) for _ in range(size)]
    return HeldOut(scenes, [draw_caption(random, scene) for scene in scenes for _ in range(CAPTIONS_PER_IMAGE)])


def write_retrieval(folder: Path, held_out: HeldOut) -> None:
    def samples() -> Iterator[dict[str, bytes]]:
        for i, scene in enumerate(held_out.scenes):
            own = held_out.captions[i * CAPTIONS_PER_IMAGE : (i + 1) * CAPTIONS_PER_IMAGE]
            yield {"png": _png(render(scene)), "txt": "\n".join(map(str, own)).encode(), "json": _facts(scene)}

    _write_test(folder, samples())
    (folder / "dataset_type.txt").write_text("retrieval")
    matches = [row.nonzero()[0].tolist() for row in fitting(held_out.captions, held_out.scenes)]
    (folder / "test" / "matches.json").write_text(json.dumps({"images_of_caption": matches}))


def write_zeroshot(folder: Path, size: int, seed: int) -> None:
    random = Random(f"zero-shot {seed}")

    def samples() -> Iterator[dict[str, bytes]]:
        for _ in range(size):
            scene = draw_scene(random, things=1)
            label = CLASSES.index(f"{scene.things[0].colour} {scene.things[0].shape}")
            yield {"png": _png(render(scene)), "cls": str(label).encode(), "json": _facts(scene)}

    _write_test(folder, samples())
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))


def _pairs(random: Random, number: int) -> Iterator[dict[str, bytes]]:
    for _ in range(number):
        scene = draw_scene(random)
        yield {"png": _png(render(scene)), "txt": str(draw_caption(random, scene)).encode()}


def _write_test(folder: Path, samples: Iterable[dict[str, bytes]]) -> None:
    (folder / "test").mkdir(parents=True, exist_ok=True)
    _write_tar(folder / "test" / "0.tar", samples)
    (folder / "test" / "nshards.txt").write_text("1")


def _write_tar(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, members in enumerate(samples):
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{i:06d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _facts(scene: Scene) -> bytes:
    facts = dataclasses.asdict(scene)
    return json.dumps({"condition": facts.pop("condition"), **facts}).encode()
