"""A PCME++ model and the plain model of the same weights, side by side with real numbers."""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import open_clip
import timm
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import pcmepp_openclip  # noqa: F401  registers the models

from . import hf_configs
from .flops import context_length, image_size, total
from .hf_configs import LAYERS, TOKENS

PREFIX = "PCMEpp-"


def cut(name: str) -> dict[str, Any]:
    """Return the arguments of `create_model` for a model with fewer layers and tokens, if the whole one is too large.

    A ResNet stays as it is. A timm trunk has no such argument: build it within `trunks_cut`.
    """
    config = open_clip.get_model_config(name)
    assert config is not None
    vision, text = config["vision_cfg"], config["text_cfg"]
    if isinstance(vision.get("layers"), int):
        vision["layers"] = min(vision["layers"], LAYERS)
    if "hf_model_name" in text:
        text |= {"hf_model_name": hf_configs.cut_name(text["hf_model_name"]), "hf_model_pretrained": False}
    else:
        text["layers"] = min(text.get("layers", LAYERS), LAYERS)
        text["vocab_size"] = min(text.get("vocab_size", 49408), TOKENS)
    return {"vision_cfg": vision, "text_cfg": text}


@contextlib.contextmanager
def trunks_cut() -> Iterator[None]:
    """Let timm build its transformers with few layers, and its ConvNeXts with one block for each stage.

    FastViTs, which are small, stay as they are.
    """
    create = timm.create_model

    def create_cut(name: str, **kwargs: Any) -> Any:
        if name.startswith("convnext"):
            kwargs["depths"] = (1, 1, 1, 1)
        elif not name.startswith("fastvit"):
            kwargs["depth"] = LAYERS
        return create(name, **kwargs)

    with mock.patch.object(timm, "create_model", create_cut):
        yield


def small_image(name: str) -> int:
    """Return the side of an image of a few patches, at which the tower does all that it does to a large one."""
    config = open_clip.get_model_config(name)
    assert config is not None
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        patch = re.search(r"patch(14|16)_", vision["timm_model_name"])
        return 4 * int(patch[1]) if patch else 128
    return 4 * vision.get("patch_size", 16) if isinstance(vision["layers"], int) else 128


def deviation(name: str, **changes: Any) -> float:
    """Return the largest difference of the normalised embeddings of a PCME++ model from the plain model's.

    Both have the same weights and are in eval mode. Before that, the PCME++ model makes a forward and backward pass in
    training mode.

    Arguments:
        name: the name of the plain model.
        changes: further arguments of `create_model` for both.
    """
    size = small_image(name)
    changes = {"force_image_size": size, "pretrained_text": False, "output_dict": True, **copy.deepcopy(changes)}
    if "vision_cfg" in changes:
        changes["vision_cfg"]["image_size"] = size  # create_model puts the size into the config that this one replaces
    with hf_configs.known():
        torch.manual_seed(0)
        ours = shaken(open_clip.create_model(PREFIX + name, **copy.deepcopy(changes)).train())
        batch = image, text = inputs(ours, name, changes)
        total(ours(*batch)).backward()
        for key, parameter in ours.named_parameters():
            if parameter.grad is None:
                raise ValueError(f"{key} gets no gradient.")
            if not parameter.grad.isfinite().all():
                raise ValueError(f"The gradient of {key} is not finite.")
        ours.zero_grad()
        embeddings = embed(ours, image, text)
        tensors = ours.state_dict()
        del ours  # the twin takes over its tensors: two large models at once would be too much
        with Unfilled():
            twin = open_clip.create_model(name, **changes)
        twin.load_state_dict({key: tensors[key] for key in twin.state_dict()}, assign=True)
    expected = embed(twin, image, text)
    differences = [(a - b).abs().max().item() for a, b in zip(embeddings, expected, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


class Unfilled(TorchFunctionMode):
    """Leaves out random numbers in weights that are replaced anyway, since they cost as much as all else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_):
            return args[0]
        return func(*args, **(kwargs or {}))


def embed(model: Any, image: Tensor, text: Tensor) -> list[Tensor]:
    """Return the normalised embeddings of images and texts in eval mode, from the encoders and for the loss."""
    model.eval()
    with torch.no_grad():
        out = model(image, text)
        encoded = model.encode_image(image, normalize=True), model.encode_text(text, normalize=True)
    return [*encoded, out["image_features"], out["text_features"]]


def shaken(model: Any) -> Any:
    """Return the model with noise on its vectors, many of which start at zero or one and would hide a mistake."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def inputs(model: Any, name: str, changes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return two random images, and two random texts: one of full length and one padded behind its last token."""
    config = open_clip.get_model_config(name)
    assert config is not None
    cfg = changes.get("text_cfg", config["text_cfg"])
    repository = cfg.get("hf_model_name")
    tower = hf_configs.CONFIGS[repository] if repository else cfg
    length, vocab_size = context_length(name), tower.get("vocab_size", 49408)
    pad = tower["pad_token_id"] if repository else cfg.get("pad_id", 0)
    end = cfg.get("eos_id", 2) if cfg.get("pool_type") == "eos" else vocab_size - 1  # CLIP's is the highest
    text = torch.randint(3, vocab_size - 1, (2, length))
    text[0, length // 2 :] = pad
    text[0, length // 2 - 1] = text[1, -1] = end
    return torch.randn(2, 3, *image_size(model)), text
