"""The towers that a model config asks for, and the config of a model as it was built."""

import copy
import dataclasses
import json
from typing import Any

from open_clip.model import CLIPTextCfg, CLIPVisionCfg

from .blocks import as_cfg, pair
from .resnet import RESNET_HAS_NO_TOKENS

TRAINING_ONLY = {  # no output of a trained model depends on these keys; the tokenizer's are among them
    "model": ("pcmepp_cfg", "cast_dtype", "output_dict", "init_logit_scale", "init_logit_bias"),
    "vision_cfg": ("image_size", "patch_dropout", "timm_model_pretrained", "timm_drop", "timm_drop_path"),
    "text_cfg": ("hf_model_pretrained", "hf_tokenizer_name", "tokenizer_kwargs"),
}
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "fill_color")  # the size is the model's own


def splits(vision_cfg: Any, text_cfg: Any) -> dict[str, str | None]:
    """Return why the branch of each tower cannot leave it before its last blocks, or None where it can."""
    vision = as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg")
    text = as_cfg(CLIPTextCfg, text_cfg, "text_cfg")
    image_reason = text_reason = None
    if vision.timm_model_name:
        image_reason = "vision_cfg.timm_model_name names a timm model"
    elif not isinstance(vision.layers, int):
        image_reason = "vision_cfg.layers is that of a ResNet"
    if text.hf_model_name:
        text_reason = "text_cfg.hf_model_name names a Hugging Face model"
    return {"image_head": image_reason, "text_head": text_reason}


def default_heads(vision_cfg: Any, text_cfg: Any) -> dict[str, str]:
    """Return the default `image_head` and `text_head` of a model: "split" where possible, else "top"."""
    return {key: "split" if reason is None else "top" for key, reason in splits(vision_cfg, text_cfg).items()}


def check_towers(
    vision_cfg: Any,
    text_cfg: Any,
    heads: dict[str, str],
    head_layers: int,
    custom_text: bool = False,
    pool: str = "tower",
) -> None:
    """Raise ValueError for an architecture of open_clip's that has no such log-variance branch.

    Arguments:
        heads: the place of the branch by `image_head` and `text_head`, "split" or "top".
        custom_text: whether the text tower is a module of its own, as in a CustomTextCLIP.
        pool: the pooling of the means, "tower" or "gpo".
    """
    vision = as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg")
    text = as_cfg(CLIPTextCfg, text_cfg, "text_cfg")
    reasons = splits(vision, text)
    if pool == "gpo" and not isinstance(vision.layers, int) and not vision.timm_model_name:
        raise ValueError(RESNET_HAS_NO_TOKENS)
    for key, reason in reasons.items():
        if heads[key] == "split" and reason is not None:
            raise ValueError(
                f"{reason}, whose blocks the log-variance branch cannot leave: set pcmepp_cfg.{key} to 'top'."
            )
    open_clip_image, open_clip_text = reasons["image_head"] is None, reasons["text_head"] is None
    for applies, block, key, value, allowed in [
        (open_clip_image, "vision_cfg", "pool_type", vision.pool_type, ("tok", "avg")),
        (open_clip_text, "text_cfg", "pool_type", text.pool_type, ("argmax", "eos", "first", "last")),
        (not custom_text, "text_cfg", "embed_cls", text.embed_cls, (False,)),
        (True, "vision_cfg", "output_tokens", vision.output_tokens, (False,)),
        (True, "text_cfg", "output_tokens", text.output_tokens, (False,)),
    ]:
        if applies and value not in allowed:
            raise ValueError(f"A PCME++ model needs {block}.{key} of {' or '.join(map(repr, allowed))}, not {value!r}.")
    for key, name, layers in (("image_head", "image", vision.layers), ("text_head", "text", text.layers)):
        if heads[key] == "split" and head_layers >= layers:
            raise ValueError(
                f"pcmepp_cfg.head_layers must be below the {layers} layers of the {name} tower, not {head_layers}."
            )


def text_may_be_cut(model_cfg: dict) -> bool:
    """Return whether texts without their padding give the same result, by the config of a PCME++ model."""
    text = model_cfg.get("text_cfg", {})
    if text.get("hf_model_name") or text.get("embed_cls") or text.get("no_causal_mask"):
        return False
    return text.get("pool_type", "argmax") != "last"


def config_as_built(model: Any, model_cfg: dict) -> dict:
    """Return the content of `open_clip_config.json` for a model that was built from `model_cfg` and flags."""
    model_cfg = copy.deepcopy(model_cfg)
    if getattr(model, "logit_bias", None) is not None:
        model_cfg.setdefault("init_logit_bias", -10.0)  # the config says that there is one; the weights hold its value
    # In configs of Hugging Face towers and CoCa models, context_length means something else.
    if "hf_model_name" not in model_cfg["text_cfg"] and "multimodal_cfg" not in model_cfg:
        model_cfg["text_cfg"]["context_length"] = model.context_length
    for tower, key in (("vision_cfg", "timm_model_pretrained"), ("text_cfg", "hf_model_pretrained")):
        if key in model_cfg[tower]:
            model_cfg[tower][key] = False  # its weights are the model's own
    height, width = pair(model.visual.image_size)
    model_cfg["vision_cfg"]["image_size"] = height if height == width else [height, width]
    preprocess_cfg = {name: model.visual.preprocess_cfg[name] for name in PREPROCESSING}
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}


def config_in_use(model: Any) -> dict:
    """Return all that the means of a model depend on besides its weights and tokenizer, as plain JSON values.

    It is the config that open_clip built the model from, with forced values and without defaults, and the preprocessing
    of its images. Raise ValueError for a model that `open_clip.create_model` has not built."""
    if not hasattr(model, "built_from"):
        raise ValueError("The config of the model is not known: build it by open_clip.create_model.")
    config = {key: value for key, value in model.built_from.items() if value and key not in TRAINING_ONLY["model"]}
    for tower, kind in (("vision_cfg", CLIPVisionCfg), ("text_cfg", CLIPTextCfg)):
        chosen, default = (dataclasses.asdict(cfg) for cfg in (as_cfg(kind, model.built_from[tower], tower), kind()))
        differs = {key for key, value in chosen.items() if value != default[key]} - set(TRAINING_ONLY[tower])
        config[tower] = {key: chosen[key] for key in differs}
    config["image_size"] = pair(model.visual.image_size)
    preprocess_cfg = getattr(model.visual, "preprocess_cfg", {})
    config["preprocess_cfg"] = {name: preprocess_cfg.get(name) for name in PREPROCESSING}
    return json.loads(json.dumps(config))
