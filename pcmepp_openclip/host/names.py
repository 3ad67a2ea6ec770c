"""The names of PCME++ models: the curated ones, and `PCMEpp-` in front of any name that open_clip knows."""

from collections.abc import Callable
from typing import Any

import open_clip

from ..system.text import did_you_mean
from .towers.config import default_heads

PREFIX = "PCMEpp"
INIT_LOGVAR_BIAS = -10.0
INIT_LOGVAR_BIAS_SIGLIP = -16.0  # SigLIP's scale is over ten times the default of the matching logit


def default_pcmepp_cfg(config: dict) -> dict[str, Any]:
    """Return the `pcmepp_cfg` that makes a model of open_clip's probabilistic.

    A model with a logit bias is a SigLIP: it starts with SigLIP's logit and is trained by the matching loss alone.
    """
    cfg: dict[str, Any] = {"head_layers": 1, "init_logvar_bias": INIT_LOGVAR_BIAS}
    cfg |= default_heads(config["vision_cfg"], config["text_cfg"])
    if config.get("init_logit_bias") is not None:
        cfg |= {"init_logvar_bias": INIT_LOGVAR_BIAS_SIGLIP, "match_logit": "siglip"}
        cfg |= {"reduction": "sum", "contrastive_weight": 0.0}
    return cfg


def get_model_config(stock: Callable, model_name: str) -> dict | None:
    """Return the config of a model that open_clip knows, or of `PCMEpp-NAME` for any such NAME."""
    if model_name.startswith(PREFIX):
        model_name = model_name.replace("/", "-")  # `create_model` takes ViT-B/16 too
    config = stock(model_name)
    if not model_name.lower().startswith(PREFIX.lower()):
        return config
    base = plain_name(model_name)
    if config is None and base is not None:
        config = stock(base)
        if config is not None and "multimodal_cfg" in config:
            raise ValueError(
                f"There is no '{model_name}': {base} is a CoCa, which also learns to write captions, and PCME++ has no "
                "loss for that."
            )
        try:
            return config and {**config, "pcmepp_cfg": default_pcmepp_cfg(config)}
        except (KeyError, ValueError) as error:  # an audio or a generative model of open_clip 4
            raise ValueError(f"There is no '{model_name}': {base} is no CLIP of images and texts ({error}).") from None
    if config is None:
        listed = open_clip.list_models()
        ours = [name for name in listed if name.startswith(PREFIX)]
        others = [f"{PREFIX}-{name}" for name in listed if name not in ours]
        meant = did_you_mean(model_name, [*ours, *others], cutoff=0.0)
        raise RuntimeError(
            f"There is no model '{model_name}': {meant} Known: {', '.join(ours)}, and {PREFIX}- in front of any other "
            "name in open_clip.list_models()."
        )
    if "pcmepp_cfg" not in config:
        raise ValueError(f"The config of '{model_name}' lacks its pcmepp_cfg block, which makes a model PCME++.")
    return config


def plain_name(model_name: str) -> str | None:
    """Return NAME of `PCMEpp-NAME` if open_clip knows it, else None."""
    base = model_name.replace("/", "-").removeprefix(f"{PREFIX}-")
    return base if base != model_name and base in open_clip.list_models() else None


class Tags(dict):
    """open_clip's pretrained tags by model; `PCMEpp-NAME` has the tags of NAME."""

    def __contains__(self, model: object) -> bool:
        return super().__contains__(model) or super().__contains__(plain_name(str(model)))

    def __missing__(self, model: str) -> dict:
        base = plain_name(model)
        if base is None:
            raise KeyError(model)
        return self[base]


def base_models(hyperparameters: dict, model_cfg: dict) -> list[str]:
    """Return the Hub repo, if any, whose weights a run began with, by its --pretrained tag or its text tower.

    Arguments:
        hyperparameters: `model` and `pretrained` of the run, {} where they are unknown.
        model_cfg: the config of the model of the run.
    """
    if not isinstance(model := hyperparameters.get("model"), str):
        return []
    if not (tag := hyperparameters.get("pretrained")):
        name = model_cfg["text_cfg"].get("hf_model_name")  # open_clip loads the weights of this repo
        return [name] if name else []
    parts = open_clip.get_pretrained_cfg(model, str(tag)).get("hf_hub", "").split("/")
    return ["/".join(parts[:2])] if len(parts) >= 2 else []
