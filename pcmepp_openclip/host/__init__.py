"""The only place that touches open_clip's internals. All that may break with a new open_clip is here: the library
in this file, how it finds models in `repos.py`, its training loop in `training.py`, its loaders in `data.py`.

Three parts: the check that this is an open_clip we know, the pieces of its towers that the model is built of,
and the seams by which the plugin gets in (`register`). Names of open_clip that are public and documented may be
used anywhere; those with an underscore, and names replaced in its modules, only here.
"""

import contextlib
import copy
import difflib
import functools
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import open_clip
import torch
from torch import Tensor, nn

SUPPORTED = ">=3.3,<4"
_CURE = f"pip install 'open_clip_torch[training]{SUPPORTED}'"
_NEEDED = (
    *("add_model_config", "list_models", "load_checkpoint"),
    *("factory.CLIP", "factory.CustomTextCLIP", "factory.CoCa", "factory.get_model_config"),
    *("factory.convert_state_dict", "factory.load_checkpoint", "factory.load_state_dict"),
    *("factory.parse_model_name", "factory._get_hf_config", "factory.download_pretrained_from_hf"),
    *("factory._find_checkpoint_in_dir", "factory.get_tokenizer", "factory.create_loss", "pretrained._PRETRAINED"),
    *("factory.HFTokenizer",),
    *("model._build_vision_tower", "model._build_text_tower", "model.CLIPVisionCfg", "model.CLIPTextCfg"),
    *("transformer.VisionTransformer._embeds", "transformer.VisionTransformer._pool"),
)


def _check_host() -> None:
    """Fail at once, in one sentence, where open_clip is not one that this plugin was written for."""
    found = getattr(open_clip, "__version__", "one of unknown version")  # of what is imported, not what is installed
    try:
        number = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        number = (0, 0)
    if not (3, 3) <= number < (4, 0):
        raise ImportError(f"pcmepp_openclip needs open_clip_torch {SUPPORTED}, found {found}: run {_CURE}")
    for name in _NEEDED:
        try:
            operator.attrgetter(name)(open_clip)
        except AttributeError:
            raise ImportError(
                f"open_clip_torch {found} has no open_clip.{name}, which pcmepp_openclip needs; "
                f"supported are {SUPPORTED}: run {_CURE}"
            ) from None


_check_host()

from open_clip import factory, pretrained  # noqa: E402
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower, _build_vision_tower  # noqa: E402

from ..runs.checkpoints import Damaged, verified  # noqa: E402
from . import repos  # noqa: E402

CLIP = open_clip.CLIP

# --- Pieces of open_clip's towers -------------------------------------------------------------------------


def check_towers(vision_cfg: Any, text_cfg: Any, head_layers: int) -> None:
    """ValueError for an architecture of open_clip's that a log-variance branch cannot be split off from."""
    vision = _as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg")
    text = _as_cfg(CLIPTextCfg, text_cfg, "text_cfg")
    if vision.timm_model_name or not isinstance(vision.layers, int):
        raise ValueError("A PCME++ model needs open_clip's own VisionTransformer, not a timm model or a ResNet.")
    if text.hf_model_name:
        raise ValueError("A PCME++ model needs open_clip's own text transformer: drop text_cfg.hf_model_name.")
    for block, key, value, allowed in [
        ("vision_cfg", "pool_type", vision.pool_type, ("tok",)),
        ("vision_cfg", "attentional_pool", vision.attentional_pool, (False,)),
        ("vision_cfg", "output_tokens", vision.output_tokens, (False,)),
        ("text_cfg", "pool_type", text.pool_type, ("argmax", "eos", "first")),
        ("text_cfg", "output_tokens", text.output_tokens, (False,)),
        ("text_cfg", "embed_cls", text.embed_cls, (False,)),
    ]:
        if value not in allowed:
            raise ValueError(f"A PCME++ model needs {block}.{key} of {' or '.join(map(repr, allowed))}, not {value!r}.")
    if head_layers >= min(vision.layers, text.layers):
        raise ValueError(
            f"pcmepp_cfg.head_layers must be below the towers' {vision.layers} and {text.layers} layers, "
            f"not {head_layers}."
        )


def _as_cfg(kind: type, cfg: Any, block: str) -> Any:
    try:
        return kind(**cfg) if isinstance(cfg, dict) else cfg
    except TypeError as error:
        raise ValueError(f"{block} of the model config: {error}") from None


def image_blocks(vision_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """A fresh transformer of `layers` blocks, of the kind that the image tower of that config has."""
    cfg = copy.copy(_as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg"))
    cfg.layers = layers
    return _build_vision_tower(1, cfg, quick_gelu, cast_dtype).transformer


def text_blocks(text_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """The same for the text tower."""
    cfg = copy.copy(_as_cfg(CLIPTextCfg, text_cfg, "text_cfg"))
    cfg.layers, cfg.vocab_size, cfg.context_length = layers, 1, 1  # only the blocks are kept
    return _build_text_tower(1, cfg, quick_gelu, cast_dtype).transformer


def embed_image(visual: Any, image: Tensor) -> Tensor:
    """Pixels to what the first block of the image tower reads, [N, L, C]."""
    return visual._embeds(image)


def project_image(visual: Any, x_N1C: Tensor) -> Tensor:
    """The CLS token behind the last block to CLIP's image features, [N, D]."""
    pooled_NC, _ = visual._pool(x_N1C)
    return pooled_NC if visual.proj is None else pooled_NC @ visual.proj


@contextlib.contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of `module` while the context lasts, for open_clip methods that do not give them out."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


# --- The way in -------------------------------------------------------------------------------------------

PREFIX = "PCMEpp"
OWN_TOKENIZER = "own"  # text_cfg.hf_tokenizer_name of a model whose tokenizer files lie beside its weights
RELEASED = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"
BASES = {  # the plain model whose weights fit a PCME++ model's mean branch
    "PCMEpp-ViT-B-32": "ViT-B-32",
    "PCMEpp-ViT-B-16": "ViT-B-16",
    "PCMEpp-ViT-L-14": "ViT-L-14",
    "PCMEpp-ViT-B-16-unc2": "ViT-B-16",
}


def register(
    model_class: type,
    create_loss: Callable[[Any, dict], nn.Module],
    reconcile_state_dict: Callable[[nn.Module, dict], dict],
    config_dir: Path,
) -> None:
    """Make every caller of open_clip know the PCME++ models. A second call does nothing.

    Arguments:
        model_class: what a config with a `pcmepp_cfg` block is built as.
        create_loss: (open_clip_train's arguments, `pcmepp_cfg`) to the loss of such a model.
        reconcile_state_dict: (model, state dict of a file) to a state dict that fits the model, or an error.
        config_dir: the folder of the model configs.
    """
    if getattr(factory, "_pcmepp_registered", False):
        return
    open_clip.add_model_config(config_dir)
    for name, base in BASES.items():
        pretrained._PRETRAINED[name] = copy.deepcopy(pretrained._PRETRAINED[base])
    released = pretrained._PRETRAINED["PCMEpp-ViT-B-16-unc2"]
    released["cc3m_cc12m_redcaps"] = {"hf_hub": f"{RELEASED}/model.safetensors"}
    released["cc3m_cc12m_redcaps_256m"] = {"hf_hub": f"{RELEASED}-256M/model.safetensors"}

    factory.CLIP = _dispatcher(factory.CLIP, model_class)
    factory.CustomTextCLIP = _dispatcher(factory.CustomTextCLIP, None)
    factory.CoCa = _dispatcher(factory.CoCa, None)
    factory.get_model_config = _wrap(factory.get_model_config, _named_config)
    factory.parse_model_name = _wrap(factory.parse_model_name, repos.parse_model_name)
    factory._get_hf_config = _wrap(factory._get_hf_config, repos.get_config)
    factory.download_pretrained_from_hf = _wrap(factory.download_pretrained_from_hf, repos.get_weights)
    factory._find_checkpoint_in_dir = _wrap(factory._find_checkpoint_in_dir, repos.find_weights)
    factory.get_tokenizer = open_clip.get_tokenizer = _wrap(factory.get_tokenizer, repos.get_tokenizer)
    factory.HFTokenizer = _wrap(factory.HFTokenizer, repos.hf_tokenizer)

    def loss_of(stock: Callable, args: Any) -> nn.Module:
        block = getattr(args, "pcmepp_cfg", None) or (factory.get_model_config(args.model) or {}).get("pcmepp_cfg")
        return stock(args) if block is None else create_loss(args, block)

    def convert(stock: Callable, model: nn.Module, state_dict: dict) -> dict:
        state_dict = stock(model, state_dict)
        return reconcile_state_dict(model, state_dict) if isinstance(model, model_class) else state_dict

    def load(stock: Callable, model: nn.Module, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(checkpoint_path, repos.Missing):
            raise RuntimeError(f"Cannot load {checkpoint_path}: {checkpoint_path.reason}.")
        try:
            return stock(model, checkpoint_path, *args, **kwargs)
        except Exception as error:
            if not isinstance(model, model_class) or isinstance(error, Damaged):
                raise
            raise RuntimeError(f"Cannot load {checkpoint_path}: {_reason(error)}") from error

    def read(stock: Callable, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        with verified(Path(checkpoint_path)):
            return stock(checkpoint_path, *args, **kwargs)

    factory.load_state_dict = _wrap(factory.load_state_dict, read)
    factory.create_loss = open_clip.create_loss = _wrap(factory.create_loss, loss_of)
    factory.convert_state_dict = _wrap(factory.convert_state_dict, convert)
    factory.load_checkpoint = open_clip.load_checkpoint = _wrap(factory.load_checkpoint, load)
    factory._pcmepp_registered = True


def never_ask() -> None:
    """For commands: a repo that wants its code to be run is an error, not a question on the terminal."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds that it waits for an answer


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


def _wrap(stock: Callable, ours: Callable) -> Callable:
    """`ours`, called with the stock function in front of its arguments, under the stock function's name."""
    return functools.wraps(stock)(functools.partial(ours, stock))


def _dispatcher(stock: type, model_class: type | None) -> type:
    """A stand-in for a model class of open_clip's factory, which only builds: instances are never its own."""

    class Dispatch(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> nn.Module:
            if "pcmepp_cfg" not in kwargs:
                return stock(*args, **kwargs)
            if model_class is None:
                raise ValueError(
                    f"A PCME++ model is a CLIP, not a {stock.__name__}: drop --force-custom-text and the config's "
                    "custom_text, multimodal_cfg and text_cfg.hf_model_name."
                )
            return model_class(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, stock)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, stock)

    return Dispatch(stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__})


def _named_config(stock: Callable, model_name: str) -> dict | None:
    if model_name.startswith(PREFIX):
        model_name = model_name.replace("/", "-")  # ViT-B/16, as `create_model` takes it
    config = stock(model_name)
    if model_name.lower().startswith(PREFIX.lower()):
        ours = [name for name in open_clip.list_models() if name.startswith(PREFIX)]
        if config is None:
            close = difflib.get_close_matches(model_name, ours, n=1, cutoff=0.0)
            raise RuntimeError(
                f"There is no model '{model_name}': did you mean '{close[0]}'? Known: {', '.join(ours)}."
            )
        if "pcmepp_cfg" not in config:
            raise ValueError(f"The config of '{model_name}' lacks its pcmepp_cfg block, which makes a model PCME++.")
    return config


def shapes_of(model_cfg: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model with that config; nothing is allocated."""
    cfg = copy.deepcopy(model_cfg)
    custom = cfg.pop("custom_text", False) or "hf_model_name" in cfg["text_cfg"]
    kind = factory.CLIP if not custom else factory.CoCa if "multimodal_cfg" in cfg else factory.CustomTextCLIP
    cfg["text_cfg"]["hf_model_pretrained"] = False
    with torch.device("meta"):
        model = kind(**cfg)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file of any kind that open_clip reads, without `module.`; no code is run."""
    try:
        return factory.load_state_dict(str(path), weights_only=True)
    except Damaged:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why a file cannot be loaded, for a user; what escapes from within a parser ("101", "") says nothing."""
    if isinstance(error, (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, StopIteration)):
        return "it is not a dict of tensors by name, or one that torch.load takes only with weights_only=False."
    return " ".join(str(error).split())
