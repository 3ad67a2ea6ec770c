"""Functions by which open_clip finds PCME++ models by `hf-hub:ORG/NAME[@REVISION]` or `local-dir:FOLDER`.

Each function with a `stock` argument replaces that function of `open_clip.factory`. Repos of other models are left to
open_clip, but for the revision. For a PCME++ repo, the config is checked first (`config_check`), only safetensors are
loaded, a tokenizer comes from the repo itself, and missing weights are an error: open_clip would continue with random
ones.

A folder of the released layout is read as a repo whose id is its absolute path, which the id of a repo never is.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from open_clip import factory

from .config_check import ConfigRefused, check_config, check_plain_config
from .tokenizers import TOKENIZER_FILES, check_tokenizer, read_json, tokenizer_files

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, "open_clip_pytorch_model.safetensors", "model.safetensors")  # the first one is preferred


class Missing(str):
    """The name of a missing file of weights; loading it raises an error with the reason."""

    reason: str


class Unreachable(ValueError):
    """A file is not in the cache, and the Hub did not say whether there is one."""


def _missing(place: str, reason: str) -> Missing:
    path = Missing(f"{place}/{WEIGHTS_FILE}")
    path.reason = reason
    return path


def is_pcmepp_config(config: Any) -> bool:
    """Return whether the content of an `open_clip_config.json` is of a PCME++ model."""
    return (
        isinstance(config, dict) and isinstance(config.get("model_cfg"), dict) and "pcmepp_cfg" in config["model_cfg"]
    )


_ours: set[str] = set()  # the ids of repos with a PCME++ model


def parse_model_name(stock: Callable, model_name: str) -> tuple[str | None, str]:
    """Check the config of a local folder. A folder of the released layout is treated as a repo, since open_clip
    reads only its own layout."""
    schema, identifier = stock(model_name)
    if schema != "local-dir":
        return schema, identifier
    folder = Path(identifier)
    if not (folder / CONFIG_FILE).exists() and (folder / "config.json").exists():
        return "hf-hub", str(folder.absolute())
    config = read_json(folder / CONFIG_FILE)
    if is_pcmepp_config(config):
        check_config(config, model_name)
    return schema, identifier


def get_config(stock: Callable, model_id: str, cache_dir: str | None = None) -> dict:
    if Path(model_id).is_absolute():
        config = _read_released(Path(model_id))
    else:
        try:
            config = stock(model_id, cache_dir)
        except FileNotFoundError:
            config = _fetch_released(model_id, cache_dir)
            if not config:
                raise
    if is_pcmepp_config(config):
        _ours.add(model_id)
        check_config(config, f"hf-hub:{model_id}")
        text_cfg = config["model_cfg"]["text_cfg"]
        if text_cfg.get("hf_tokenizer_name"):
            text_cfg["hf_tokenizer_name"] = _tokenizer_folder(model_id, cache_dir)
    return config


def check_plain_repo(model_name: str) -> None:
    """Raise ConfigRefused if a `local-dir:` or `hf-hub:` model is no PCME++ model and its config names code or a repo
    of anyone's choice. PCME++ configs are checked wherever they are read."""
    schema, identifier = factory.parse_model_name(model_name)
    if schema is None:
        return
    try:
        config = (
            read_json(Path(identifier) / CONFIG_FILE) if schema == "local-dir" else factory._get_hf_config(identifier)
        )
    except ConfigRefused:
        raise
    except Exception as error:
        raise ValueError(f"The config of {model_name} cannot be read: {_line(error)}.") from None
    if config is not None and not is_pcmepp_config(config):
        check_plain_config(config, model_name)


def get_weights(stock: Callable, model_id: str, filename: str | None = None, **kwargs: Any) -> str:
    """Download a file of a repo, or its weights where no file is named; from a PCME++ repo only safetensors."""
    repo_id, _, revision = model_id.partition("@")
    if revision:
        kwargs["revision"] = revision
    if filename is not None or model_id not in _ours:
        return stock(repo_id, filename=filename, **kwargs)
    reason = "the repo holds no weights in safetensors; others are not loaded"
    for name in WEIGHTS_FILES:
        try:
            if path := fetch(repo_id, name, **kwargs):
                return str(path)
        except ValueError as error:  # the next name may be in the cache
            reason = str(error)
    return _missing(repo_id if Path(repo_id).is_absolute() else f"hf-hub:{repo_id}", reason)


def find_weights(stock: Callable, folder: Path) -> str | None:
    path = stock(folder)
    if path is None and is_pcmepp_config(read_json(folder / CONFIG_FILE)):
        return _missing(str(folder), "the folder holds no weights")
    return path


def get_tokenizer(stock: Callable, model_name: str = "", *args: Any, **kwargs: Any) -> Any:
    """Raise an error for a folder without the tokenizer that it needs before anything is loaded from elsewhere.

    open_clip takes a repo without a readable config for a tokenizer's, but must not where the config is refused."""
    schema, identifier = factory.parse_model_name(model_name)
    if schema == "local-dir":
        config = read_json(Path(identifier) / CONFIG_FILE)
        named = config
        for key in ("model_cfg", "text_cfg", "hf_tokenizer_name"):
            named = named.get(key) if isinstance(named, dict) else None
        if named:  # open_clip then reads the tokenizer from the folder
            (check_tokenizer if is_pcmepp_config(config) else tokenizer_files)(Path(identifier), model_name)
    if schema == "hf-hub":
        try:
            factory._get_hf_config(identifier, cache_dir=kwargs.get("cache_dir"))
        except ConfigRefused:
            raise
        except Exception as error:
            logging.debug("%s: %s", model_name, error)
    return stock(model_name, *args, **kwargs)


def fetch(model_id: str, name: str, **kwargs: Any) -> Path | None:
    """Return a file of a repo or, where the id is an absolute path, of a folder; None if there is none.

    Raise `Unreachable` if that is not known, and ValueError if the Hub refuses the file."""
    if Path(model_id).is_absolute():
        path = Path(model_id) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    repo_id, _, revision = model_id.partition("@")
    try:
        return Path(hf_hub_download(repo_id, name, **{"revision": revision or None, **kwargs}))
    except LocalEntryNotFoundError as error:
        reason = f"it is not in the cache, and the Hub did not give it: {_line(error.__cause__ or error)}"
        answered = isinstance(error.__cause__, HfHubHTTPError)
        raise (ValueError if answered else Unreachable)(reason) from None
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise ValueError(_line(error)) from None


def file_beside(model_name: str, name: str) -> Path | None:
    """Return the file of that name next to the weights of a `local-dir:` or `hf-hub:` model; None if there is none, and
    for other models. Without a network only the cache is searched, and a warning is logged if the file is not there."""
    schema, identifier = factory.parse_model_name(model_name)
    if schema is None:
        return None
    try:
        return fetch(str(Path(identifier).absolute()) if schema == "local-dir" else identifier, name)
    except Unreachable:
        logging.warning("%s: whether it has a %s is not known, since the Hub cannot be reached.", model_name, name)
        return None
    except ValueError as error:
        raise ValueError(f"{name} of {model_name} cannot be fetched: {error}.") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _tokenizer_folder(model_id: str, cache_dir: str | None) -> str:
    """Return the folder of the repo's own tokenizer files."""
    if Path(model_id).is_absolute():
        check_tokenizer(Path(model_id), f"local-dir:{model_id}")
        return model_id
    from huggingface_hub import snapshot_download

    repo_id, _, revision = model_id.partition("@")
    try:
        folder = snapshot_download(
            repo_id, revision=revision or None, cache_dir=cache_dir, allow_patterns=list(TOKENIZER_FILES)
        )
    except Exception as error:  # open_clip would continue with a tokenizer that the library guesses
        raise ConfigRefused(f"The tokenizer of hf-hub:{model_id} cannot be fetched: {_line(error)}.") from None
    check_tokenizer(Path(folder), f"hf-hub:{model_id}")
    return folder


# The released repos hold `config.json` and `model.safetensors`, named before open_clip had its own convention,
# with the head's depth as `unc_layers` in each tower's block. Their keys are those of the authors' class; all others
# must be off, but for those that have no effect on open_clip's own transformers.
RELEASED_KEYS = ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "cast_dtype", "output_dict")
RELEASED_TOWERS = {
    "vision_cfg": (
        *("unc_layers", "layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size"),
        *("ls_init_value", "patch_dropout"),
    ),
    "text_cfg": (
        *("unc_layers", "context_length", "vocab_size", "width", "heads", "layers", "ls_init_value"),
        "hf_tokenizer_name",
    ),
}
WITHOUT_EFFECT = (
    *("n_queries", "attn_pooler_heads", "timm_model_pretrained", "timm_pool", "timm_proj", "timm_proj_bias"),
    *("timm_drop", "timm_drop_path", "pad_id", "hf_model_pretrained", "proj", "pooler_type"),
)


def _fetch_released(model_id: str, cache_dir: str | None) -> dict:
    """Return the config of a repo of the released layout; {} where the repo has another layout or is out of reach."""
    try:
        path = fetch(model_id, "config.json", cache_dir=cache_dir)
        return _read_released(path.parent) if path else {}
    except ConfigRefused:
        raise
    except ValueError:
        return {}


def _read_released(folder: Path) -> dict:
    """Read `config.json` of a released repo as an `open_clip_config.json`. Raise ValueError if it is another kind of
    file, and ConfigRefused if it asks for something that would be left out."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    try:
        layers = {config[tower]["unc_layers"] for tower in RELEASED_TOWERS}
        model_cfg: dict[str, Any] = {"embed_dim": config["embed_dim"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the config of a released PCME++ model: no {error}.") from None
    if len(layers) != 1:
        raise ConfigRefused(f"{path}: unc_layers differ between the towers, which is not supported.")
    model_cfg["quick_gelu"] = config.get("quick_gelu", False)
    model_cfg["pcmepp_cfg"] = {"head_layers": layers.pop(), "init_logvar_bias": None}
    left_out = {
        key: value
        for key, value in config.items()
        if key not in RELEASED_KEYS or (key == "cast_dtype" and value is not None)
    }
    for tower, used in RELEASED_TOWERS.items():
        model_cfg[tower] = {key: config[tower][key] for key in used[1:] if key in config[tower]}
        others = {
            f"{tower}.{key}": value for key, value in config[tower].items() if key not in (*used, *WITHOUT_EFFECT)
        }
        left_out |= {key: value for key, value in others.items() if value}
    for key, value in left_out.items():
        raise ConfigRefused(f"{path} has {key}: {json.dumps(value)[:40]}, which is not supported.")
    logging.info("%s: released PCME++ layout, read as an open_clip config", folder)
    return {"model_cfg": model_cfg, "preprocess_cfg": {}}
