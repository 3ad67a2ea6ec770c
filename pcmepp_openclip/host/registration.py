"""Registration of the plugin: `register` makes every caller of open_clip know the PCME++ models."""

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
from open_clip import factory, pretrained
from torch import Tensor, nn

from ..system.digest import Damaged, verified
from . import names, repos, seams, towers
from .weights import plain_text_names, reason

HOLDERS = ("open_clip.factory", "open_clip", "open_clip_train.main", "open_clip_train.zero_shot")
RELEASED = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"


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
    _add_pretrained_tags(config_dir)

    def loss_of(stock: Callable, args: Any) -> nn.Module:
        block = getattr(args, "pcmepp_cfg", None) or (factory.get_model_config(args.model) or {}).get("pcmepp_cfg")
        return stock(args) if block is None else create_loss(args, block)

    def task_of(stock: Callable, args: Any, model: nn.Module, *more: Any, **kwargs: Any) -> nn.Module:
        if not isinstance(model, our_classes):
            return stock(args, model, *more, **kwargs)
        return _task_class()(model, loss=factory.create_loss(args))

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

    def tokenizer(stock: Callable, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{"trust_remote_code": False, **kwargs})  # the library would ask on the terminal

    ours: dict[str, Callable] = {  # each is called with the stock function in front of the arguments
        "get_model_config": names.get_model_config,
        "parse_model_name": repos.parse_model_name,
        "_get_hf_config": repos.get_config,
        "download_pretrained_from_hf": repos.get_weights,
        "_find_checkpoint_in_dir": repos.find_weights,
        "get_tokenizer": repos.get_tokenizer,
        "HFTokenizer": tokenizer,
        "load_state_dict": read,
        "load_checkpoint": load,
        "convert_state_dict": convert,
        "create_loss": loss_of,
        "create_task": task_of,
    }
    holders = [module for name in HOLDERS if (module := sys.modules.get(name)) is not None]
    for _, name in (*seams.REPLACED, *(seams.REPLACED_IN_4 if hasattr(factory, "create_task") else ())):
        stock = getattr(factory, name)
        if name not in ours:
            setattr(factory, name, _dispatcher(stock, model_classes.get(name)))
            continue
        replacement = functools.update_wrapper(functools.partial(ours[name], stock), stock)
        for module in holders:  # each holds a stock function by its name if it was imported before
            if getattr(module, name, None) is stock:
                setattr(module, name, replacement)
    factory._pcmepp_registered = True


def _add_pretrained_tags(config_dir: Path) -> None:
    """Give the curated models the tags of the plain models whose weights fit their mean branch, and the released."""
    tags = names.Tags(pretrained._PRETRAINED)
    for path in sorted(config_dir.glob("*.json")):
        base = path.stem.replace("-GPO", "").removesuffix("-unc2")
        if base in tags:
            tags[path.stem] = copy.deepcopy(tags[base])
    tags["PCMEpp-ViT-B-16-unc2"]["cc3m_cc12m_redcaps"] = {"hf_hub": f"{RELEASED}/model.safetensors"}
    tags["PCMEpp-ViT-B-16-unc2"]["cc3m_cc12m_redcaps_256m"] = {"hf_hub": f"{RELEASED}-256M/model.safetensors"}
    pretrained._PRETRAINED = tags


def _task_class() -> type:
    from open_clip.task import CLIPTask  # only open_clip 4 has it

    class PCMEppTask(CLIPTask):
        """A task of the loop of open_clip 4, which also reports the scale and shift of the matching logit."""

        @staticmethod
        def _report(source: dict[str, Tensor]) -> dict[str, Tensor]:
            scales = ("logit_scale", "logit_bias", "match_scale", "match_shift")
            return {name: source[name].float().mean().detach() for name in scales if name in source}

    return PCMEppTask


def _dispatcher(stock: type, model_class: type | None) -> type:
    """Return a stand-in for a model class of open_clip's factory; what it builds is of another class, never its own."""

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
