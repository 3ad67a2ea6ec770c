"""What a value in a config of others may be: of known keys, plain, within bounds."""

import math
from typing import Any

from ..system.text import did_you_mean

MAX_VALUES = {  # whole numbers from 1 to this
    "embed_dim": 16384,
    "layers": 256,
    "head_layers": 256,
    "width": 16384,
    "head_width": 16384,
    "heads": 1024,
    "patch_size": 1024,
    "context_length": 8192,  # the mask has its square
    "vocab_size": 2_000_000,
    "attn_pooler_queries": 65536,
    "attn_pooler_heads": 1024,
}
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
    "timm_pool": ("", "avg", "token", "map", "abs_attn", "rot_attn"),
    "timm_proj": (None, "", "linear", "mlp", "none"),
    "hf_proj_type": ("linear", "mlp"),
    "hf_pooler_type": ("mean_pooler", "cls_pooler", "cls_last_hidden_state_pooler"),  # the forward of max_pooler fails
}
RANGES = {  # numbers, from and to
    "mlp_ratio": (1e-3, 64),
    "ls_init_value": (-1e3, 1e3),
    "patch_dropout": (0, 0.99),
    "eps": (1e-12, 1),
    "init_logit_scale": (-20, 20),
    "init_logit_bias": (-1e4, 1e4),
    "init_logvar_bias": (-80, 80),
    "image_token_augment": (0, 0.99),
    "init_match_scale": (1e-6, 1e6),
    "init_match_shift": (-1e6, 1e6),
    "timm_drop": (0, 1),
    "timm_drop_path": (0, 1),
}
TOKENS = ("pad_id", "eos_id")
OPTIONAL = ("ls_init_value", "init_logit_bias", "init_logvar_bias", "timm_drop_path")  # may be null


def check_value(key: str, value: Any, name: str, kind: type = float) -> None:
    """ValueError for a value that is not of the kind, or not in the range, that such a key has.

    Arguments:
        name: the block that the key is in, for the message.
        kind: what a key that is in no table takes: bool, or else a short text or null.
    """
    if key in MAX_VALUES:
        check_count(key, value, name)
    elif key in CHOICES:
        if not any(value is choice or (type(value) is str and value == choice) for choice in CHOICES[key]):
            choices = ", ".join("null" if choice is None else repr(choice) for choice in CHOICES[key])
            raise ValueError(f"{name}.{key} must be one of {choices}, not {value!r:.40}.")
    elif key in RANGES:
        least, most = RANGES[key]
        if not (value is None and key in OPTIONAL) and not (is_number(value) and least <= value <= most):
            raise ValueError(f"{name}.{key} must be between {least:g} and {most:g}, not {value!r:.40}.")
    elif key in TOKENS:
        if not is_whole(value) or not 0 <= value < MAX_VALUES["vocab_size"]:
            raise ValueError(f"{name}.{key} must be a token id, not {value!r:.40}.")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}.{key} must be true or false, not {value!r:.40}.")
    elif value is not None and not (isinstance(value, str) and len(value) <= 200):
        raise ValueError(f"{name}.{key} must be a plain value, a short text, not {value!r:.40}.")


def check_count(key: str, value: Any, name: str) -> None:
    """ValueError unless it is a whole number from 1 to what such a key may have."""
    if not is_whole(value) or not 1 <= value <= MAX_VALUES[key]:
        raise ValueError(f"{name}.{key} must be a whole number from 1 to {MAX_VALUES[key]}, not {value!r:.40}.")


def check_keys(block: Any, keys: Any, name: str) -> None:
    """ValueError unless it is an object with keys of these only."""
    if not isinstance(block, dict):
        raise ValueError(f"{name} must be an object, not {type(block).__name__}.")
    for key in block:
        if key not in keys:
            hint = did_you_mean(str(key), keys, otherwise=f"known keys: {', '.join(keys)}.")
            raise ValueError(f"{name} has an unknown key {str(key)[:60]!r}; {hint}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pair(size: Any) -> list:
    """Height and width of a size that is one number for both, or two."""
    return list(size) if isinstance(size, (list, tuple)) else [size, size]
