"""Retrieval as `pcmepp eval` does it, of 25,000 captions and 5,000 images, by CSD against by cosine: time, memory.

python -m benchmarks retrieval
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from pcmepp_openclip import Gaussian
from pcmepp_openclip.evaluation.retrieval import Ranking, rankings

from .measure import Row, added_memory, alone, one_thread, timed

CAPTIONS, IMAGES, DIM = 25_000, 5_000, 512


def gaussians(count: int, seed: int) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(count, DIM, generator=g), dim=-1), torch.randn(count, DIM, generator=g) - 8)


def work(distance: str, count: int = IMAGES) -> Callable[[], list[Ranking]]:
    """Return the retrieval among that many images, with the captions that belong to them."""
    each = CAPTIONS // IMAGES
    images, texts = gaussians(count, 0), gaussians(count * each, 1)
    image_of_text = [i // each for i in range(count * each)]
    return lambda: rankings(images, texts, image_of_text, distances=[distance])


def peak(distance: str) -> float:
    work(distance, 10)()
    return added_memory(work(distance))


def rows() -> Iterator[Row]:
    title = f"retrieval, {CAPTIONS} captions, {IMAGES} images, CSD against cosine"
    with one_thread():
        yield timed(f"{title}, time", work("csd"), work("cosine"), 1.2)
    our_peak, their_peak = alone(peak, ("csd",), ("cosine",))
    yield Row(f"{title}, memory", our_peak, their_peak, "MB", 1.2)
