"""Functions by which open_clip finds PCME++ models by `hf-hub:ORG/NAME[@REVISION]` or `local-dir:FOLDER`.

Each function with a `stock` argument replaces that function of `open_clip.factory`. Repos of other models are left to
open_clip, but for the revision. For a PCME++ repo, the config is checked first (`config_check`), only safetensors are
loaded, a tokenizer comes from the repo itself, and missing weights are an error: open_clip would continue with random
ones.
"""

import contextlib
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


def _missing(place: str, reason: str) -> Missing:
    path = Missing(f"{place}/{WEIGHTS_FILE}")
    path.reason = reason
    return path


def is_pcmepp_config(config: Any) -> bool:
    """Return whether the content of an `open_clip_config.json` is of a PCME++ model."""
    return (
        isinstance(config, dict) and isinstance(config.get("model_cfg"), dict) and "pcmepp_cfg" in config["model_cfg"]
    )


_ours: dict[str, bool] = {}  # whether a repo holds a PCME++ model, by its id


def parse_model_name(stock: Callable, model_name: str) -> tuple[str | None, str]:
    """Check the config of a local folder. A folder of the released layout is treated as a repo, since open_clip
    reads only its own layout."""
    schema, identifier = stock(model_name)
    if schema != "local-dir":
        return schema, identifier
    folder = Path(identifier)
    if not (folder / CONFIG_FILE).exists() and (folder / "config.json").exists():
        return "hf-hub", str(folder.absolute())  # a Hub id is never absolute, so the two cannot be confused
    config = read_json(folder / CONFIG_FILE)
    if is_pcmepp_config(config):
        check_config(config, model_name)
    return schema, identifier


def get_config(stock: Callable, model_id: str, cache_dir: str | None = None) -> dict:
    if Path(model_id).is_absolute():
        config = _read_released(Path(model_id))
    else:
        try:
            config = stock(model_id, cache_dir=cache_dir)
        except FileNotFoundError:  # the repo may have the released layout; if not, this error is raised again
            released = _fetch_released(model_id, cache_dir)
            if released is None:
                raise
            config = released
    _ours[model_id] = is_pcmepp_config(config)
    if _ours[model_id]:
        check_config(config, f"hf-hub:{model_id}")
        text_cfg = config["model_cfg"]["text_cfg"]
        if text_cfg.get("hf_tokenizer_name"):
            text_cfg["hf_tokenizer_name"] = _tokenizer_folder(model_id, cache_dir)
    return config


def check_plain_repo(model_name: str) -> None:
    """Raise ConfigRefused if a `local-dir:` or `hf-hub:` model is no PCME++ model and its config names code or a repo
    of anyone's choice. PCME++ configs are checked wherever they are read."""
    schema, identifier = factory.parse_model_name(model_name)
    if schema == "local-dir":
        config = read_json(Path(identifier) / CONFIG_FILE)
    elif schema == "hf-hub":
        try:
            config = factory._get_hf_config(identifier)
        except ConfigRefused:
            raise
        except Exception as error:
            raise ValueError(f"The config of {model_name} cannot be read: {_line(error)}.") from None
    else:
        return
    if config is not None and not is_pcmepp_config(config):
        check_plain_config(config, model_name)


def get_weights(stock: Callable, model_id: str, filename: str | None = None, **kwargs: Any) -> str:
    """Download a file of a repo, or its weights where no file is named; from a PCME++ repo only safetensors."""
    if Path(model_id).is_absolute():
        return str(Path(model_id) / (filename or "model.safetensors"))
    repo_id, _, revision = model_id.partition("@")
    if revision:
        kwargs["revision"] = revision
    if filename is not None:
        return stock(repo_id, filename=filename, **kwargs)
    if model_id not in _ours:  # `create_model` has asked for the config just before
        with contextlib.suppress(Exception):
            factory._get_hf_config(model_id, cache_dir=kwargs.get("cache_dir"))
    return _our_weights(repo_id, **kwargs) if _ours.get(model_id) else stock(repo_id, **kwargs)


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


def file_beside(model_name: str, name: str) -> Path | None:
    """Return the file of that name next to the weights of a `local-dir:` or `hf-hub:` model; None if there is none, and
    for other models. Without a network only the cache is searched, and a warning is logged if the file is not there."""
    schema, identifier = factory.parse_model_name(model_name)
    if schema not in ("local-dir", "hf-hub"):
        return None
    if schema == "local-dir" or Path(identifier).is_absolute():
        path = Path(identifier) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    repo_id, _, revision = identifier.partition("@")
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision or None))
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the Hub did answer, and the file may be there
            raise ValueError(f"{name} of {model_name} cannot be fetched: {_line(error.__cause__)}.") from None
        logging.warning("%s: whether it has a %s is not known, since the Hub cannot be reached.", model_name, name)
        return None
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise ValueError(f"{name} of {model_name} cannot be fetched: {_line(error)}.") from None


def _our_weights(repo_id: str, **kwargs: Any) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    reason = "the repo holds no weights in safetensors; others are not loaded"
    for name in WEIGHTS_FILES:
        try:
            return hf_hub_download(repo_id, name, **kwargs)
        except LocalEntryNotFoundError as error:  # the next name may be in the cache
            reason = f"it is not in the cache, and the Hub did not give it: {_line(error.__cause__ or error)}"
        except EntryNotFoundError:
            continue
        except Exception as error:
            reason = _line(error)
            break
    return _missing(f"hf-hub:{repo_id}", reason)


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
# with the head's depth as `unc_layers` in each tower's block. Their keys are those of the authors' class:
RELEASED_KEYS = ("embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "cast_dtype", "output_dict")
RELEASED_TOWERS = {
    "vision_cfg": {
        "used": [
            "layers",
            "width",
            "head_width",
            "mlp_ratio",
            "patch_size",
            "image_size",
            "ls_init_value",
            "patch_dropout",
        ],
        "must be off": [
            "input_patchnorm",
            "global_average_pool",
            "attentional_pool",
            "output_tokens",
            "timm_model_name",
        ],
        "without effect": [
            *("n_queries", "attn_pooler_heads", "timm_model_pretrained", "timm_pool"),
            *("timm_proj", "timm_proj_bias", "timm_drop", "timm_drop_path"),
        ],
    },
    "text_cfg": {
        "used": ["context_length", "vocab_size", "width", "heads", "layers", "ls_init_value", "hf_tokenizer_name"],
        "must be off": ["embed_cls", "output_tokens", "hf_model_name"],
        "without effect": ["pad_id", "hf_model_pretrained", "proj", "pooler_type"],
    },
}


def _fetch_released(model_id: str, cache_dir: str | None) -> dict | None:
    """Return the config of a repo of the released layout; None where the repo has another layout or is out of reach."""
    try:
        path = factory.download_pretrained_from_hf(model_id, filename="config.json", cache_dir=cache_dir)
        return _read_released(Path(path).parent)
    except ConfigRefused:
        raise
    except (FileNotFoundError, ValueError):
        return None


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
    for key, value in config.items():
        if key not in RELEASED_KEYS or (key == "cast_dtype" and value is not None):
            raise ConfigRefused(f"{path} has '{key}': {json.dumps(value)[:40]}, which is not supported.")
    if not isinstance(config.get("quick_gelu", False), bool):
        raise ConfigRefused(f"{path}: quick_gelu must be true or false, not {json.dumps(config['quick_gelu'])[:40]}.")
    model_cfg["quick_gelu"] = config.get("quick_gelu", False)
    for tower in RELEASED_TOWERS:
        model_cfg[tower] = _released_tower(config[tower], tower, path)
    model_cfg["pcmepp_cfg"] = {"head_layers": layers.pop(), "init_logvar_bias": None}
    logging.info("%s: released PCME++ layout, read as an open_clip config", folder)
    return {"model_cfg": model_cfg, "preprocess_cfg": {}}


def _released_tower(block: dict, tower: str, path: Path) -> dict:
    keys = RELEASED_TOWERS[tower]
    for key, value in block.items():
        off = key in keys["must be off"] and not value
        if not (off or key == "unc_layers" or key in keys["used"] or key in keys["without effect"]):
            raise ConfigRefused(f"{path} has {tower}.{key}: {json.dumps(value)[:40]}, which is not supported.")
    return {key: block[key] for key in keys["used"] if key in block}
