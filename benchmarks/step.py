"""A whole training step (forward, loss, backward, AdamW) of PCME++ models against open_clip's: time and peak memory.

python -m benchmarks step

PCME++ has about 7 % more parameters, whose updates and memory weigh at the batches that fit here as they never do in
training. So AdamW is the fused one, and memory is measured at a larger batch than time: at 32 pairs (B-32) and 16
(B-16) the activations that PCME++ saves about make up for the parameters that it adds.
"""

from collections.abc import Callable, Iterator

import open_clip
import torch

import pcmepp_openclip

from .measure import Row, added_memory, alone, one_thread, row, turns

CASES = (("ViT-B-32", 4, 8, 32), ("ViT-B-16", 2, 11, 16))  # plain model, batch for time and repeats, batch for memory


def training_step(name: str, batch: int, text_length: int | None = None) -> Callable[[], None]:
    """Return a step with texts of that many tokens, by default the context length."""
    torch.manual_seed(0)
    model = open_clip.create_model(name, output_dict=True)
    loss = pcmepp_openclip.PCMEppLoss() if name.startswith("PCMEpp") else open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # this makes its moments, as in the middle of a run
    image = torch.randn(batch, 3, *model.visual.image_size)
    text = torch.randint(1, 49406, (batch, text_length or model.context_length))
    text[:, -1] = 49407  # the end of a text, at which both models pool

    def step() -> None:
        optimizer.zero_grad()
        torch.stack(list(loss(**model(image, text), output_dict=True).values())).sum().backward()
        optimizer.step()

    return step


def peak(name: str, batch: int) -> float:
    return added_memory(lambda: training_step(name, batch)())


def rows() -> Iterator[Row]:
    for name, batch, repeats, memory_batch in CASES:
        works = [training_step(f"PCMEpp-{name}", batch, text_length) for text_length in (77, 16)]
        with one_thread():
            whole, cut, theirs = turns([*works, training_step(name, batch)], repeats)
        yield row(f"{name}, training step of {batch} pairs, time", whole, theirs, "s", 1.0)
        yield row(f"{name}, training step of {batch} pairs, texts cut to 16 tokens, time", cut, theirs, "s", 0.9)
        del works
        our_peak, their_peak = alone(peak, (f"PCMEpp-{name}", memory_batch), (name, memory_batch))
        yield Row(f"{name}, training step of {memory_batch} pairs, memory", our_peak, their_peak, "MB", 1.02)
