"""What the flags of a training run changed in its model, as its checkpoints record it."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch

from ..host import config_check, repos
from ..runs import record


def recorded_changes(model: str, pretrained: str | None) -> dict[str, Any]:
    """Arguments of `create_model` that build `model` as the run trained it that wrote the file `pretrained`, such as a
    forced image size and the settings of PCME++; {} for a file of another kind or of a run of another model."""
    if pretrained is None or not pretrained.endswith(".pt") or not Path(pretrained).is_file():
        return {}
    try:
        checkpoint = torch.load(pretrained, map_location="cpu", weights_only=True, mmap=True)
        about = record.checked(checkpoint.get("about"))
    except Exception:  # loading its weights tells why it cannot be read
        return {}
    config, named = json.loads(json.dumps(about.get("config"))), open_clip.get_model_config(model)  # without tuples
    if named is None or about.get("hyperparameters", {}).get("model") != model or not repos.is_ours(config):
        return {}
    config_check.check_config(config, pretrained)
    trained = config["model_cfg"]
    changes: dict[str, Any] = {"pcmepp_cfg": trained["pcmepp_cfg"]}
    if trained["vision_cfg"].get("image_size") != named["vision_cfg"].get("image_size"):
        changes["force_image_size"] = trained["vision_cfg"]["image_size"]
    if trained["text_cfg"].get("context_length") != named["text_cfg"].get("context_length"):
        changes["force_context_length"] = trained["text_cfg"].get("context_length")
    for key in ("quick_gelu", "custom_text"):
        if trained.get(key) and not named.get(key):
            changes[f"force_{key}"] = True
    return changes
