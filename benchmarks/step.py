"""A whole training step (forward, loss, backward, AdamW) of PCME++ models against open_clip's: time and peak memory.

python -m benchmarks step

Memory is measured in processes of their own, of a forward and backward pass and the optimiser's update. PCME++ has
about 7 % more parameters, which weigh at tiny batches; at the batches of training the activations do.
"""

import json
import sys
from collections.abc import Callable, Iterator

import open_clip
import torch

import pcmepp_openclip

from .measure import Row, elsewhere, peak_memory, reset_peak_memory, timed

CASES = (("ViT-B-32", 8, 32), ("ViT-B-16", 3, 8))  # plain model, batch for time, batch for memory


def training_step(name: str, batch: int, text_length: int = 77) -> Callable[[], None]:
    torch.manual_seed(0)
    model = open_clip.create_model(name, output_dict=True)
    loss = pcmepp_openclip.PCMEppLoss() if name.startswith("PCMEpp") else open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    image = torch.randn(batch, 3, *model.visual.image_size)
    text = torch.randint(1, 49406, (batch, text_length))
    text[:, -1] = 49407  # the end of a text, which both pool at

    def step() -> None:
        optimizer.zero_grad()
        torch.stack(list(loss(**model(image, text), output_dict=True).values())).sum().backward()
        optimizer.step()

    return step


def rows() -> Iterator[Row]:
    for name, batch, memory_batch in CASES:
        theirs = training_step(name, batch)
        ours = training_step(f"PCMEpp-{name}", batch)
        yield timed(f"{name}, training step of {batch}, time", ours, theirs, 1.0, repeats=3)
        ours = training_step(f"PCMEpp-{name}", batch, text_length=16)
        yield timed(f"{name}, the same, texts cut to 16 tokens", ours, theirs, 0.9, repeats=3)
        our_peak, their_peak = (elsewhere("benchmarks.step", kind + name, memory_batch) for kind in ("PCMEpp-", ""))
        yield Row(f"{name}, training step of {memory_batch}, memory", our_peak, their_peak, "MB", 1.02)


if __name__ == "__main__":
    reset_peak_memory()
    step = training_step(sys.argv[1], int(sys.argv[2]))
    step()
    step()
    print(json.dumps(peak_memory()))
