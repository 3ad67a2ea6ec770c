"""The pairs of `pcmepp bank` and `pcmepp calibrate`, drawn and encoded, and the file that the result is saved to."""

import argparse
import tempfile
from pathlib import Path
from random import Random

from ..data.captioned import Captioned
from ..encode.encode import Encoder
from ..encode.load import LoadedModel
from ..gaussian import Gaussian
from ..system.files import check_folder


def output_file(out: Path, name: str) -> Path:
    """Return the file that `--out` names: `out` if it ends as `name` does, else the file `name` in that folder."""
    path = out if out.suffix == Path(name).suffix and not out.is_dir() else out / name
    check_folder(path.parent, "--out")
    if path.is_dir():
        raise ValueError(f"--out {out}: {path} is a folder; name another place.")
    return path


def draw(data: Captioned, size: int, seed: int, captions: int | None = None) -> Captioned:
    """Draw `size` images without replacement, in random order, with all of their captions, or with so many of each
    that are drawn too."""
    of_image: list[list[str]] = [[] for _ in data.images]
    for caption, image in zip(data.captions, data.image_of_caption, strict=True):
        of_image[image].append(caption)
    random, pairs = Random(seed), Captioned()
    for i in random.sample(range(len(data.images)), size):
        drawn = of_image[i] if captions is None else random.sample(of_image[i], captions)
        pairs.add(data.images[i], drawn, data.facts[i])
    return pairs


def encode(
    loaded: LoadedModel, data: Captioned, args: argparse.Namespace, probabilistic: bool
) -> tuple[Gaussian, Gaussian]:
    """Encode the images and the captions, by the means alone unless `probabilistic`."""
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
