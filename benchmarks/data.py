"""`python -m benchmarks.data`: the loader against stock open_clip_train.data, on the same shards, side by side.

Prints samples/s of whole epochs as ratios to stock, measured in turn in one run, as it is and with reduced-scale
decoding; what that does to pixels; what cutting captions leaves of the text; and the memory of the workers by epoch.
"""

import argparse
import io
import json
import logging
import multiprocessing
import os
import statistics
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
from open_clip_train.data import get_data as stock_get_data
from open_clip_train.params import parse_args as stock_parse_args
from PIL import Image

from pcmepp_openclip import data
from pcmepp_openclip.data.decode import decode_image

MODEL = "PCMEpp-ViT-B-16"
WORDS = [
    "a",
    "an",
    "the",
    "small",
    "large",
    "red",
    "blue",
    "old",
    "photo",
    "picture",
    "of",
    "on",
    "in",
    "with",
    "dog",
    "cat",
    "house",
    "tree",
    "street",
    "man",
    "woman",
    "river",
]


def photo(rng: np.random.Generator, side: int) -> bytes:
    """A JPEG with the size in bytes of a photograph: smooth shapes, edges and grain."""
    coarse = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
    image = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    image = image + rng.normal(0, 8, image.shape).astype(np.int16)
    x, y, w = rng.integers(0, side // 2, 3)
    image[y : y + w, x : x + w] = rng.integers(0, 255, 3)
    file = io.BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_shards(folder: Path, shards: int, samples: int, side: int) -> str:
    rng = np.random.default_rng(0)
    photos = [photo(rng, side) for _ in range(100)]
    for number in range(shards):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for i in range(samples):
                caption = " ".join(rng.choice(WORDS, rng.integers(9, 18)))
                for name, content in (("jpg", photos[i % len(photos)]), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{number:05d}{i:04d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    (folder / "sizes.json").write_text(json.dumps({f"{number:05d}.tar": samples for number in range(shards)}))
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def arguments(pattern: str, args: argparse.Namespace, *flags: str) -> argparse.Namespace:
    ours = argparse.ArgumentParser()
    data.add_arguments(ours)
    sizes = ["--batch-size", str(args.batch_size), "--workers", str(args.workers)]
    stock = stock_parse_args(["--train-data", pattern, "--dataset-type", "webdataset", "--model", MODEL, *sizes])
    stock.world_size, stock.rank, stock.distributed = 1, 0, False
    return argparse.Namespace(**vars(stock), **vars(ours.parse_args(list(flags))))


def rate(train: Any, epoch: int) -> tuple[float, float, int]:
    """Samples by second and by second of processor time of a whole epoch, and the longest text in it."""
    train.set_epoch(epoch)
    samples, longest, start, busy = 0, 0, time.perf_counter(), processor_seconds()
    for images, texts in train.dataloader:
        samples, longest = samples + len(images), max(longest, texts.shape[1])
    return samples / (time.perf_counter() - start), samples / (processor_seconds() - busy), longest


def processor_seconds() -> float:
    """Of this process and all workers; those of the other loaders sleep."""
    ticks = 0
    for pid in ("self", *(process.pid for process in multiprocessing.active_children())):
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def worker_megabytes(train: Any) -> list[float]:
    """Memory of each worker that is its own, without the batches under way."""
    pids = [process.pid for loader in train.dataloader._workers for process in loader._iterator._workers]
    status = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return [
        sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss_Anon")) / 1e3 for text in status
    ]


def pixels(pattern: str, size: int = 224) -> str:
    """The images that training sees, reduced against whole, of a hundred samples."""
    with tarfile.open(pattern.replace(pattern[pattern.index("{") :], "00000.tar")) as tar:
        images = [tar.extractfile(member).read() for member in tar if member.name.endswith("jpg")][:100]  # type: ignore
    differences = []
    for image in images:
        whole, reduced = (
            np.asarray(decode_image(image, at_least=at_least).resize((size, size), Image.Resampling.BICUBIC), float)
            for at_least in (None, size)
        )
        differences.append(np.abs(whole - reduced))
    error = np.stack(differences)
    return (
        f"mean difference {error.mean():.2f} of 255, 99 % of the values within {np.quantile(error, 0.99):.0f}, "
        f"PSNR {10 * np.log10(255**2 / (error**2).mean()):.1f} dB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples", type=int, default=100, help="of a shard")
    parser.add_argument("--side", type=int, default=512, help="of the JPEGs, in pixels")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    logging.disable(logging.INFO)

    with tempfile.TemporaryDirectory() as folder:
        pattern = write_shards(Path(folder), args.shards, args.samples, args.side)
        transform = open_clip.image_transform(224, is_train=True)
        tokenizer = open_clip.get_tokenizer(MODEL)

        def load(get_data: Any, *flags: str) -> Any:
            return get_data(arguments(pattern, args, *flags), (transform, transform), tokenizer=tokenizer)["train"]

        def ours(*given: Any, **named: Any) -> Any:
            return data.get_data(stock_get_data, *given, **named)

        loaders = {
            "stock": load(stock_get_data),
            "ours": load(ours),
            "ours, reduced decoding": load(ours, "--train-data-reduced-decoding"),
        }
        rates: dict[str, list[list[float]]] = {name: [] for name in loaders}
        memory, longest = [], 0
        for number in range(args.rounds + 1):
            for name, train in loaders.items():
                *measured, length = rate(train, number)
                if number:  # the first starts the workers
                    rates[name].append(measured)
                if name == "ours":
                    longest = max(longest, length)
                    memory.append(worker_megabytes(train))
        print(f"{args.shards} shards of {args.samples} JPEGs of {args.side} pixels, {args.workers} workers")
        print(f"stock: {statistics.median(wall for wall, _ in rates['stock']):.0f} samples/s")
        for name in ("ours", "ours, reduced decoding"):
            for i, what in enumerate(
                ("samples/s", "samples by second of processor time, where neighbours disturb less")
            ):
                ratios = [mine[i] / stock[i] for mine, stock in zip(rates[name], rates["stock"], strict=True)]
                print(
                    f"{name}: {statistics.median(ratios):.2f} times stock "
                    f"({min(ratios):.2f} to {max(ratios):.2f} over {args.rounds} rounds) in {what}"
                )
        print(f"reduced decoding at 224 pixels: {pixels(pattern)}")
        print(f"captions of 9 to 17 words: at most {longest} of {tokenizer.context_length} tokens leave the loader")
        print("memory of each worker, MB, by epoch:")
        for worker in zip(*memory, strict=True):
            print("  " + " ".join(f"{value:.0f}" for value in worker))


if __name__ == "__main__":
    main()
