"""The towers of open_clip's models, as a PCME++ model uses them. Only this folder knows their attributes.

- `base`: the interface of a tower. `blocks`: the blocks of open_clip's own transformers.
- One kind per file: `vit` and `text`, open_clip's own transformers; `timm`; `resnet`; `huggingface`.
- `config`: the towers that a model config asks for, and the config of a model as it was built and as it is in use.

A new kind needs a subclass of `Tower` in a file of its own and one line below.
"""

from typing import Any

from .base import Tower
from .huggingface import HuggingFaceTower
from .resnet import ResNetTower
from .text import ClipTextTower, CustomTextTower
from .timm import TimmTower, set_image_size, take_size_of
from .vit import VisionTransformerTower

IMAGE_TOWERS = (VisionTransformerTower, TimmTower, ResNetTower)
TEXT_TOWERS = (ClipTextTower, CustomTextTower, HuggingFaceTower)


def image_tower(model: Any) -> Tower:
    return _first_that_fits(IMAGE_TOWERS, model, model.visual)


def text_tower(model: Any) -> Tower:
    return _first_that_fits(TEXT_TOWERS, model, getattr(model, "text", model))


def _first_that_fits(towers: Any, model: Any, module: Any) -> Tower:
    for tower in towers:
        if tower.fits(model):
            return tower(model)
    raise ValueError(f"A PCME++ model cannot be made of this tower: {type(module).__name__}.")


def fit_image_size(model: Any, state_dict: dict | None = None) -> None:
    """Resize the image tower to the model's config or, before a `state_dict` is loaded, to the tensors of that."""
    if not TimmTower.fits(model):
        return  # open_clip's own towers have that size, and files are resized when they are loaded
    if state_dict is None:
        set_image_size(model.visual)
    else:
        take_size_of(model.visual, state_dict)
