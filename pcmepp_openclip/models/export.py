"""The content of a Hub repo as a local folder: the layout that open_clip reads by `hf-hub:` and `local-dir:`.

open_clip_model.safetensors    the weights and nothing else
open_clip_config.json          {"model_cfg": with its pcmepp_cfg, "preprocess_cfg"}
tokenizer files                if the model has its own, not CLIP's
README.md, *.png               the model card

export_model(model, Path("exported"), "PCMEpp-ViT-B-16")
open_clip.create_model("local-dir:exported")
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import open_clip
from torch import Tensor, nn

from ..host.repos import CONFIG_FILE, WEIGHTS_FILE
from ..host.tokenizers import OWN_TOKENIZER
from ..host.towers.config import config_as_built
from ..system import files
from .lora import stock_state_dict
from .pcmepp import ProbabilisticModel

CARD = "README.md"


def export_model(
    model: nn.Module, folder: Path, config: str | dict, card: str | None = None, tokenizer: Any = None
) -> Path:
    """Write `model` to a folder that `open_clip.create_model("local-dir:FOLDER")` reads.

    Arguments:
        config: the name of the model, such as PCMEpp-ViT-B-16, or its config (`embed_dim`, `vision_cfg`, ...).
        card: the text of README.md.
        tokenizer: the model's own, if it is not CLIP's: an `open_clip.tokenizer.HFTokenizer`.
    """
    return write_folder(folder, stock_state_dict(model), model_config_of(model, config), card, tokenizer)


def model_config_of(model: nn.Module, config: str | dict) -> dict:
    """Return the content of `open_clip_config.json` for a model that was built from `config` and flags."""
    model_config = open_clip.get_model_config(config) if isinstance(config, str) else config
    if model_config is None:
        raise ValueError(f"There is no model config '{config}': see open_clip.list_models().")
    model_cfg = json.loads(json.dumps(model_config))
    if isinstance(model, ProbabilisticModel):
        model_cfg["pcmepp_cfg"] = model.pcmepp_cfg.as_json()
    return config_as_built(model, model_cfg)


def write_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: dict, card: str | None = None, tokenizer: Any = None
) -> Path:
    """Write the folder from its parts, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = OWN_TOKENIZER  # this folder, not the origin
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    files.save_tensors(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")
    return folder
