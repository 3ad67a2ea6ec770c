"""Configs of others, checked before anything is built from them: known keys, plain values, sizes that fit a machine.

A config names sizes and choices. It must not name code, files, or repos of anyone's choice: what open_clip would make
of such keys (arguments for a tokenizer's loader, a timm or Hugging Face model that no config of open_clip's own names)
is refused. What passes can be built and run, in a bounded amount of memory; tests/test_fuzz_config.py holds it to that.

`config_values` are the values by themselves, `config_towers` the towers.
"""

import dataclasses
import os
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg
from open_clip.transform import PreprocessCfg

from ..config import PCMEppCfg
from ..system.redact import printable
from .config_towers import check_text, check_vision, parse_tower, unknown_name
from .config_values import (
    CHOICES,
    MAX_VALUES,
    RANGES,
    TOKENIZER_KEYS,
    check_keys,
    check_value,
    is_number,
    is_whole,
    pair,
)
from .towers import check_towers

MODEL_KEYS = (
    *("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg", "custom_text"),
    *("quick_gelu", "init_logit_scale", "init_logit_bias", "nonscalar_logit_scale"),
)
MAX_PARAMETERS = 8e9  # open_clip's largest model, EVA02-E-14-plus, has 5.0e9


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
        raise ConfigRefused(f"The config of {where} is refused: {printable(str(error)[:300])}") from None


def check_plain_config(config: Any, where: str) -> None:
    """ConfigRefused unless the config of a model of another kind names neither code nor a repo of anyone's choice."""
    try:
        check_keys(config, ("model_cfg", "preprocess_cfg"), "it")
        if not isinstance(config.get("model_cfg"), dict):
            raise ValueError("it lacks model_cfg, an object.")
        for block in ("vision_cfg", "text_cfg"):
            if not isinstance(config["model_cfg"].get(block), dict):
                raise ValueError(f"model_cfg lacks {block}, an object.")
        check_keys(config["model_cfg"]["text_cfg"].get("tokenizer_kwargs") or {}, TOKENIZER_KEYS, "tokenizer_kwargs")
        _check_names(config["model_cfg"])
        _check_preprocessing(config.get("preprocess_cfg", {}))
    except (ValueError, ArithmeticError) as error:
        raise ConfigRefused(f"The config of {where} is refused: {printable(str(error)[:300])}") from None


def _check(config: Any) -> None:
    check_keys(config, ("model_cfg", "preprocess_cfg"), "it")
    model = config.get("model_cfg")
    check_keys(model, MODEL_KEYS, "model_cfg")
    for key in ("embed_dim", "vision_cfg", "text_cfg", "pcmepp_cfg"):
        if key not in model:
            raise ValueError(f"model_cfg lacks '{key}'.")
    cfg = PCMEppCfg.parse(model["pcmepp_cfg"])
    for key, value in model["pcmepp_cfg"].items():
        if key in RANGES or key in MAX_VALUES:
            check_value(key, value, "pcmepp_cfg")
    vision = parse_tower(model["vision_cfg"], CLIPVisionCfg, "vision_cfg")
    text = parse_tower(model["text_cfg"], CLIPTextCfg, "text_cfg")
    for key, value in model.items():
        if not key.endswith("_cfg"):
            check_value(key, value, "model_cfg", bool)
    _check_names(model)
    _check_together(model, vision, text, cfg)
    _check_preprocessing(config.get("preprocess_cfg", {}), vision.image_size)


def _check_names(model_cfg: dict) -> None:
    if unknown := unknown_name(model_cfg):
        raise ValueError(
            f"{unknown[0]} names another model, {unknown[1]!r:.60}, that no config of open_clip's has; if you "
            "trust it, add the config by open_clip.add_model_config."
        )


def _check_together(model: dict, vision: CLIPVisionCfg, text: CLIPTextCfg, cfg: PCMEppCfg) -> None:
    custom_text = bool(model.get("custom_text") or text.hf_model_name)
    check_towers(vision, text, cfg.heads, cfg.head_layers, custom_text, cfg.pool)
    if model.get("quick_gelu") and (vision.act_kwargs or text.act_kwargs):
        raise ValueError("act_kwargs are for GELU, which a model with quick_gelu does not have.")
    if cfg.match_logit == "siglip" and model.get("init_logit_bias") is None:
        raise ValueError("pcmepp_cfg.match_logit 'siglip' needs an init_logit_bias, which model_cfg lacks.")
    embed_dim = model["embed_dim"]
    image_size = check_vision(vision, model["vision_cfg"], embed_dim)
    text_size = check_text(text, model["text_cfg"], embed_dim)
    if cfg.pool == "gpo":
        for size, name in ((image_size, "vision_cfg"), (text_size, "text_cfg")):
            size.check_gpo(name, embed_dim)
    parameters = image_size.with_branch(cfg.image_head, cfg.head_layers, embed_dim, cfg.pool)
    parameters += text_size.with_branch(cfg.text_head, cfg.head_layers, embed_dim, cfg.pool)
    if not parameters <= MAX_PARAMETERS:
        raise ValueError(
            f"it would have about {parameters:.2g} parameters, more than the {MAX_PARAMETERS:.0e} allowed."
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * parameters > memory:
        raise ValueError(f"it would take {4e-9 * parameters:.0f} GB, and this machine has {1e-9 * memory:.0f} GB.")


def _check_preprocessing(block: Any, image_size: Any = None) -> None:
    check_keys(block, [field.name for field in dataclasses.fields(PreprocessCfg)], "preprocess_cfg")
    for key, value in block.items():
        if key in CHOICES:
            check_value(key, value, "preprocess_cfg")
        if key in ("mean", "std"):
            if not isinstance(value, list) or len(value) != 3 or not all(is_number(x) and abs(x) <= 1e3 for x in value):
                raise ValueError(f"preprocess_cfg.{key} must be three numbers, not {value!r:.40}.")
            if key == "std" and not all(x >= 1e-6 for x in value):
                raise ValueError(f"preprocess_cfg.std must be positive, not {value!r:.40}.")
        if key == "fill_color" and not (is_whole(value) and 0 <= value <= 255):
            raise ValueError(f"preprocess_cfg.fill_color must be 0 to 255, not {value!r:.40}.")
        if key == "size" and image_size is not None and pair(value) != pair(image_size):
            raise ValueError(f"preprocess_cfg.size {value!r:.40} is not the model's image_size {image_size!r:.40}.")
