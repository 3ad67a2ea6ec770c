"""The meaning of a file's tensors for a PCME++ model: all of it, a plain CLIP to start from, or neither."""

import logging
from collections.abc import Iterable
from typing import Any

from .pcmepp import is_gpo_mean, is_pcmepp_parameter

MATCH_SCALARS = ("negative_scale", "shift")  # a and b of the matching logit

# open_clip interpolates these when they differ
RESIZED = ("positional_embedding", "visual.positional_embedding", "text.positional_embedding")


def reconcile_state_dict(model: Any, state_dict: dict) -> dict:
    """Return a state dict that `model` loads strictly, or a ValueError in one sentence.

    A file without any log-variance tensor is a plain model: the mean branch takes its weights, the log-variance
    branch, and GPO of the means, keep their random ones, and one log line says so. With GPO, the file's pooling and
    projection, of any embedding dimension, are left out. A file with some of them is damaged or of another
    architecture, or its branch begins at the other place; it is never loaded in part. The two scalars of the matching
    logit are the exception: where the file has another `match_logit`, the model keeps its own, and the log says so.
    """
    own = model.state_dict()
    _check_pool(model.pcmepp_cfg.pool, state_dict)
    if model.pcmepp_cfg.pool == "gpo":
        dropped = (*model.image_branch.tower.pooling, *model.text_branch.tower.pooling)
        state_dict = {name: tensor for name, tensor in state_dict.items() if not name.startswith(dropped)}
    missing = [name for name in own if name not in state_dict and name != "logit_bias"]  # open_clip adds that one
    unknown = [name for name in state_dict if name not in own]
    if len(missing) == len(own):
        raise ValueError("it holds none of the model's tensors: not a CLIP or PCME++ checkpoint.")
    plain_missing = [name for name in missing if not is_pcmepp_parameter(name)]
    plain_unknown = [name for name in unknown if not is_pcmepp_parameter(name)]
    if plain_missing or plain_unknown:
        raise ValueError(f"it is of another architecture: {_differences(plain_missing, plain_unknown)}.")
    _check_places(own, state_dict)
    sigma_missing = [name for name in missing if is_pcmepp_parameter(name)]
    sigma_present = [name for name in own if is_pcmepp_parameter(name) and name in state_dict]
    if sigma_present and not {*sigma_missing, *unknown} - set(MATCH_SCALARS) and (sigma_missing or unknown):
        logging.info("The file has another match_logit: what the matching logit has of its own starts anew.")
        state_dict = {name: tensor for name, tensor in state_dict.items() if name not in MATCH_SCALARS}
        state_dict |= {name: own[name] for name in MATCH_SCALARS if name in own}
        sigma_missing, unknown = [], []
    if sigma_present and sigma_missing:
        raise ValueError(
            f"it has {len(sigma_present)} tensors of the log-variance branch but lacks {len(sigma_missing)}: "
            f"{', '.join(sigma_missing)}. Use the model config that it was trained with."
        )
    if unknown:
        raise ValueError(f"it is of another architecture: {_differences([], unknown)}.")
    for name, tensor in state_dict.items():
        if tensor.shape != own[name].shape and name not in RESIZED and own[name].numel() != tensor.numel():
            raise ValueError(
                f"it is of another architecture: {name} is {list(tensor.shape)}, the model's {list(own[name].shape)}."
            )
    model.fresh_logvar = bool(sigma_missing)
    if sigma_missing:
        logging.info(
            "Warm start: the mean branch takes the weights of a plain model; the log-variance branch%s (%d tensors) "
            "is untrained.",
            " and the pooling of the means" if model.pcmepp_cfg.pool == "gpo" else "",
            len(sigma_missing),
        )
        state_dict = {**state_dict, **{name: own[name] for name in sigma_missing}}
    return state_dict


def _check_pool(pool: str, state_dict: dict) -> None:
    """Raise ValueError if the file is of a PCME++ model with another pooling."""
    theirs = "gpo" if any(map(is_gpo_mean, state_dict)) else "tower"
    if theirs != pool and any(map(is_pcmepp_parameter, state_dict)):
        raise ValueError(f"its means are pooled otherwise: set pcmepp_cfg.pool to '{theirs}'.")


def _check_places(own: dict, state_dict: dict) -> None:
    """Raise ValueError if a branch of the file begins at another place than the model's."""
    for key, is_image in (("image_head", True), ("text_head", False)):
        ours, theirs = _place(own, is_image), _place(state_dict, is_image)
        if theirs is not None and theirs != ours:
            raise ValueError(f"its log-variance branch is of another place: set pcmepp_cfg.{key} to '{theirs}'.")


def _place(names: Iterable[str], is_image: bool) -> str | None:
    """Return the place where the branch of a tower begins, by the names of its tensors, or None if it has none."""
    places = {"uncertainty_head.": "top", "uncertainty_transformer.": "split"}
    matches = (
        places[mark] for name in names for mark in places if mark in name and name.startswith("visual.") == is_image
    )
    return next(matches, None)


def _differences(missing: list[str], unknown: list[str]) -> str:
    parts = {"it lacks": missing, "it has unknown tensors:": unknown}
    differences = "; ".join(f"{words} {_some(names)}" for words, names in parts.items() if names)
    return f"{differences}; use the model config that it was trained with"


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
