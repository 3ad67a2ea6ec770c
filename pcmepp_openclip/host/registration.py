"""Registration of the plugin: `register` makes every caller of open_clip know the PCME++ models."""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
from open_clip import factory, pretrained
from torch import nn

from ..system.digest import Damaged, verified
from . import names, repos, seams, tokenizers, towers
from .weights import plain_text_names, reason

IMPORTED_BY = ("open_clip_train.main", "open_clip_train.zero_shot")  # these modules import names of open_clip by value
RELEASED = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"
BASES = {  # the plain model whose weights fit the mean branch of a curated PCME++ model
    "PCMEpp-ViT-B-32": "ViT-B-32",
    "PCMEpp-ViT-B-16": "ViT-B-16",
    "PCMEpp-ViT-L-14": "ViT-L-14",
    "PCMEpp-ViT-B-16-unc2": "ViT-B-16",
    "PCMEpp-GPO-ViT-B-32": "ViT-B-32",
    "PCMEpp-GPO-ViT-B-32-unc2": "ViT-B-32",
    "PCMEpp-GPO-ViT-B-16": "ViT-B-16",
    "PCMEpp-GPO-ViT-L-14": "ViT-L-14",
}


def register(
    model_classes: dict[str, type],
    create_loss: Callable[[Any, dict], nn.Module],
    reconcile_state_dict: Callable[[nn.Module, dict], dict],
    config_dir: Path,
) -> None:
    """Make every caller of open_clip know the PCME++ models. A second call does nothing.

    Arguments:
        model_classes: the class of a model with a `pcmepp_cfg` block, by the name of open_clip's own class.
        create_loss: makes the loss of such a model from open_clip_train's arguments and the `pcmepp_cfg`.
        reconcile_state_dict: makes a state dict that fits a model from the model and a file's state dict, or raises.
        config_dir: the folder of the model configs.
    """
    if getattr(factory, "_pcmepp_registered", False):
        return
    our_classes = tuple(model_classes.values())
    open_clip.add_model_config(config_dir)
    for name, base in BASES.items():
        pretrained._PRETRAINED[name] = copy.deepcopy(pretrained._PRETRAINED[base])
    released = pretrained._PRETRAINED["PCMEpp-ViT-B-16-unc2"]
    released["cc3m_cc12m_redcaps"] = {"hf_hub": f"{RELEASED}/model.safetensors"}
    released["cc3m_cc12m_redcaps_256m"] = {"hf_hub": f"{RELEASED}-256M/model.safetensors"}

    def loss_of(stock: Callable, args: Any) -> nn.Module:
        block = getattr(args, "pcmepp_cfg", None) or (factory.get_model_config(args.model) or {}).get("pcmepp_cfg")
        return stock(args) if block is None else create_loss(args, block)

    def task_of(stock: Callable, args: Any, model: nn.Module, *more: Any, **kwargs: Any) -> nn.Module:
        if not isinstance(model, our_classes):
            return stock(args, model, *more, **kwargs)
        from .task import PCMEppTask

        return PCMEppTask(model, loss=loss_of(factory.create_loss, args))

    def convert(stock: Callable, model: nn.Module, state_dict: dict) -> dict:
        state_dict = plain_text_names(model, stock(model, state_dict))
        if not isinstance(model, our_classes):
            return state_dict
        towers.fit_image_size(model, state_dict)
        return reconcile_state_dict(model, state_dict)

    def load(stock: Callable, model: nn.Module, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(checkpoint_path, repos.Missing):
            raise RuntimeError(f"Cannot load {checkpoint_path}: {checkpoint_path.reason}.")
        if not isinstance(model, our_classes):
            return stock(model, checkpoint_path, *args, **kwargs)
        try:
            loaded = stock(model, checkpoint_path, *args, **kwargs)
        except Damaged:
            raise
        except Exception as error:
            raise RuntimeError(f"Cannot load {checkpoint_path}: {reason(error)}") from error
        towers.fit_image_size(model)
        return loaded

    def read(stock: Callable, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        with verified(Path(checkpoint_path)):
            return stock(checkpoint_path, *args, **kwargs)

    ours: dict[str, Callable] = {  # each is called with the stock function in front of the arguments
        "get_model_config": names.get_model_config,
        "get_pretrained_cfg": names.get_pretrained_cfg,
        "list_pretrained_tags_by_model": names.list_pretrained_tags_by_model,
        "is_pretrained_cfg": names.is_pretrained_cfg,
        "parse_model_name": repos.parse_model_name,
        "_get_hf_config": repos.get_config,
        "download_pretrained_from_hf": repos.get_weights,
        "_find_checkpoint_in_dir": repos.find_weights,
        "get_tokenizer": repos.get_tokenizer,
        "HFTokenizer": tokenizers.hf_tokenizer,
        "load_state_dict": read,
        "load_checkpoint": load,
        "convert_state_dict": convert,
        "create_loss": loss_of,
        "create_task": task_of,
    }
    classes = {**model_classes, "CoCa": None}
    library = (*seams.LIBRARY, *(seams.ONLY_4 if hasattr(open_clip, "create_task") else ()))
    assert ours.keys() | classes.keys() >= {seam.name for seam in library}
    replacements: dict[str, Any] = {}
    for seam in library:
        if seam.name not in replacements:  # `open_clip.factory.x` and `open_clip.x` share one object
            stock = seam.find()
            replacements[seam.name] = (
                _dispatcher(seam, classes[seam.name]) if seam.name in classes else _replacement(ours[seam.name], stock)
            )
        seam.replace(replacements[seam.name])
    # A module that was imported before the plugin holds stock functions.
    for module in filter(None, map(sys.modules.get, IMPORTED_BY)):
        for name, replacement in replacements.items():
            if getattr(module, name, None) is getattr(replacement, "__wrapped__", module):
                setattr(module, name, replacement)
    factory._pcmepp_registered = True


def _replacement(function: Callable, stock: Callable) -> Callable:
    """Return `function` with `stock` as its first argument, and with the name and docstring of `stock`."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return replacement


def _dispatcher(seam: seams.Seam, model_class: type | None) -> type:
    """Return a stand-in for a model class of open_clip's factory; what it builds is of another class, never its own."""
    stock = seam.find()

    class Dispatch(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> nn.Module:
            kind = model_class if "pcmepp_cfg" in kwargs else stock
            if kind is None:
                raise ValueError(
                    f"A PCME++ model cannot be a {stock.__name__}, which also learns to write captions: drop the "
                    "config's multimodal_cfg."
                )
            model = kind(*args, **kwargs)
            model.built_from = kwargs  # `towers.config_in_use` reads it
            return model

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock)

    return Dispatch(stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__})
