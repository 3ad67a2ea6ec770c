"""A model by its name, with its preprocessing and tokenizer, for everything that only runs it."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

from ..ambiguity import Bank, Calibration, store
from ..host import never_ask, repos
from ..host.data import bounded
from ..models.fingerprint import bank_fingerprint, model_fingerprint
from ..models.pcmepp import ProbabilisticModel
from ..system.text import did_you_mean
from .encode import cosine_scale
from .recorded import recorded_changes


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode.

    Arguments:
        preprocess: an image of Pillow's to pixels [3, height, width].
        tokenizer: texts to token ids.
        probabilistic: whether the model's log-variances mean anything; False for plain models and for a log-variance
            branch that is untrained.
    """

    model: Any
    preprocess: Any
    tokenizer: Any
    probabilistic: bool
    device: str

    @functools.cached_property
    def bank_fingerprint(self) -> str:
        return bank_fingerprint(self.model, self.tokenizer)

    @functools.cached_property
    def model_fingerprint(self) -> str:
        return model_fingerprint(self.model, self.tokenizer)

    def load_bank(self, path: Path) -> Bank:
        """The bank of a file or folder; ValueError for one that is damaged, or of another model."""
        scale, embed_dim = cosine_scale(self.model), self.model.built_from["embed_dim"]
        return store.load_bank(path, self.bank_fingerprint, scale, embed_dim)

    def source_of(self, bank: Bank | None) -> str:
        """What a calibration that is fitted with this model, and with the bank or else the variances, holds for."""
        return store.source_of(self.model_fingerprint if bank is None else self.bank_fingerprint, bank)

    def check_calibration(self, calibration: Calibration, bank: Bank | None, where: str) -> None:
        """ValueError where a calibration was fitted with another model or bank, or with what there is none of.

        Arguments:
            bank: the one to be used with it, if there is one.
            where: the calibration's file or model, for the message.
        """
        if calibration.estimator == "variance" and not self.probabilistic:
            raise ValueError(
                f"The calibration of {where} was fitted with variances, which the model does not have: fit one by "
                "`pcmepp calibrate`."
            )
        if calibration.estimator != "bank":
            return store.check_calibration(calibration, self.model_fingerprint, None, where)
        if bank is None:
            raise ValueError(
                f"The calibration of {where} was fitted with a bank, and there is none: give it by --bank."
            )
        store.check_calibration(calibration, self.bank_fingerprint, bank, where)


def has_random_weights(name: str, pretrained: str | None) -> bool:
    """Whether nothing gives a model its weights: `local-dir:` and `hf-hub:` models bring theirs along."""
    return not pretrained and ":" not in name


def check_name(name: str) -> None:
    """ValueError, with the names that resemble it, for the name of a model that open_clip does not know."""
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
    """The model that `open_clip.create_model(name, pretrained)` builds, as the run trained it that wrote `pretrained`.

    Arguments:
        name: a name in `open_clip.list_models()`, hf-hub:ORG/NAME or local-dir:PATH.
        pretrained: a tag of open_clip or a checkpoint file.
        device: by default cuda where there is one, that of the local rank, and else cpu.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = device or (f"cuda:{local}" if torch.cuda.is_available() else "cpu")
    never_ask()
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
    except (RuntimeError, OSError, AssertionError) as error:  # open_clip's kinds for a wrong name, tag or file
        reason = " ".join(str(error).split())
        if "loading state_dict" in reason or isinstance(error, AssertionError):
            reason = f"--pretrained {pretrained} does not fit {name}: it is of another architecture."
        if "Required pretrained weights" in reason:
            reason = f"{name} has no weights that can be loaded: put them beside its config."
        raise ValueError(reason) from error
    probabilistic = isinstance(model, ProbabilisticModel) and not model.fresh_logvar
    return LoadedModel(model.eval(), bounded(preprocess), tokenizer, probabilistic, device)
