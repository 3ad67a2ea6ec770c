"""Load a model by its name, as it was trained, with its preprocessing and tokenizer.

A checkpoint of a run records what the flags of the run changed in the model: its preprocessing, its image size and the
settings of PCME++. The model is built with them, so that it computes what it computed in training.
"""

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

from ..host import config_check, disable_prompts, repos
from ..host.data import bounded
from ..models.fingerprint import bank_fingerprint, model_fingerprint
from ..models.pcmepp import ProbabilisticModel
from ..runs import record
from ..system.text import did_you_mean


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode.

    Arguments:
        name, pretrained: what it was loaded by.
        preprocess: an image of Pillow's to pixels [3, height, width].
        tokenizer: texts to token ids.
        probabilistic: whether the model's log-variances mean anything; False for plain models and for a log-variance
            branch that is untrained.
    """

    name: str
    pretrained: str | None
    model: Any
    preprocess: Any
    tokenizer: Any
    probabilistic: bool
    device: str

    @property
    def scale(self) -> float:
        """Return the factor by which CLIP multiplies a cosine."""
        return self.model.logit_scale.detach().exp().item()

    @functools.cached_property
    def bank_fingerprint(self) -> str:
        return bank_fingerprint(self.model, self.tokenizer)

    @functools.cached_property
    def model_fingerprint(self) -> str:
        return model_fingerprint(self.model, self.tokenizer)

    def file_beside(self, name: str) -> Path | None:
        """Return the file of that name beside the weights of a `local-dir:` or `hf-hub:` model; None where there is
        none, or where the weights are not those of the folder."""
        return None if self.pretrained else repos.file_beside(self.name, name)


def has_random_weights(name: str, pretrained: str | None) -> bool:
    """Return whether nothing gives a model its weights: `local-dir:` and `hf-hub:` models bring theirs along."""
    return not pretrained and ":" not in name


def check_name(name: str) -> None:
    """Raise a ValueError, with the names that resemble it, for a model that open_clip does not know."""
    if ":" in name:
        return
    try:
        if open_clip.get_model_config(name.replace("/", "-")) is not None:
            return
    except RuntimeError as error:  # there is no such PCME++ model
        raise ValueError(str(error)) from None
    hint = did_you_mean(name, open_clip.list_models(), "`open_clip.list_models()` lists the models.", count=3)
    raise ValueError(f"There is no model '{name}'; {hint}")


def load_model(name: str, pretrained: str | None = None, device: str | None = None) -> LoadedModel:
    """Load a model of open_clip, with the settings of the run if a run wrote the checkpoint `pretrained`.

    Arguments:
        name: a name in `open_clip.list_models()`, hf-hub:ORG/NAME or local-dir:PATH.
        pretrained: a tag of open_clip or a checkpoint file.
        device: by default cuda where there is one, that of the local rank, and else cpu.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = device or (f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    disable_prompts()
    repos.check_plain_repo(name)
    check_name(name)
    try:
        changes = recorded_changes(name, pretrained)
        model, _, preprocess = open_clip.create_model_and_transforms(
            name,
            pretrained=pretrained,
            device=device,
            output_dict=True,
            require_pretrained=not has_random_weights(name, pretrained),
            **changes,
        )
        tokenizer = open_clip.get_tokenizer(name, context_length=changes.get("force_context_length"))
    except (RuntimeError, OSError, AssertionError) as error:  # open_clip raises these for a wrong name, tag or file
        reason = " ".join(str(error).split())
        if "loading state_dict" in reason or isinstance(error, AssertionError):
            reason = f"--pretrained {pretrained} does not fit {name}: it is of another architecture."
        if "Required pretrained weights" in reason:
            reason = f"{name} has no weights that can be loaded: put them beside its config."
        raise ValueError(reason) from error
    except (TypeError, LookupError, ArithmeticError) as error:  # anyone's config may hold anything
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ValueError(f"{name} cannot be built from its config ({reason}).") from error
    probabilistic = isinstance(model, ProbabilisticModel) and not model.fresh_logvar
    return LoadedModel(name, pretrained, model.eval(), bounded(preprocess), tokenizer, probabilistic, device)


def recorded_history(pretrained: str | None) -> list[dict[str, float]]:
    """Return the lines of history.jsonl up to the checkpoint `pretrained` of a run; [] for anything else."""
    checkpoint = _checkpoint(pretrained)
    training = checkpoint.get("training")
    samples = record.count(training.get("samples_seen")) if isinstance(training, dict) else None
    if pretrained is None or samples is None:
        return []
    lines = record.read_lines(Path(pretrained).parent / record.HISTORY, "samples", samples)
    return [numbers for line in lines if "samples" in (numbers := record.numbers(line))]


def other_noise(pretrained: str | None, ratio: float, seed: int) -> str | None:
    """Return a sentence if the run that wrote the checkpoint `pretrained` had another --noise-ratio or --noise-seed."""
    metadata = record.checked(_checkpoint(pretrained).get("about"))
    if not metadata:
        return None
    trained = record.numbers(metadata["hyperparameters"])
    trained_ratio, trained_seed = trained.get("noise_ratio", 0), trained.get("noise_seed", 0)
    if (trained_ratio, trained_seed) == (ratio, seed):
        return None
    had = f"--noise-ratio {trained_ratio:g} --noise-seed {trained_seed:g}" if trained_ratio else "no --noise-ratio"
    return (
        f"The checkpoint was trained with {had}, not with --noise-ratio {ratio:g} --noise-seed {seed}: the wrong pairs "
        "of --noisy-pairs are not those of its training."
    )


def _checkpoint(pretrained: str | None) -> dict[str, Any]:
    """Return the content of a checkpoint of a run, {} for a file of another kind."""
    if pretrained is None or not pretrained.endswith(".pt") or not Path(pretrained).is_file():
        return {}
    try:
        content = torch.load(pretrained, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # loading its weights tells why it cannot be read
        return {}
    return content if isinstance(content, dict) else {}


def recorded_changes(model: str, pretrained: str | None) -> dict[str, Any]:
    """Return the arguments of `create_model_and_transforms` for the settings of the run that wrote `pretrained`, such
    as its preprocessing and the settings of PCME++; {} for a file of another kind or of a run of another model."""
    metadata = record.checked(_checkpoint(pretrained).get("about"))
    if pretrained is None or not metadata:
        return {}
    config, named = json.loads(json.dumps(metadata.get("config"))), open_clip.get_model_config(model)  # without tuples
    if named is None or metadata.get("hyperparameters", {}).get("model") != model or not repos.is_pcmepp_config(config):
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
