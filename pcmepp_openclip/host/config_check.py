"""Checks of configs of others before they cost memory: known keys, plain values, and a model that can be run.

A config names sizes and choices. It must not name code, files, or repos of anyone's choice: such keys (arguments for a
tokenizer's loader, a timm or Hugging Face model that no config of open_clip's own names) are refused. Whether the rest
fits together is what open_clip, timm and torch say when the model is built and run on the device "meta", where sizes
cost nothing. Only numbers that make modules, or steps of a loop, have bounds of their own that are checked before.
tests/test_fuzz_config.py holds it to that.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

import open_clip
import torch
from open_clip import factory
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config import PCMEppCfg
from ..system.redact import printable
from ..system.text import did_you_mean
from .towers.blocks import pair

MODEL_KEYS: dict[str, Any] = {
    "embed_dim": int,
    "vision_cfg": dict,
    "text_cfg": dict,
    "pcmepp_cfg": dict,
    "custom_text": bool,
    "quick_gelu": bool,
    "init_logit_scale": float,
    "init_logit_bias": float | None,
    "nonscalar_logit_scale": bool,
}
PARTS: dict[str, dict[str, Any]] = {  # the keys of objects within the block of a tower
    "act_kwargs": {"approximate": str},
    "norm_kwargs": {"eps": float},
    "tokenizer_kwargs": {"clean": str, "strip_sep_token": bool, "language": str | None},
}
NAMES = ("timm_model_name", "hf_model_name")
NULLABLE = ("patch_size", "timm_proj")  # open_clip's own configs have null there against the types of its classes
CHOICES = {  # building a model reads none of these
    "interpolation": ("bicubic", "bilinear", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
    "mode": ("RGB",),
    "tokenizer_mode": (None, "", "clips"),
    "clean": ("whitespace", "lower", "canonicalize"),
}
RANGES = {  # beyond these, outputs are not finite
    "ls_init_value": (-1e3, 1e3),
    "eps": (1e-12, 1),
    "init_logit_scale": (-20, 20),
    "init_logit_bias": (-1e4, 1e4),
    "init_logvar_bias": (-80, 80),
    "init_match_scale": (1e-6, 1e6),
    "init_match_shift": (-1e6, 1e6),
}
MAX_LAYERS = 256
MAX_LENGTH = 8192  # tokens of a text
MAX_LENGTH_HUGGING_FACE = 512  # RoBERTa, which takes the shortest texts, has this many positions
MAX_SIDE = 2048  # pixels
MAX_PATCHES = 2**14
MAX_PARAMETERS = 8e9  # open_clip's largest model, EVA02-E-14-plus, has 5.0e9
MAX_ACTIVATIONS = 2**28  # numbers of one tensor, for one image and one text


class ConfigRefused(ValueError):
    """A config is refused, and no model is built from it. The message is one sentence."""


def check_config(config: Any, where: str) -> None:
    """Raise ConfigRefused unless `config`, the content of an `open_clip_config.json`, is sound and of a PCME++ model.

    Arguments:
        where: the name of the config in the message, such as hf-hub:org/name.
    """
    with _refusals(where):
        check_keys(config, ("model_cfg", "preprocess_cfg"), "it")
        model = config.get("model_cfg")
        _check_block(model, MODEL_KEYS, "model_cfg")
        for key in ("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"):
            if key not in model:
                raise ValueError(f"model_cfg lacks '{key}'.")
        cfg = PCMEppCfg.parse(model["pcmepp_cfg"])
        _check_ranges(model["pcmepp_cfg"], "pcmepp_cfg")
        _check_tower(model["vision_cfg"], CLIPVisionCfg, "vision_cfg")
        _check_tower(model["text_cfg"], CLIPTextCfg, "text_cfg")
        _check_names(model)
        _check_loops(CLIPVisionCfg(**model["vision_cfg"]), CLIPTextCfg(**model["text_cfg"]), cfg)
        parameters = _build_and_run(json.dumps(model, sort_keys=True))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 4 * parameters > memory:
            raise ValueError(f"it would take {4e-9 * parameters:.0f} GB, and this machine has {1e-9 * memory:.0f} GB.")
        _check_preprocessing(config.get("preprocess_cfg", {}), model["vision_cfg"].get("image_size", 224))


def check_plain_config(config: Any, where: str) -> None:
    """Raise ConfigRefused if the config of a model of another kind names code or a repo of anyone's choice."""
    with _refusals(where):
        check_keys(config, ("model_cfg", "preprocess_cfg"), "it")
        if not isinstance(config.get("model_cfg"), dict):
            raise ValueError("it lacks model_cfg, an object.")
        for block in ("vision_cfg", "text_cfg"):
            if not isinstance(config["model_cfg"].get(block), dict):
                raise ValueError(f"model_cfg lacks {block}, an object.")
        tokenizer = config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}
        check_keys(tokenizer, PARTS["tokenizer_kwargs"], "tokenizer_kwargs")
        _check_names(config["model_cfg"])
        _check_preprocessing(config.get("preprocess_cfg", {}))


def build_on_meta(model_cfg: dict) -> Any:
    """Return the model of a config on the device "meta", without memory and without fetching pretrained weights."""
    cfg = copy.deepcopy(model_cfg)
    custom = cfg.pop("custom_text", False) or "hf_model_name" in cfg["text_cfg"]
    kind = factory.CLIP if not custom else factory.CoCa if "multimodal_cfg" in cfg else factory.CustomTextCLIP
    cfg["text_cfg"]["hf_model_pretrained"] = cfg["vision_cfg"]["timm_model_pretrained"] = False
    with torch.device("meta"):
        return kind(**{**cfg, "output_dict": True})


@contextlib.contextmanager
def _refusals(where: str) -> Iterator[None]:
    """Turn every error into a ConfigRefused of one sentence while the context lasts."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigRefused(f"The config of {where} is refused: {printable(reason)[:300]}") from None


# These check values by themselves.


def check_keys(block: Any, keys: Any, name: str) -> None:
    """Raise ValueError unless `block` is an object with no other keys than `keys`."""
    if not isinstance(block, dict):
        raise ValueError(f"{name} must be an object, not {type(block).__name__}.")
    for key in block:
        if key not in keys:
            hint = did_you_mean(str(key), keys, otherwise=f"known keys: {', '.join(keys)}.")
            raise ValueError(f"{name} has an unknown key {str(key)[:60]!r}; {hint}")


def _check_tower(block: Any, kind: type, name: str) -> None:
    nullable = {field.name for field in dataclasses.fields(kind) if field.default is None} | set(NULLABLE)
    types = typing.get_type_hints(kind)
    _check_block(block, {key: each | None if key in nullable else each for key, each in types.items()}, name)
    for key in PARTS.keys() & block.keys():
        if block[key] is not None:
            _check_block(block[key], PARTS[key], f"{name}.{key}")


def _check_block(block: Any, types: dict[str, Any], name: str) -> None:
    """Raise ValueError unless `block` is an object whose values have these types."""
    check_keys(block, types, name)
    for key, value in block.items():
        if not _has_type(value, types[key]):
            raise ValueError(f"{name}.{key} must be {_words(types[key])}, not {value!r:.40}.")
    _check_ranges(block, name)


def _check_ranges(block: dict, name: str) -> None:
    for key, value in block.items():
        if key in CHOICES and value not in CHOICES[key]:
            choices = ", ".join("null" if choice is None else repr(choice) for choice in CHOICES[key])
            raise ValueError(f"{name}.{key} must be one of {choices}, not {value!r:.40}.")
        if key in RANGES and value is not None:
            least, most = RANGES[key]
            if not least <= value <= most:
                raise ValueError(f"{name}.{key} must be between {least:g} and {most:g}, not {value!r:.40}.")


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a value of a JSON file is of the type that a dataclass has for it."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and len(value) == len(options) and all(map(_has_type, value, options))
    if options:
        return any(_has_type(value, option) for option in options)
    return is_number(value) if kind is float else type(value) is kind


def _words(kind: Any) -> str:
    """Return a user's words for the values of a type."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(options)} whole numbers"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}
    return " or ".join(map(_words, options)) if options else names.get(kind, "null")


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return type(value) in (int, float) and abs(value) < math.inf


def _check_preprocessing(block: Any, image_size: Any = None) -> None:
    check_keys(block, [field.name for field in dataclasses.fields(PreprocessCfg)], "preprocess_cfg")
    _check_ranges(block, "preprocess_cfg")
    for key in block.keys() & {"mean", "std"}:
        value = block[key]
        if not (isinstance(value, list) and len(value) == 3 and all(is_number(x) and abs(x) <= 1e3 for x in value)):
            raise ValueError(f"preprocess_cfg.{key} must be three numbers, not {value!r:.40}.")
        if key == "std" and min(value) < 1e-6:
            raise ValueError(f"preprocess_cfg.std must be positive, not {value!r:.40}.")
    if "fill_color" in block and block["fill_color"] not in range(256):
        raise ValueError(f"preprocess_cfg.fill_color must be 0 to 255, not {block['fill_color']!r:.40}.")
    if "size" in block and image_size is not None and pair(block["size"]) != pair(image_size):
        raise ValueError(f"preprocess_cfg.size {block['size']!r:.40} is not the model's image_size {image_size!r:.40}.")


# These check names of models of others.


def names_of_others(model_cfg: dict) -> list[tuple[str, Any]]:
    """Return every name of a timm or Hugging Face model in a config, with its key."""
    blocks = [(tower, model_cfg.get(tower)) for tower in ("vision_cfg", "text_cfg", "multimodal_cfg")]
    return [
        (f"{tower}.{key}", block[key])
        for tower, block in blocks
        if isinstance(block, dict)
        for key in NAMES
        if block.get(key)
    ]


def _check_names(model_cfg: dict) -> None:
    """Raise ValueError for a name that no config of open_clip's has: it would lead to a repo of anyone's choice."""
    if not (names := names_of_others(model_cfg)):
        return
    configs = (factory.get_model_config(model) or {} for model in open_clip.list_models())
    known = [name for config in configs for _, name in names_of_others(config)]
    for key, name in names:
        if name not in known:
            raise ValueError(
                f"{key} names another model, {name!r:.60}, that no config of open_clip's has; if you trust it, add the "
                "config by open_clip.add_model_config."
            )


# These check values together.


def _check_loops(vision: CLIPVisionCfg, text: CLIPTextCfg, cfg: PCMEppCfg) -> None:
    """Raise ValueError for numbers of modules, or of steps of a loop, that would take long even on "meta"."""
    layers = vision.layers if isinstance(vision.layers, list | tuple) else [vision.layers]
    for name, values, most in (
        ("vision_cfg.layers", layers, MAX_LAYERS),
        ("text_cfg.layers", [text.layers], MAX_LAYERS),
        ("pcmepp_cfg.head_layers", [cfg.head_layers], MAX_LAYERS),
        (
            "text_cfg.context_length",
            [text.context_length],
            MAX_LENGTH_HUGGING_FACE if text.hf_model_name else MAX_LENGTH,
        ),
        ("vision_cfg.image_size", pair(vision.image_size), MAX_SIDE),
    ):
        if not all(1 <= value <= most for value in values):
            raise ValueError(f"{name} must be a whole number from 1 to {most}, not {max(values, key=abs)!r:.40}.")
    height, width = pair(vision.image_size)
    if vision.patch_size is not None and height * width > MAX_PATCHES * vision.patch_size**2:
        raise ValueError(
            f"vision_cfg.patch_size {vision.patch_size} makes more than {MAX_PATCHES} patches of an image."
        )
    for key in text.tokenizer_kwargs or ():
        if key != "clean" and not text.hf_tokenizer_name:
            raise ValueError(f"text_cfg.tokenizer_kwargs.{key} is for a tokenizer of its own, which it does not have.")


@functools.lru_cache(maxsize=64)  # a config is read several times until its model is built
def _build_and_run(model_json: str) -> int:
    """Build a model and run it for an image and a text on the device "meta"; return its size in parameters and buffers.
    Raise ValueError if that fails, or if the model or a tensor would be too large."""
    model_cfg = json.loads(model_json)
    try:
        model = build_on_meta(model_cfg).eval()
        size = sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
        if size > MAX_PARAMETERS:
            raise ValueError(f"it would have about {size:.2g} parameters, more than the {MAX_PARAMETERS:.0e} allowed.")
        image = torch.empty(1, 3, *pair(model.visual.image_size), device="meta")
        text = torch.empty(1, model_cfg["text_cfg"].get("context_length", 77), dtype=torch.long, device="meta")
        # Code does not read values of tensors under torch.compile.
        traced = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
        with torch.inference_mode(), traced, _Bounded():
            out = model(image, text)
    except ValueError:
        raise
    except Exception as error:  # open_clip, timm and torch raise any error for values that do not go together
        reason = " ".join(str(error).split())[:150].rstrip(".")
        if isinstance(error, OSError):
            raise ValueError(f"the config of its Hugging Face text model cannot be read ({reason}).") from None
        raise ValueError(
            f"its values do not go together: no model is built of them ({type(error).__name__}: {reason})."
        ) from None
    for name in ("image", "text"):
        shape = tuple(out[f"{name}_features"].shape)
        if shape != (1, model_cfg["embed_dim"]):
            raise ValueError(f"its {name} tower gives {list(shape)[1:]}, not the embed_dim {model_cfg['embed_dim']}.")
    return size


class _Bounded(TorchDispatchMode):
    """Raise ValueError for a tensor of more than `MAX_ACTIVATIONS` numbers, as soon as it would be made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.numel() > MAX_ACTIVATIONS:
                raise ValueError(f"a tensor of {list(x.shape)} for one image or text is too much to compute.")
        return out
