"""Files of weights and the shapes of a model, by open_clip's own readers and classes."""

import pickle
from pathlib import Path
from typing import Any

from open_clip import factory
from open_clip.model import convert_to_custom_text_state_dict
from torch import Tensor

from ..system.digest import Damaged
from .config_check import build_on_meta

BIG_VISION = (".npz", ".npy")  # files of big_vision's weights, for which open_clip has readers of their own
POSITION_IDS = "text.transformer.embeddings.position_ids"


def shapes_of(model_cfg: dict) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a model with this config, without allocating them."""
    return {name: tuple(tensor.shape) for name, tensor in build_on_meta(model_cfg).state_dict().items()}


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file of any kind that open_clip reads, without `module.`; no code is run."""
    try:
        return factory.load_state_dict(str(path), weights_only=True)
    except Damaged:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read: {reason(error)}") from error


def fitting(model: Any, path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint file under the names of `model`, as open_clip loads them. Raise ValueError
    if it cannot."""
    return factory.convert_state_dict(model, read_state_dict(path))


def plain_names(state_dict: dict) -> dict[str, Any]:
    """Return a state dict without the `module.` of DDP."""
    return {str(name).removeprefix("module."): value for name, value in state_dict.items()}


def plain_text_names(model: Any, state_dict: dict) -> dict[str, Any]:
    """Return a state dict with the names of the model's text tower where that is a module of its own, and without a
    buffer that Hugging Face's towers no longer have. open_clip does both, but only after it has converted a file."""
    if not hasattr(model, "text"):
        return state_dict
    state_dict = convert_to_custom_text_state_dict(state_dict) if "positional_embedding" in state_dict else state_dict
    return {name: tensor for name, tensor in state_dict.items() if name != POSITION_IDS}


def reason(error: Exception) -> str:
    """Return a user's reason why a file cannot be loaded; the text of a parser's own error ("101", "") says nothing."""
    if isinstance(error, (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, StopIteration)):
        return "it is not a dict of tensors by name, or one that torch.load takes only with weights_only=False."
    return " ".join(str(error).split())
