"""What a training run has recorded: in a checkpoint what its flags changed in the model, and beside it its history."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch

from ..host import config_check, repos
from ..runs import record


def recorded_history(pretrained: str | None) -> list[dict[str, float]]:
    """The lines of history.jsonl up to the checkpoint `pretrained` of a run, see `record`; [] for anything else."""
    checkpoint = _checkpoint(pretrained)
    training = checkpoint.get("training")
    samples = record.count(training.get("samples_seen")) if isinstance(training, dict) else None
    if pretrained is None or samples is None:
        return []
    lines = record.read_lines(Path(pretrained).parent / record.HISTORY, "samples", samples)
    return [numbers for line in lines if "samples" in (numbers := record.numbers(line))]


def other_noise(pretrained: str | None, ratio: float, seed: int) -> str | None:
    """A sentence if the run that wrote the checkpoint `pretrained` had another --noise-ratio or --noise-seed."""
    about = record.checked(_checkpoint(pretrained).get("about"))
    if not about:
        return None
    trained = record.numbers(about["hyperparameters"])
    trained_ratio, trained_seed = trained.get("noise_ratio", 0), trained.get("noise_seed", 0)
    if (trained_ratio, trained_seed) == (ratio, seed):
        return None
    had = f"--noise-ratio {trained_ratio:g} --noise-seed {trained_seed:g}" if trained_ratio else "no --noise-ratio"
    return (
        f"The checkpoint was trained with {had}, not with --noise-ratio {ratio:g} --noise-seed {seed}: the wrong pairs "
        "of --noisy-pairs are not those of its training."
    )


def _checkpoint(pretrained: str | None) -> dict[str, Any]:
    """The content of a checkpoint of a run, {} for a file of another kind."""
    if pretrained is None or not pretrained.endswith(".pt") or not Path(pretrained).is_file():
        return {}
    try:
        found = torch.load(pretrained, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # loading its weights tells why it cannot be read
        return {}
    return found if isinstance(found, dict) else {}


def recorded_changes(model: str, pretrained: str | None) -> dict[str, Any]:
    """Arguments of `create_model_and_transforms` that build `model` as the run trained it that wrote the file
    `pretrained`, such as its preprocessing and the settings of PCME++; {} for a file of another kind or of a run of
    another model."""
    about = record.checked(_checkpoint(pretrained).get("about"))
    if pretrained is None or not about:
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
    for key in ("mean", "std", "interpolation", "resize_mode"):
        if key in config["preprocess_cfg"]:
            changes[f"image_{key}"] = config["preprocess_cfg"][key]
    for key in ("quick_gelu", "custom_text"):
        if trained.get(key) and not named.get(key):
            changes[f"force_{key}"] = True
    return changes
