"""The checkpoints of a run: their content, the steps after one is on disk, and the state that a run takes from one."""

import functools
import logging
import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import torch

from ..host.parallel import load_optimizer
from ..host.published import AT_START
from ..host.weights import plain_names
from ..models.lora import lora_state_dict, whole_state_dict
from ..runs import checkpoints, record
from ..runs.lock import FolderInUse, FolderLock
from ..system.errors import RunFailed
from ..system.flags import FIXED
from .config import RunConfig, recorded
from .global_batch import words
from .monitor import last_checkpoint
from .push import Pusher
from .recipe import Recipe


class NotSaved(RunFailed):
    """The last state of a run is not on disk."""


def trained_state(model: Any, optimizer: Any, scaler: Any) -> dict[str, Any]:
    """Return the entries of a checkpoint that weights alone lack: the states of the optimizer and of the scaler, and
    `lora`. The `state_dict` of a model with LoRA has the low-rank changes merged into the weights."""
    lora = lora_state_dict(model)
    scaling = {} if scaler is None else {"scaler": scaler.state_dict()}
    return {"optimizer": optimizer.state_dict(), **({"lora": lora} if lora else {}), **scaling}


class CheckpointWriter(checkpoints.Saver):
    """Writes checkpoints on the rank that saves, and hands them to the pusher.

    Arguments:
        lock: the lock of the run folder, None if this rank holds none.
    """

    def __init__(self, settings: RunConfig, pusher: Pusher, lock: FolderLock | None):
        super().__init__()
        self.settings, self.pusher, self.lock = settings, pusher, lock
        self.outdated: list[Path] = []  # files to delete once there is a newer one

    def write(self, checkpoint: dict, batches: int, validated: bool) -> bool:
        """Write a checkpoint after `batches` batches of an epoch, and return False if that has failed already.

        Arguments:
            validated: whether a validation follows, whose metrics belong on the model card.
        """
        if self.lock is not None and self.lock.lost:
            raise FolderInUse(f"{self.lock.folder} was taken over by another run ({self.lock.lost}): this one ends.")
        path = self.settings.checkpoints / checkpoints.file_name(checkpoint["epoch"], batches)
        step, samples = checkpoint["training"]["step"], checkpoint["training"]["samples_seen"]
        self.save(checkpoint, path, functools.partial(self._saved, path, step, samples, validated))
        return self.writing

    def _saved(self, path: Path, step: int, samples_seen: int, validated: bool) -> None:
        """Link `epoch_latest.pt`, offer the file to the Hub and delete outdated ones, once a checkpoint is on disk."""
        logging.info("Saved %s, %d samples seen.", path, samples_seen)
        if self.settings.save_most_recent:
            latest = path.with_name("epoch_latest.pt")
            latest.unlink(missing_ok=True)
            try:
                os.link(path, latest)
            except OSError:  # the file system has no links
                shutil.copyfile(path, latest)
        problem = checkpoints.fault(path)
        if problem is not None:
            raise OSError(f"it was written, but cannot be read back: {problem}")
        self.pusher.offer(path, step, hold=validated)
        for outdated in self.outdated:
            if outdated != path:
                outdated.unlink(missing_ok=True)
        checkpoints.prune(
            self.settings.checkpoints, path, keep_every_epoch=not self.settings.delete_previous_checkpoint
        )

    def last_problem(self) -> str | None:
        """Return why the last checkpoint is not on disk, after further attempts; None if it is."""
        if self.insist(60 * self.settings.save_retry_minutes):
            return None
        return (
            f"The last state of the run could not be saved to {self.failed}, see above. "
            f"{last_checkpoint(self.settings.checkpoints)} Free some space, then start again with --resume latest."
        )


@dataclass(frozen=True)
class EpochStart:
    """The position at which an epoch starts.

    Arguments:
        batch: the index of the first batch.
        samples_before: the number of samples of the epoch that were seen before.
        outdated: checkpoints of this epoch whose names count batches of another size. They are deleted once there is a
            newer one, or the next restart would take them for the newest.
        states: the states of this rank's random number generators by their name in the checkpoint.
    """

    batch: int = 0
    samples_before: int = 0
    outdated: list[Path] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)


class ResumedRun:
    """The checkpoint that a run is resumed from. Checkpoints of stock open_clip, which lack the entries `training` and
    `about`, files of weights, and what fsspec reads work as well.

    Arguments:
        path: its path, which is read and verified at once.
        hyperparameters: the hyperparameters of the resumed run.
    """

    def __init__(self, path: str, settings: RunConfig, hyperparameters: dict[str, Any]):
        self.path, self.settings, self.hyperparameters = Path(path), settings, hyperparameters
        if self.path.is_file():
            checkpoint = checkpoints.load(self.path)
        else:
            with fsspec.open(path, "rb") as file:
                checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        lora, has_lora = checkpoint.pop("lora", None), "lora" in hyperparameters
        self.of_weights = "state_dict" not in checkpoint
        if self.of_weights:
            checkpoint = {"state_dict": checkpoint}
        self.training: dict[str, Any] = checkpoint.get("training") or {}
        self.metadata: dict[str, Any] = checkpoint.get("about") or {}
        self.before: dict[str, Any] = self.metadata.get("hyperparameters") or {}
        if hyperparameters != self.before:
            record.check_fixed(hyperparameters, self.before, recorded(FIXED))
        if not self.of_weights and "optimizer" not in checkpoint and settings.trains:
            raise ValueError(f"--resume {path} holds weights alone, which cannot be resumed: use --pretrained.")
        if has_lora != (lora is not None):
            was, now = ("without", "with") if has_lora else ("with", "without")
            raise ValueError(
                f"--resume {path} was saved {was} --lora and cannot be resumed {now} it: start a new run from its "
                "weights by --pretrained."
            )
        checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
        if lora is not None:
            checkpoint["state_dict"] = whole_state_dict(checkpoint["state_dict"], lora)
        self.epoch: int = checkpoint.get("epoch", 0)
        # Whether it is from the same run folder.
        self.own = not self.of_weights and self.path.absolute().parent == settings.checkpoints.absolute()
        self.entered = False
        self._checkpoint = checkpoint

    def restore(self, model: Any, optimizer: Any, scaler: Any, recipe: Recipe) -> None:
        """Restore the state of all parts of a run, and let go of the content of the file."""
        checkpoint, self._checkpoint = self._checkpoint, {}
        if not self.of_weights:
            recipe.load_state_dict(checkpoint.get("swa"), self.epoch)
        model.load_state_dict(checkpoint["state_dict"])
        if self.of_weights:
            return
        if optimizer is not None:
            load_optimizer(optimizer, checkpoint["optimizer"])
        if scaler is not None and "scaler" in checkpoint:
            scaler.load_state_dict(checkpoint["scaler"])
        logging.info("=> resuming checkpoint '%s' (epoch %d)", self.path, self.epoch)

    def is_unvalidated(self, epochs: int) -> bool:
        """Return whether it is from the end of an epoch of this run folder whose validation was interrupted."""
        settings = self.settings
        if settings.rank != 0 or not (self.own and settings.validates and settings.trains):
            return False
        if checkpoints.position(self.path) != (epochs, 0) or not epochs:
            return False
        lines = record.read_lines(settings.checkpoints / record.VALIDATED, "epoch", last=epochs)
        return not any(line["epoch"] == epochs and line.get("complete") for line in lines)

    def enter_epoch(self, train: Any, epoch: int) -> EpochStart:
        """Return where the first epoch of the resumed run starts, so that it has the samples that were left."""
        if not self.training or self.entered:
            return EpochStart()
        self.entered = True
        settings, batches, ranks_before = self.settings, train.dataloader.num_batches, len(self.training["rng"])
        if self.hyperparameters != self.before:
            self._note_changes(self.training["step"])
        if ranks_before != settings.world_size:
            self._note_ranks(ranks_before)
        saved = {name: self.training.get(name) or () for name in ("rng", "epoch_rng")}
        states = {name: each[settings.rank] for name, each in saved.items() if len(each) == settings.world_size}
        seen, accum = self.training["samples_in_epoch"], settings.accum_freq
        if not seen:
            return EpochStart(states=states)
        first = min(seen // settings.samples_per_batch // accum * accum, batches)
        at, how = (first, "with new draws") if settings.dataset_resampled else self._resume_data(train, epoch, first)
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
        newest = checkpoints.position(self.path)
        renamed = self.own and newest is not None and newest[1] != first
        return EpochStart(first, seen, self._outdated(newest) if renamed and newest else [], states)

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

    def _note_ranks(self, ranks_before: int) -> None:
        """Log that the number of ranks has changed, and whether the steps have as many samples as before."""
        settings, ranks = self.settings, self.settings.world_size
        logging.info(
            "Resuming on %d ranks a run of %d: samples seen are carried over, random numbers start anew.",
            *(ranks, ranks_before),
        )
        if settings.rank != 0 or not self.before:
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

    def _outdated(self, newest: tuple[int, int]) -> list[Path]:
        """Return the files of the epoch whose names may sort after new ones, since batches have another size now."""
        files = checkpoints.newest_first(self.path.parent)
        return [path for path in files if (newest[0], 0) < (checkpoints.position(path) or (0, 0)) <= newest]

    def _resume_data(self, train: Any, epoch: int, first: int) -> tuple[int | None, str]:
        """Return the batch after which exactly the samples that were left follow, or None, and how or why not."""
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
