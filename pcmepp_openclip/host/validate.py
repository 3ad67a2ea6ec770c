"""Configs of others, looked at before anything is built of them: known keys, plain values, sizes of this world.

A config names sizes and choices. It must not name code, other repos or files: what open_clip would make of such keys
(a timm model, a Hugging Face text tower, arguments for a tokenizer's loader) is refused.
"""

import dataclasses
import difflib
import math
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg

from ..config import PCMEppCfg

MODEL_KEYS = (
    *("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"),
    *("quick_gelu", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"),
)
MOST = {  # whole numbers from 1 to this
    "embed_dim": 16384,
    "layers": 256,
    "width": 16384,
    "head_width": 16384,
    "heads": 1024,
    "patch_size": 1024,
    "context_length": 65536,
    "vocab_size": 2_000_000,
    "attn_pooler_queries": 65536,
    "attn_pooler_heads": 1024,
}
MOST_PIXELS = 8192  # on a side
MOST_PATCHES = 2**18
MOST_PARAMETERS = 2e10
TOKENIZER_KEYS = ("clean", "strip_sep_token", "language")
CHOICES = {
    "interpolation": ("bicubic", "bilinear", "random"),
    "resize_mode": ("shortest", "longest", "squash"),
    "mode": ("RGB",),
}


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
        raise ConfigRefused(f"The config of {where} is refused: {error}") from None


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
        raise ConfigRefused(f"The config of {where} is refused: {error}") from None


def _check(config: Any) -> None:
    _known(config, ("model_cfg", "preprocess_cfg"), "it")
    model = config.get("model_cfg")
    _known(model, MODEL_KEYS, "model_cfg")
    for key in ("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"):
        if key not in model:
            raise ValueError(f"model_cfg lacks '{key}'.")
    PCMEppCfg.parse(model["pcmepp_cfg"])
    vision = _tower(model["vision_cfg"], CLIPVisionCfg, "vision_cfg")
    text = _tower(model["text_cfg"], CLIPTextCfg, "text_cfg")
    _number("embed_dim", model["embed_dim"], "model_cfg")
    _plain({key: value for key, value in model.items() if not key.endswith("_cfg")}, "model_cfg")
    _check_vision(vision)
    _check_text(text)
    _check_size(model["embed_dim"], vision, text)
    _check_preprocessing(config.get("preprocess_cfg", {}))


def _tower(block: Any, kind: type, name: str) -> Any:
    _known(block, [field.name for field in dataclasses.fields(kind)], name)
    for key, value in block.items():
        if key in MOST:
            _number(key, value, name)
        elif key in ("act_kwargs", "norm_kwargs", "tokenizer_kwargs") and value is not None:
            if not isinstance(value, dict):
                raise ValueError(f"{name}.{key} must be an object, not {value!r:.40}.")
            _plain(value, f"{name}.{key}")
        elif key != "image_size":
            _plain({key: value}, name)
    cfg = kind(**block)
    if not isinstance(cfg.mlp_ratio, (int, float)) or not 0 < cfg.mlp_ratio <= 64:
        raise ValueError(f"{name}.mlp_ratio must be between 0 and 64, not {cfg.mlp_ratio!r}.")
    return cfg


def _check_vision(cfg: Any) -> None:
    sides = cfg.image_size if isinstance(cfg.image_size, (list, tuple)) else [cfg.image_size] * 2
    if len(sides) != 2 or not all(_is_whole(side) and 1 <= side <= MOST_PIXELS for side in sides):
        raise ValueError(f"vision_cfg.image_size must be 1 to {MOST_PIXELS} pixels a side, not {cfg.image_size!r:.40}.")
    if min(sides) < cfg.patch_size or (sides[0] // cfg.patch_size) * (sides[1] // cfg.patch_size) > MOST_PATCHES:
        raise ValueError(f"vision_cfg.patch_size {cfg.patch_size} does not go with image_size {cfg.image_size}.")
    if cfg.width % cfg.head_width:
        raise ValueError(f"vision_cfg.width {cfg.width} is not a multiple of head_width {cfg.head_width}.")
    if cfg.timm_model_name:
        raise ValueError("vision_cfg.timm_model_name names another architecture, which no PCME++ model has.")


def _check_text(cfg: Any) -> None:
    if cfg.width % cfg.heads:
        raise ValueError(f"text_cfg.width {cfg.width} is not a multiple of heads {cfg.heads}.")
    if cfg.hf_model_name:
        raise ValueError("text_cfg.hf_model_name names another model, which would be fetched: no PCME++ model has one.")
    _known(cfg.tokenizer_kwargs or {}, TOKENIZER_KEYS, "text_cfg.tokenizer_kwargs")


def _check_size(embed_dim: int, vision: Any, text: Any) -> None:
    def blocks(cfg: Any) -> float:
        return cfg.layers * cfg.width**2 * (4 + 2 * cfg.mlp_ratio) + cfg.width * embed_dim

    parameters = blocks(vision) + blocks(text) + text.width * (text.vocab_size + text.context_length)
    if not parameters <= MOST_PARAMETERS:
        raise ValueError(
            f"it would have about {parameters:.2g} parameters, more than the {MOST_PARAMETERS:.0e} allowed."
        )


def _check_preprocessing(block: Any) -> None:
    _known(block, [field.name for field in dataclasses.fields(PreprocessCfg)], "preprocess_cfg")
    for key, value in block.items():
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"preprocess_cfg.{key} must be one of {', '.join(CHOICES[key])}, not {value!r:.40}.")
        if key in ("mean", "std") and not (
            isinstance(value, list) and len(value) == 3 and all(isinstance(x, (int, float)) for x in value)
        ):
            raise ValueError(f"preprocess_cfg.{key} must be three numbers, not {value!r:.40}.")
        if key == "fill_color" and not (_is_whole(value) and 0 <= value <= 255):
            raise ValueError(f"preprocess_cfg.fill_color must be 0 to 255, not {value!r:.40}.")


def _known(block: Any, keys: Any, name: str) -> None:
    if not isinstance(block, dict):
        raise ValueError(f"{name} must be an object, not {type(block).__name__}.")
    for key in block:
        if key not in keys:
            close = difflib.get_close_matches(str(key), list(keys), n=1)
            raise ValueError(f"{name} has an unknown key '{key:.60}'" + (f"; meant '{close[0]}'?" if close else "."))


def _number(key: str, value: Any, name: str) -> None:
    if not _is_whole(value) or not 1 <= value <= MOST[key]:
        raise ValueError(f"{name}.{key} must be a whole number from 1 to {MOST[key]}, not {value!r:.40}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(block: dict, name: str) -> None:
    for key, value in block.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}.{key} must be finite, not {value}.")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"{name}.{key} must be a plain value, not {value!r:.40}.")
