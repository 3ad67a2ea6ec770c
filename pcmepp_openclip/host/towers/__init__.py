"""The towers of open_clip's models, as a PCME++ model uses them. Only this folder knows their attributes.

- `base`: the interface of a tower. `blocks`: the blocks of open_clip's own transformers.
- One kind per file: `vit` and `text`, open_clip's own transformers; `timm`; `resnet`; `huggingface`.
- `config`: the towers that a model config asks for, and the config of a model as it was built and as it is in use.

A new kind needs a subclass of `Tower` in a file of its own and one line below.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import open_clip
from torch import Tensor, nn

from .base import AVERAGE, Average, SplitTower, Tokens, Tower, check_attributes
from .blocks import BlockParts, Stack, image_blocks, pair, parts_of, set_recompute, text_blocks
from .config import check_towers, config_as_built, config_in_use, default_heads, text_may_be_cut
from .huggingface import HuggingFaceTower
from .resnet import ResNetTower
from .text import ClipTextTower, CustomTextTower
from .timm import TimmTower, set_image_size, take_size_of
from .vit import VisionTransformerTower

__all__ = [
    "AVERAGE",
    "CLIP",
    "IMAGE_TOWERS",
    "MODEL_PARTS",
    "TEXT_TOWERS",
    "Average",
    "BlockParts",
    "CustomTextCLIP",
    "SplitTower",
    "Stack",
    "Tokens",
    "Tower",
    "check_parts",
    "check_towers",
    "config_as_built",
    "config_in_use",
    "default_heads",
    "fit_image_size",
    "image_blocks",
    "image_tower",
    "outputs_of",
    "pair",
    "parts_of",
    "set_recompute",
    "text_blocks",
    "text_may_be_cut",
    "text_tower",
]

CLIP = open_clip.CLIP
CustomTextCLIP = open_clip.CustomTextCLIP

IMAGE_TOWERS: tuple[type[Tower], ...] = (VisionTransformerTower, TimmTower, ResNetTower)
TEXT_TOWERS: tuple[type[Tower], ...] = (ClipTextTower, CustomTextTower, HuggingFaceTower)
MODEL_PARTS = ("logit_scale", "logit_bias", "output_dict", "context_length")  # every model has these attributes


def image_tower(model: Any) -> Tower:
    return _first_that_fits(IMAGE_TOWERS, model)


def text_tower(model: Any) -> Tower:
    return _first_that_fits(TEXT_TOWERS, model)


def _first_that_fits(towers: tuple[type[Tower], ...], model: Any) -> Tower:
    for tower in towers:
        if tower.fits(model):
            return tower(model)
    raise ValueError(f"A PCME++ model cannot be made of this tower: {type(model.visual).__name__}.")


def check_parts(model: Any) -> None:
    """Raise ImportError, with the cure, if open_clip's model lacks an attribute that a PCME++ model needs."""
    check_attributes(model, (*MODEL_PARTS, *image_tower(model).parts, *text_tower(model).parts))


def fit_image_size(model: Any, state_dict: dict | None = None) -> None:
    """Resize the image tower to the model's config or, before a `state_dict` is loaded, to the tensors of that."""
    if not TimmTower.fits(model):
        return  # open_clip's own towers have that size, and files are resized when they are loaded
    if state_dict is None:
        set_image_size(model.visual)
    else:
        take_size_of(model.visual, state_dict)


@contextlib.contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of `module` while the context lasts, for methods of open_clip that do not return them."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()
