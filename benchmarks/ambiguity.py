"""The time of the confusion of a text by a bank beside the encoding of that text by ViT-B-32, one text at a time.

python -m benchmarks ambiguity
"""

from collections.abc import Callable, Iterator

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from pcmepp_openclip.ambiguity import Bank

from .measure import Row, one_thread, row, turns

SIZES = (1024, 4096, 16384)
DIM, QUERIES, REPEATS = 512, 8, 7
BAR = 0.1


def references(count: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=-1)


def confusions(size: int) -> Callable[[], list[Tensor]]:
    """Return a function that computes the confusion of some texts in a bank of that size, one after the other."""
    bank = Bank(references(size, 0), references(size, 1), 100.0)
    queries = references(QUERIES, 2).split(1)
    return lambda: [bank.confusion(query, "texts") for query in queries]


def encodings() -> Callable[[], list[Tensor]]:
    """Return a function that encodes as many texts, one after the other."""
    torch.manual_seed(0)
    model = open_clip.create_model("ViT-B-32").eval()
    tokens = open_clip.get_tokenizer("ViT-B-32")(["a small black dog on a red sofa"] * QUERIES).split(1)

    @torch.inference_mode()
    def work() -> list[Tensor]:
        return [model.encode_text(text, normalize=True) for text in tokens]

    return work


def rows() -> Iterator[Row]:
    with one_thread():
        *ours, theirs = turns([*map(confusions, SIZES), encodings()], REPEATS)
    per_text = [seconds / QUERIES for seconds in theirs]
    for size, seconds in zip(SIZES, ours, strict=True):
        title = f"confusion of a text by a bank of {size} pairs against its encoding by ViT-B-32, time"
        yield row(title, [x / QUERIES for x in seconds], per_text, "s", BAR)
