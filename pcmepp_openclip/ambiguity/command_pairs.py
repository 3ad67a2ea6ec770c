"""What `pcmepp bank` and `pcmepp calibrate` have in common: their flags, and pairs that are drawn and encoded."""

import argparse
import os
import tempfile
from pathlib import Path
from random import Random

from ..data.captioned import Captioned
from ..encode.encode import Encoder
from ..encode.load import LoadedModel, add_model_flags, check_name, has_random_weights
from ..gaussian import Gaussian
from ..system.files import check_folder


def parser(command: str, about: str | None, default_size: int, size_help: str) -> argparse.ArgumentParser:
    """The flags that both commands have."""
    found = argparse.ArgumentParser(
        prog=f"pcmepp {command}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(found)
    found.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="images with captions: a folder in clip_benchmark's layout, or shards, as in 'coco/{00..09}.tar'",
    )
    found.add_argument("--split", default="test", help="the split of a folder (default: test)")
    found.add_argument("--size", type=int, default=default_size, help=f"{size_help} (default: {default_size})")
    found.add_argument("--seed", type=int, default=0, help="random seed for sampling pairs (default: 0)")
    found.add_argument("--out", required=True, type=Path, help="a file, or a folder, such as that of an exported model")
    found.add_argument("--batch-size", type=int, default=64, help="samples per batch (default: 64)")
    found.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes that decode images")
    found.add_argument("--device", help="default: cuda if available, else cpu")
    return found


def check_arguments(args: argparse.Namespace, least_size: int) -> None:
    if args.size < least_size:
        raise ValueError(f"--size must be at least {least_size}, not {args.size}.")
    check_name(args.model)
    if has_random_weights(args.model, args.pretrained):
        raise ValueError(f"--model {args.model} has random weights: give --pretrained.")
    if args.batch_size < 1 or args.workers < 0:
        raise ValueError("--batch-size must be at least 1, and --workers at least 0.")


def output_file(out: Path, name: str) -> Path:
    """The file that `--out` names: itself, if it ends as `name` does, else the file of that name in the folder."""
    path = out if out.suffix == Path(name).suffix and not out.is_dir() else out / name
    check_folder(path.parent, "--out")
    if path.is_dir():
        raise ValueError(f"--out {out}: {path} is a folder; name another place.")
    return path


def draw(data: Captioned, size: int, seed: int, captions: int | None = None) -> Captioned:
    """That many images without replacement, in random order, with all of their captions, or with so many of each that
    are drawn too."""
    of_image: list[list[str]] = [[] for _ in data.images]
    for caption, image in zip(data.captions, data.image_of_caption, strict=True):
        of_image[image].append(caption)
    random, found = Random(seed), Captioned()
    for i in random.sample(range(len(data.images)), size):
        drawn = of_image[i] if captions is None else random.sample(of_image[i], captions)
        found.add(data.images[i], drawn, data.facts[i])
    return found


def encode(
    loaded: LoadedModel, data: Captioned, args: argparse.Namespace, probabilistic: bool
) -> tuple[Gaussian, Gaussian]:
    """The images and the captions, by the means alone unless `probabilistic`."""
    with tempfile.TemporaryDirectory(prefix="pcmepp-embeddings-") as cache:
        encoder = Encoder(
            loaded.model,
            loaded.preprocess,
            loaded.tokenizer,
            probabilistic,
            Path(cache),
            device=loaded.device,
            batch_size=args.batch_size,
            workers=args.workers,
        )
        return encoder.images(data.images), encoder.texts(data.captions)
