"""Training FLOPs of PCME++ models against the plain ones, by torch's own counter, forward and backward.

python -m benchmarks flops
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import pcmepp_openclip  # noqa: F401  registers the models

from . import hf_configs
from .measure import Row


@dataclass(frozen=True)
class Count:
    """The cost of a model, counted on the meta device, which has shapes and no numbers.

    Arguments:
        flops: the FLOPs of a forward and a backward pass, per pair.
        parameters: the number of parameters.
        idle: the names of parameters that get no gradient.
        branches: the places where the log-variance branches of image and text tower start; none in a plain model.
    """

    flops: float
    parameters: int
    idle: frozenset[str]
    branches: tuple[str, ...]


class ValuesUnknown(TorchFunctionMode):
    """Answers no to questions about values.

    On the meta device nobody knows whether a mask hides anything, and transformers, which asks, then computes with the
    mask.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))


def count(name: str, text_length: int | None = None, batch: int = 2) -> Count:
    """Return the cost of the model of that name.

    Arguments:
        text_length: the number of tokens; the context length by default.
    """
    model = shape_only(name)
    image = torch.empty(batch, 3, *image_size(model), device="meta")
    text = torch.zeros(batch, text_length or context_length(name), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, ValuesUnknown():
        total(model(image, text)).backward()
    idle = frozenset(name for name, parameter in model.named_parameters() if parameter.grad is None)
    cfg = getattr(model, "pcmepp_cfg", None)
    branches = (getattr(cfg, "image_head", "split"), getattr(cfg, "text_head", "split")) if cfg else ()
    return Count(counter.get_total_flops() / batch, parameters(model), idle, branches)


def shape_only(name: str, **changes: Any) -> Any:
    """Return the model of that name on the meta device; `changes` are further arguments of `create_model`."""
    with torch.device("meta"), hf_configs.known():
        return open_clip.create_model(name, output_dict=True, device="meta", pretrained_text=False, **changes)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def image_size(model: Any) -> tuple[int, int]:
    size: Any = model.visual.image_size
    return (size, size) if isinstance(size, int) else tuple(size)  # a ResNet's is a number


def context_length(name: str) -> int:
    """Return the context length of the tokenizer. A Hugging Face tower could take longer texts."""
    config = open_clip.get_model_config(name)
    assert config is not None
    return config["text_cfg"].get("context_length", 77)


def total(out: dict[str, Tensor]) -> Tensor:
    """Return a number that every output takes part in."""
    return torch.stack([value.float().sum() for value in out.values()]).sum()


SPLIT, TOP = 0.96, 1.02  # the bars if both branches leave their towers early, and if one is on top
DEEPER = "a split saves at most one block of each tower"
SPLITS = {  # models with both branches split off: the bars for whole texts and for 16 tokens, and a note
    "ViT-B-32": (0.95, 0.9, ""),
    "ViT-B-16": (0.95, 0.9, ""),
    "ViT-L-14": (None, None, ""),
    "ViT-H-14": (SPLIT, SPLIT, DEEPER),
    "ViT-bigG-14": (SPLIT, SPLIT, DEEPER),
}
KINDS = {  # one model of each kind, in the order of docs/models.md
    "ViT-L-14-CLIPA": (SPLIT, "the image tower averages all tokens, so that its last block saves nothing"),
    "ViT-B-16-SigLIP": (TOP, ""),
    "EVA02-B-16": (TOP, ""),
    "PE-Core-B-16": (TOP, ""),
    "convnext_base": (TOP, ""),
    "MobileCLIP-S2": (TOP, ""),
    "RN50": (TOP, ""),
    "roberta-ViT-B-32": (TOP, ""),
}


def rows() -> Iterator[Row]:
    for name, (whole_bar, cut_bar, note) in SPLITS.items():
        plain = count(name).flops / 1e9
        whole, cut = (count(f"PCMEpp-{name}", text_length=length).flops / 1e9 for length in (None, 16))
        yield Row(f"{name}, training FLOPs per pair", whole, plain, "G", whole_bar, note=note)
        yield Row(f"{name}, training FLOPs per pair, texts cut to 16 tokens", cut, plain, "G", cut_bar)
    released = count("PCMEpp-ViT-B-16-unc2").flops / 1e9
    yield Row("ViT-B-16-unc2, training FLOPs per pair", released, count("ViT-B-16").flops / 1e9, "G")
    for name, (bar, note) in KINDS.items():
        plain = count(name).flops / 1e9
        yield Row(f"{name}, training FLOPs per pair", count(f"PCMEpp-{name}").flops / 1e9, plain, "G", bar, note=note)
