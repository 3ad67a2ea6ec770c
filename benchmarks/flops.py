"""Training FLOPs of PCME++ models against the plain ones, by torch's own counter, forward and backward.

python -m benchmarks flops
"""

from collections.abc import Iterator

import open_clip
import torch
from torch.utils.flop_counter import FlopCounterMode

import pcmepp_openclip  # noqa: F401  registers the models

from .measure import Row


def training_flops(name: str, text_length: int = 77, batch: int = 2) -> float:
    with torch.device("meta"):
        model = open_clip.create_model(name, output_dict=True, device="meta")
        image = torch.empty(batch, 3, *model.visual.image_size)
        text = torch.zeros(batch, text_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        out = model(image, text)
        torch.stack([value.float().sum() for value in out.values()]).sum().backward()
    return counter.get_total_flops() / batch


def rows() -> Iterator[Row]:
    for name, bars in (("ViT-B-32", (0.95, 0.9)), ("ViT-B-16", (0.95, 0.9)), ("ViT-L-14", (None, None))):
        plain = training_flops(name) / 1e9
        yield Row(f"{name}, training FLOPs per pair", training_flops(f"PCMEpp-{name}") / 1e9, plain, "G", bars[0])
        cut = training_flops(f"PCMEpp-{name}", text_length=16) / 1e9
        yield Row(f"{name}, training FLOPs per pair, texts cut to 16 tokens", cut, plain, "G", bars[1])
    released = training_flops("PCMEpp-ViT-B-16-unc2") / 1e9
    yield Row("ViT-B-16-unc2, training FLOPs per pair", released, training_flops("ViT-B-16") / 1e9, "G")
