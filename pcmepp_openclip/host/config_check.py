"""Configs of others, checked before anything is built from them: known keys, plain values, sizes that fit a machine.

A config names sizes and choices. It must not name code, other repos or files: what open_clip would make of such keys
(a timm model, a Hugging Face text tower, arguments for a tokenizer's loader) is refused. What passes can be built and
run, in a bounded amount of memory; tests/test_fuzz_config.py holds it to that.
"""

import dataclasses
import math
import os
from typing import Any

import open_clip
from open_clip import factory
from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg

from ..config import PCMEppCfg
from ..system.text import did_you_mean
from .towers import check_towers

MODEL_KEYS = (
    *("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"),
    *("quick_gelu", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"),
)
MAX_VALUES = {  # whole numbers from 1 to this
    "embed_dim": 16384,
    "layers": 256,
    "width": 16384,
    "head_width": 16384,
    "heads": 1024,
    "patch_size": 1024,
    "context_length": 8192,  # the mask has its square
    "vocab_size": 2_000_000,
    "attn_pooler_queries": 65536,
    "attn_pooler_heads": 1024,
}
MAX_SIDE_PIXELS = 2048  # on a side
MAX_PATCHES = 2**14
MAX_PARAMETERS = 3e9  # open_clip's largest CLIP has 2.5e9
MAX_ACTIVATIONS = 2**28  # numbers that one block makes of one image or text
TOKENIZER_KEYS = ("clean", "strip_sep_token", "language")
CHOICES = {
    "interpolation": ("bicubic", "bilinear", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
    "mode": ("RGB",),
    "pos_embed_type": ("learnable", "sin_cos_2d"),
    "block_type": (None, "default", "custom"),
    "proj_type": ("linear", "none"),
    "tokenizer_mode": (None, "", "clips"),
    "clean": ("whitespace", "lower", "canonicalize"),
    "approximate": ("none", "tanh"),
    "scaled_cosine_attn": (False,),  # open_clip builds it, but its forward fails
}
RANGES = {  # numbers, from and to
    "mlp_ratio": (1e-3, 64),
    "ls_init_value": (-1e3, 1e3),
    "patch_dropout": (0, 0.99),
    "eps": (1e-12, 1),
    "init_logit_scale": (-20, 20),
    "init_logit_bias": (-1e4, 1e4),
    "init_logvar_bias": (-80, 80),
    "init_match_scale": (1e-6, 1e6),
    "init_match_shift": (-1e6, 1e6),
    "timm_drop": (0, 1),
    "timm_drop_path": (0, 1),
}
TOKENS = ("pad_id", "eos_id")
OPTIONAL = ("ls_init_value", "init_logit_bias", "init_logvar_bias", "timm_drop_path")  # may be null
PARTS = {"act_kwargs": ("approximate",), "norm_kwargs": ("eps",), "tokenizer_kwargs": TOKENIZER_KEYS}


class ConfigRefused(ValueError):
    """A config that nothing is built of. The message is one sentence."""


def check_config(config: Any, where: str) -> None:
    """ConfigRefused unless `config`, the content of an `open_clip_config.json`, is sound and of a PCME++ model.

    Arguments:
        where: what the message calls it, such as hf-hub:org/name.
    """
    try:
        _check(config)
    except (ValueError, ArithmeticError) as error:
        raise ConfigRefused(f"The config of {where} is refused: {str(error)[:300]}") from None


def check_plain_config(config: Any, where: str) -> None:
    """The same for the config of another model, where it comes with a file: what it names must be no code."""
    try:
        _known(config, ("model_cfg", "preprocess_cfg"), "it")
        for block in ("model_cfg", "preprocess_cfg"):
            if not isinstance(config.get(block), dict):
                raise ValueError(f"it lacks {block}.")
        for block in ("vision_cfg", "text_cfg"):
            if not isinstance(config["model_cfg"].get(block), dict):
                raise ValueError(f"model_cfg lacks {block}.")
        _known(config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}, TOKENIZER_KEYS, "tokenizer_kwargs")
        _check_preprocessing(config["preprocess_cfg"])
    except (ValueError, ArithmeticError) as error:
        raise ConfigRefused(f"The config of {where} is refused: {str(error)[:300]}") from None


def named_elsewhere(model_cfg: dict) -> str | None:
    """The first name of another model in a config that no config of open_clip's own has, or None.

    Such a name leads to a repo of anyone's choice, which would be fetched when the model is built.
    """
    names = ("timm_model_name", "hf_model_name")
    towers = ("vision_cfg", "text_cfg", "multimodal_cfg")

    def named(cfg: dict) -> list[str]:
        blocks = [cfg.get(tower) for tower in towers]
        return [block[name] for block in blocks if isinstance(block, dict) for name in names if block.get(name)]

    known = {name for model in open_clip.list_models() for name in named(factory.get_model_config(model) or {})}
    return next((name for name in named(model_cfg) if name not in known), None)


def _check(config: Any) -> None:
    _known(config, ("model_cfg", "preprocess_cfg"), "it")
    model = config.get("model_cfg")
    _known(model, MODEL_KEYS, "model_cfg")
    for key in ("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"):
        if key not in model:
            raise ValueError(f"model_cfg lacks '{key}'.")
    cfg = PCMEppCfg.parse(model["pcmepp_cfg"])
    for key, value in model["pcmepp_cfg"].items():
        if key in RANGES:
            _value(key, value, "pcmepp_cfg")
    vision = _tower(model["vision_cfg"], CLIPVisionCfg, "vision_cfg")
    text = _tower(model["text_cfg"], CLIPTextCfg, "text_cfg")
    for key, value in model.items():
        if not key.endswith("_cfg"):
            _value(key, value, "model_cfg", bool)
    _check_vision(vision)
    _check_text(text, model["text_cfg"], model["embed_dim"])
    _check_together(model, vision, text, cfg.head_layers)
    _check_preprocessing(config.get("preprocess_cfg", {}), vision.image_size)


def _tower(block: Any, kind: type, name: str) -> Any:
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    _known(block, fields, name)
    for key, value in block.items():
        if key in PARTS:
            if value is None and key != "tokenizer_kwargs":
                continue
            _known(value, PARTS[key], f"{name}.{key}")
            for inner, part in value.items():
                _value(inner, part, f"{name}.{key}", bool if inner == "strip_sep_token" else str)
        elif key != "image_size":
            _value(key, value, name, type(fields[key]))
    cfg = kind(**block)
    if int(cfg.width * cfg.mlp_ratio) < 1:
        raise ValueError(f"{name}.mlp_ratio {cfg.mlp_ratio} leaves nothing of the width {cfg.width}.")
    return cfg


def _value(key: str, value: Any, name: str, kind: type = float) -> None:
    """ValueError for a value that is not of the kind, or not in the range, that such a key has."""
    if key in MAX_VALUES:
        _number(key, value, name)
    elif key in CHOICES:
        if not any(value is choice or (type(value) is str and value == choice) for choice in CHOICES[key]):
            choices = ", ".join("null" if choice is None else str(choice) for choice in CHOICES[key])
            raise ValueError(f"{name}.{key} must be one of {choices}, not {value!r:.40}.")
    elif key in RANGES:
        least, most = RANGES[key]
        if not (value is None and key in OPTIONAL) and not (_is_number(value) and least <= value <= most):
            raise ValueError(f"{name}.{key} must be between {least:g} and {most:g}, not {value!r:.40}.")
    elif key in TOKENS:
        if not _is_whole(value) or not 0 <= value < MAX_VALUES["vocab_size"]:
            raise ValueError(f"{name}.{key} must be a token id, not {value!r:.40}.")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}.{key} must be true or false, not {value!r:.40}.")
    elif value is not None and not (isinstance(value, str) and len(value) <= 200):
        raise ValueError(f"{name}.{key} must be a plain value, a short text, not {value!r:.40}.")


def _check_vision(cfg: Any) -> None:
    sides = cfg.image_size if isinstance(cfg.image_size, (list, tuple)) else [cfg.image_size] * 2
    if len(sides) != 2 or not all(_is_whole(side) and 1 <= side <= MAX_SIDE_PIXELS for side in sides):
        raise ValueError(
            f"vision_cfg.image_size must be 1 to {MAX_SIDE_PIXELS} pixels per side, not {cfg.image_size!r:.40}."
        )
    grid = [side // cfg.patch_size for side in sides]
    if min(grid) < 1 or grid[0] * grid[1] > MAX_PATCHES:
        raise ValueError(f"vision_cfg.patch_size {cfg.patch_size} does not go with image_size {cfg.image_size}.")
    if cfg.pos_embed_type == "sin_cos_2d" and (grid[0] != grid[1] or cfg.width % 4):
        raise ValueError("vision_cfg.pos_embed_type sin_cos_2d needs a square image and a width that 4 divides.")
    if cfg.width % cfg.head_width:
        raise ValueError(f"vision_cfg.width {cfg.width} is not a multiple of head_width {cfg.head_width}.")
    if cfg.timm_model_name:
        raise ValueError("vision_cfg.timm_model_name names another architecture, which no PCME++ model has.")


def _check_text(cfg: Any, block: dict, embed_dim: int) -> None:
    if cfg.width % cfg.heads:
        raise ValueError(f"text_cfg.width {cfg.width} is not a multiple of heads {cfg.heads}.")
    if cfg.hf_model_name or "hf_model_name" in block:  # open_clip asks for the key, not for its value
        raise ValueError("text_cfg.hf_model_name names another model, which would be fetched: no PCME++ model has one.")
    if cfg.proj_type == "none" and cfg.width != embed_dim:
        raise ValueError(f"text_cfg.proj_type none needs a width of embed_dim {embed_dim}, not {cfg.width}.")
    for key in cfg.tokenizer_kwargs or ():
        if key != "clean" and not cfg.hf_tokenizer_name:
            raise ValueError(f"text_cfg.tokenizer_kwargs.{key} is for a tokenizer of its own, which it does not have.")


def _check_together(model: dict, vision: Any, text: Any, head_layers: int) -> None:
    check_towers(vision, text, PCMEppCfg.parse(model["pcmepp_cfg"]).heads, head_layers)
    if model.get("quick_gelu") and (vision.act_kwargs or text.act_kwargs):
        raise ValueError("act_kwargs are for GELU, which a model with quick_gelu does not have.")
    embed_dim = model["embed_dim"]
    sides = vision.image_size if isinstance(vision.image_size, (list, tuple)) else [vision.image_size] * 2
    patches = (sides[0] // vision.patch_size) * (sides[1] // vision.patch_size)

    def blocks(cfg: Any) -> float:
        each = cfg.width * (4 * cfg.width + 16) + cfg.width * cfg.mlp_ratio * (2 * cfg.width + 4)
        return (cfg.layers + head_layers) * each + 2 * (cfg.width + 1) * embed_dim

    parameters = blocks(vision) + blocks(text)
    parameters += vision.width * (3 * vision.patch_size**2 + patches + 8)
    parameters += text.width * (text.vocab_size + text.context_length + 8)
    if not parameters <= MAX_PARAMETERS:
        raise ValueError(
            f"it would have about {parameters:.2g} parameters, more than the {MAX_PARAMETERS:.0e} allowed."
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * parameters > memory:
        raise ValueError(f"it would take {4e-9 * parameters:.0f} GB, and this machine has {1e-9 * memory:.0f} GB.")
    for cfg, tokens, name in ((vision, patches, "vision_cfg"), (text, text.context_length, "text_cfg")):
        if tokens * cfg.width * (4 + cfg.mlp_ratio) > MAX_ACTIVATIONS:
            raise ValueError(f"{name}: {tokens} tokens of width {cfg.width} are too much to compute.")


def _check_preprocessing(block: Any, image_size: Any = None) -> None:
    _known(block, [field.name for field in dataclasses.fields(PreprocessCfg)], "preprocess_cfg")
    for key, value in block.items():
        if key in CHOICES:
            _value(key, value, "preprocess_cfg")
        if key in ("mean", "std"):
            if (
                not isinstance(value, list)
                or len(value) != 3
                or not all(_is_number(x) and abs(x) <= 1e3 for x in value)
            ):
                raise ValueError(f"preprocess_cfg.{key} must be three numbers, not {value!r:.40}.")
            if key == "std" and not all(x >= 1e-6 for x in value):
                raise ValueError(f"preprocess_cfg.std must be positive, not {value!r:.40}.")
        if key == "fill_color" and not (_is_whole(value) and 0 <= value <= 255):
            raise ValueError(f"preprocess_cfg.fill_color must be 0 to 255, not {value!r:.40}.")
        if key == "size" and image_size is not None and _pair(value) != _pair(image_size):
            raise ValueError(f"preprocess_cfg.size {value!r:.40} is not the model's image_size {image_size!r:.40}.")


def _pair(size: Any) -> list:
    return list(size) if isinstance(size, (list, tuple)) else [size, size]


def _known(block: Any, keys: Any, name: str) -> None:
    if not isinstance(block, dict):
        raise ValueError(f"{name} must be an object, not {type(block).__name__}.")
    for key in block:
        if key not in keys:
            hint = did_you_mean(str(key), keys, otherwise=f"known keys: {', '.join(keys)}.")
            raise ValueError(f"{name} has an unknown key {str(key)[:60]!r}; {hint}")


def _number(key: str, value: Any, name: str) -> None:
    if not _is_whole(value) or not 1 <= value <= MAX_VALUES[key]:
        raise ValueError(f"{name}.{key} must be a whole number from 1 to {MAX_VALUES[key]}, not {value!r:.40}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
