"""The state that a run takes from the checkpoint that it is resumed from, and its position in the epoch."""

import logging
import math
from pathlib import Path
from typing import Any

import fsspec
import torch

from ..host.published import AT_START
from ..host.weights import plain_names
from ..models.lora import whole_state_dict
from ..runs import checkpoints, record
from ..system.flags import FIXED
from .config import RunConfig, recorded
from .global_batch import words
from .steps import EpochStart
from .validation import lacks_validation


def restore_lora(path: str, checkpoint: dict, expected: bool) -> None:
    """Turn `state_dict` of a checkpoint into that of a model with LoRA, if the checkpoint is from such a run.

    Arguments:
        expected: whether the resumed run has --lora; ValueError if the run of the checkpoint differs in that.
    """
    lora = checkpoint.pop("lora", None)
    if expected != (lora is not None):
        was, now = ("without", "with") if expected else ("with", "without")
        raise ValueError(
            f"--resume {path} was saved {was} --lora and cannot be resumed {now} it: start a new run from its "
            "weights by --pretrained."
        )
    if lora is not None:
        checkpoint["state_dict"] = whole_state_dict(checkpoint["state_dict"], lora)


def load_checkpoint(
    path: str, settings: RunConfig, hyperparameters: dict[str, Any]
) -> tuple[dict[str, Any], "ResumedRun | None"]:
    """Return the content of a checkpoint and what a run takes from it, or the weights of a file of weights and None.

    Checkpoints of stock open_clip work as well, and those that fsspec reads.
    """
    if Path(path).is_file():
        checkpoint = checkpoints.load(Path(path))
    else:
        with fsspec.open(path, "rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    resumed = None
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
        resumed = ResumedRun(Path(path), checkpoint, settings, hyperparameters)
        if "optimizer" not in checkpoint and settings.trains:
            raise ValueError(f"--resume {path} holds weights alone, which cannot be resumed: use --pretrained.")
    restore_lora(path, checkpoint, expected="lora" in hyperparameters)
    return (plain_names(checkpoint) if resumed is None else checkpoint), resumed


class ResumedRun:
    """The checkpoint that a run is resumed from.

    Arguments:
        checkpoint: its content; checkpoints of stock open_clip lack the entries `training` and `about`.
        hyperparameters: the hyperparameters of the resumed run.
    """

    def __init__(self, path: Path, checkpoint: dict, settings: RunConfig, hyperparameters: dict[str, Any]):
        self.path, self.settings, self.hyperparameters = path, settings, hyperparameters
        self.training: dict[str, Any] | None = checkpoint.get("training")
        self.metadata: dict[str, Any] = checkpoint.get("about") or {}
        self.before: dict[str, Any] = self.metadata.get("hyperparameters") or {}
        record.check_fixed(hyperparameters, self.before, recorded(FIXED))
        self.samples_seen: int = (self.training or {}).get("samples_seen", 0)
        self.own = path.absolute().parent == settings.checkpoints.absolute()  # whether it is from the same run folder
        self.entered = False

    def is_unvalidated(self, epochs: int) -> bool:
        """Return whether it is from the end of an epoch of this run folder whose validation was interrupted."""
        settings = self.settings
        if settings.rank != 0 or not (self.own and settings.validates and settings.trains):
            return False
        if checkpoints.position(self.path) != (epochs, 0):
            return False
        return lacks_validation(settings, epochs)

    def enter_epoch(self, train: Any, epoch: int) -> EpochStart:
        """Return where the first epoch of the resumed run starts, so that it has the samples that were left."""
        if not self.training or self.entered:
            return EpochStart()
        self.entered = True
        settings, batches = self.settings, train.dataloader.num_batches
        self._note_changes(self.training["step"])
        self._note_global_batch(ranks_before=len(self.training["rng"]))
        seen, accum = self.training["samples_in_epoch"], settings.accum_freq
        first = min(seen // settings.samples_per_batch // accum * accum, batches)
        outdated: list[Path] = []
        if seen:
            at, how = (
                (first, "with new draws") if settings.dataset_resampled else self._resume_data(train, epoch, first)
            )
            if at is None:
                twice = (train.dataloader.num_samples - seen) * seen // train.dataloader.num_samples
                logging.warning(
                    "Resuming within the epoch at batch %d of %d, but not with the remaining samples, since %s: "
                    "about %d samples of this epoch are seen twice, and as many are not seen.",
                    *(first, batches, how, max(0, twice)),
                )
            else:
                first = at
                logging.info("Resuming within the epoch at batch %d of %d, %s.", first, batches, how)
            outdated = self._outdated(first)
        if len(self.training["rng"]) != settings.world_size:
            logging.info(
                "Resuming on %d ranks a run of %d: samples seen are carried over, random numbers start anew.",
                settings.world_size,
                len(self.training["rng"]),
            )
        return EpochStart(first, seen, outdated, self.training)

    def _note_changes(self, step: int) -> None:
        """Log which hyperparameters have changed, and keep them for the record."""
        changed = record.changes(self.hyperparameters, self.before)
        for verb, names in (
            ("have changed", changed.keys() - set(AT_START)),
            ("have no effect, since the weights are those of the checkpoint", changed.keys() & set(AT_START)),
        ):
            values = ", ".join(f"{name} {changed[name][1]} (was {changed[name][0]})" for name in sorted(names))
            if values:
                logging.warning("Resuming at step %d, these %s: %s.", step, verb, values)
        kept = {name: pair for name, pair in changed.items() if name not in AT_START}
        if kept:
            self.metadata["changes"] = [*(self.metadata.get("changes") or []), {"step": step, **kept}]

    def _note_global_batch(self, ranks_before: int) -> None:
        """Log whether the steps of a run on another number of ranks have as many samples as before."""
        settings, ranks = self.settings, self.settings.world_size
        if settings.rank != 0 or ranks == ranks_before or not self.before:
            return
        before = self.before.get("batch_size", 0), ranks_before, self.before.get("accum_freq", 1)
        now = words(settings.batch_size, ranks, settings.accum_freq)
        if settings.samples_per_step == math.prod(before):
            logging.info("The global batch is kept on %d ranks instead of %d: %s.", ranks, ranks_before, now)
        else:
            logging.warning(
                "On %d ranks instead of %d the global batch is %s, and was %s: give --global-batch-size %d to keep it.",
                *(ranks, ranks_before, now, words(*before), math.prod(before)),
            )

    def _outdated(self, first: int) -> list[Path]:
        """Return the files of the epoch whose names may sort after new ones, since batches have another size now."""
        newest = checkpoints.position(self.path)
        if newest is None or newest[1] == first or not self.own:
            return []
        positions = [
            (checkpoints.position(path) or (0, 0), path) for path in checkpoints.newest_first(self.path.parent)
        ]
        return [path for where, path in positions if (newest[0], 0) < where <= newest]

    def _resume_data(self, train: Any, epoch: int, first: int) -> tuple[int | None, str]:
        """Return the batch after which exactly the samples that were left follow, or None, and how or why not."""
        assert self.training is not None
        settings, state = self.settings, self.training.get("data")
        if state is not None and hasattr(train, "position"):
            return train.dataloader.resume(epoch, state, settings.accum_freq)
        # The data have no position, or the checkpoint was saved by an earlier version.
        now = {
            "seed": (settings.seed, "--seed"),
            "batch_size": (settings.batch_size, "--batch-size"),
            "world_size": (settings.world_size, "the number of ranks"),
        }
        before = {**self.before, "world_size": len(self.training["rng"])}
        changed = [flag for name, (value, flag) in now.items() if before.get(name, value) != value]
        if changed:
            return None, f"{' and '.join(changed)} changed"
        return first, "with the samples that were left"
