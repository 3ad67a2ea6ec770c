"""Retrieval as `pcmepp eval` does it, of 25,000 captions and 5,000 images, by CSD against by cosine: time, memory.

python -m benchmarks retrieval
"""

import functools
import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pcmepp_openclip import Gaussian
from pcmepp_openclip.evaluation.retrieval import retrieval

from .measure import Row, elsewhere, peak_memory, reset_peak_memory, timed

CAPTIONS, IMAGES, DIM = 25_000, 5_000, 512


def gaussians(count: int, seed: int) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(count, DIM, generator=g), dim=-1), torch.randn(count, DIM, generator=g) - 8)


def measured(distance: str, images: Gaussian, texts: Gaussian) -> dict[str, float]:
    image_of_text = [i * len(images.mean) // len(texts.mean) for i in range(len(texts.mean))]
    return dict(retrieval(images, texts, image_of_text, distances=[distance]))


def rows() -> Iterator[Row]:
    what = f"retrieval, {CAPTIONS} captions and {IMAGES} images"
    images, texts = gaussians(IMAGES, 0), gaussians(CAPTIONS, 1)
    ours, theirs = (functools.partial(measured, distance, images, texts) for distance in ("csd", "mean"))
    yield timed(f"{what}, by CSD against by cosine, time", ours, theirs, 1.2, repeats=3)
    our_peak, their_peak = (elsewhere("benchmarks.retrieval", distance) for distance in ("csd", "mean"))
    yield Row(f"{what}, by CSD against by cosine, memory", our_peak, their_peak, "MB", 1.2)


if __name__ == "__main__":
    images, texts = gaussians(IMAGES, 0), gaussians(CAPTIONS, 1)
    measured(sys.argv[1], gaussians(10, 0), gaussians(20, 1))
    before = reset_peak_memory()
    measured(sys.argv[1], images, texts)
    print(json.dumps(peak_memory() - before))
