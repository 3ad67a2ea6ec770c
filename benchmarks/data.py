"""The loader against stock open_clip_train.data, on the same shards, with as many workers: samples/s and memory.

python -m benchmarks data

Every way of decoding is measured, with its effect on pixels, and the length of texts after cutting. Images are
normalized in the training process here, and in the workers there: the measured time has both.
"""

import argparse
import io
import json
import math
import multiprocessing
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from open_clip_train.data import get_data as stock_get_data
from PIL import Image

from pcmepp_openclip import data
from pcmepp_openclip.data import build
from pcmepp_openclip.data.crops import RandomCrop
from pcmepp_openclip.data.decode import MAX_PIXELS
from pcmepp_openclip.host import data as host_data
from pcmepp_openclip.training.config import parse

from .measure import Row, row

MODEL = "PCMEpp-ViT-B-16"
WORDS = """a an the small large red blue old photo picture of on in with
    dog cat house tree street man woman river""".split()  # noqa: SIM905
SHARDS, SAMPLES, SIDE = 8, 100, 512  # samples of a shard, pixels of a JPEG
WORKERS, BATCH, EPOCHS = 2, 32, 5


def photo(rng: np.random.Generator, side: int) -> bytes:
    """Return a JPEG with the size in bytes of a photograph: smooth shapes, edges and grain."""
    coarse = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    image = image + rng.normal(0, 8, image.shape).astype(np.int16)
    x, y, w = rng.integers(0, side // 2, 3)
    image[y : y + w, x : x + w] = rng.integers(0, 255, 3)
    file = io.BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_shards(folder: Path, shards: int = SHARDS, samples: int = SAMPLES) -> str:
    """Write counted shards of that many samples each, and return their pattern."""
    rng = np.random.default_rng(0)
    photos = [photo(rng, SIDE) for _ in range(samples)]
    for number in range(shards):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for i, image in enumerate(photos):
                caption = " ".join(rng.choice(WORDS, rng.integers(9, 18)))
                for name, content in (("jpg", image), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{number:05d}{i:04d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    (folder / "sizes.json").write_text(json.dumps({f"{number:05d}.tar": samples for number in range(shards)}))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def arguments(
    pattern: str, *flags: str, model: str = MODEL, batch_size: int = BATCH, workers: int = WORKERS
) -> argparse.Namespace:
    sizes = ["--batch-size", str(batch_size), "--workers", str(workers)]
    args = parse(["--train-data", pattern, "--dataset-type", "webdataset", "--model", model, *sizes, *flags])
    args.distributed = False
    return args


def our_get_data(args: argparse.Namespace, *rest: Any, **options: Any) -> Any:
    return build.get_data(stock_get_data, data.resolve(args, vars(args)), args, *rest, **options)


def load(pattern: str, get_data: Callable[..., Any], *flags: str) -> Any:
    """Return the training data by a `get_data`, with open_clip's transform for training."""
    transform = open_clip.image_transform(224, is_train=True)
    tokenizer = open_clip.get_tokenizer(MODEL)
    return get_data(arguments(pattern, *flags), (transform, transform), tokenizer=tokenizer)["train"]


def rate(train: Any, epoch: int) -> tuple[float, int]:
    """Return the samples per second of a whole epoch, and the longest text in it."""
    train.set_epoch(epoch)
    samples, longest, start = 0, 0, time.perf_counter()
    for images, texts in train.dataloader:
        samples, longest = samples + len(images), max(longest, texts.shape[1])
    return samples / (time.perf_counter() - start), longest


def megabytes(pids: set[int]) -> float:
    """Return the memory in MB that a worker shares with no other process, the mean over these processes."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Private_Dirty")]
    return sum(int(line.split()[1]) for line in lines) / 1e3 / len(pids)


def pixels(pattern: str, transform: Any, reduced: bool) -> str:
    """Return in words how the crops of the first shard that training sees differ from exact ones."""
    with tarfile.open(pattern.replace(pattern[pattern.index("{") :], "00000.tar")) as tar:
        images = [tar.extractfile(member).read() for member in tar if member.name.endswith("jpg")]  # type: ignore
    steps = host_data.split_crop(host_data.split_transform(transform)[0])
    assert steps is not None
    errors = []
    for seed, image in enumerate(images):
        crops = []
        for crop in (RandomCrop(*steps, exact=True), RandomCrop(*steps, reduced=reduced)):
            torch.manual_seed(seed)
            crops.append(crop(image, MAX_PIXELS, False).double())
        errors.append((crops[0] - crops[1]).abs())
    error = torch.stack(errors)
    psnr = 10 * math.log10(255**2 / error.square().mean())
    return f"pixels differ by {error.mean():.3f} of 255 in the mean, PSNR {psnr:.1f} dB"


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        pattern = write_shards(Path(folder))
        transform, tokenizer = open_clip.image_transform(224, is_train=True), open_clip.get_tokenizer(MODEL)
        loaders = {
            "stock": load(pattern, stock_get_data),
            "exact": load(pattern, our_get_data, "--train-data-decoding", "exact"),
            "fast": load(pattern, our_get_data),
            "reduced": load(pattern, our_get_data, "--train-data-decoding", "reduced"),
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        memory: dict[str, list[float]] = {name: [] for name in loaders}
        workers: dict[str, set[int]] = {}
        longest = 0
        for epoch in range(EPOCHS + 1):
            for name, train in loaders.items() if epoch % 2 else reversed(loaders.items()):
                speed, length = rate(train, epoch)
                if epoch == 0:  # this epoch starts the workers
                    alive = {process.pid for process in multiprocessing.active_children() if process.pid}
                    workers[name] = alive.difference(*workers.values())
                    continue
                rates[name].append(speed)
                memory[name].append(megabytes(workers[name]))
                longest = max(longest, length) if name == "fast" else longest
        data_title = f"data, {SHARDS * SAMPLES} JPEGs of {SIDE} pixels per epoch, {WORKERS} workers"
        note = f"at most {longest} of {tokenizer.context_length} tokens leave the loader"
        for name, bar in (("exact", 1.4), ("fast", 2.5), ("reduced", 2.5)):
            title = f"{data_title}, decoding {name}"
            yield row(title, rates[name], rates["stock"], "samples/s", bar, least=True, note=note)
            note = pixels(pattern, transform, reduced=name == "fast")  # the note of the next row
        last = {name: values[-1] for name, values in memory.items()}
        for name in ("exact", "fast", "reduced"):
            title = f"data, memory of a worker in epoch {EPOCHS}, decoding {name}"
            yield Row(title, last[name], last["stock"], "MB")
        yield Row(
            f"data, memory of a worker, epoch {EPOCHS} against epoch 1",
            last["fast"],
            memory["fast"][0],
            "MB",
            1.05,
        )
