"""Writing the checkpoints of a run: their content, and the steps after one is on disk."""

import contextlib
import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from ..models.lora import lora_state_dict, stock_state_dict
from ..runs import checkpoints
from ..runs.lock import FolderInUse, FolderLock
from ..system.errors import RunFailed
from .config import RunConfig
from .monitor import last_checkpoint
from .push import Pusher


class NotSaved(RunFailed):
    """The last state of a run is not on disk."""


class CheckpointWriter:
    """Writes checkpoints on the rank that saves, and hands them to the pusher.

    Arguments:
        lock: the lock of the run folder, None if this rank holds none.
    """

    def __init__(self, settings: RunConfig, pusher: Pusher, lock: FolderLock | None):
        self.settings, self.pusher, self.lock = settings, pusher, lock
        self.saver = checkpoints.Saver()
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
        self.saver.save(checkpoint, path, functools.partial(self._saved, path, step, samples, validated))
        return self.saver.writing

    def _saved(self, path: Path, step: int, samples_seen: int, validated: bool) -> None:
        """Link `epoch_latest.pt`, offer the file to the Hub and delete outdated ones, once a checkpoint is on disk."""
        logging.info("Saved %s, %d samples seen.", path, samples_seen)
        if self.settings.save_most_recent:
            latest = path.with_name("epoch_latest.pt")
            with contextlib.suppress(FileNotFoundError):
                latest.unlink()
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
        if self.saver.insist(60 * self.settings.save_retry_minutes):
            return None
        return (
            f"The last state of the run could not be saved to {self.saver.failed}, see above. "
            f"{last_checkpoint(self.settings.checkpoints)} Free some space, then start again with --resume latest."
        )


def weights_of(
    state_dict: dict[str, Any], name: str, epochs: int, training: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a checkpoint of weights alone, which is not to be resumed."""
    return {"epoch": epochs, "name": name, "state_dict": state_dict, "training": training, "about": metadata}


def checkpoint_of(
    model: Any, optimizer: Any, scaler: Any, name: str, epochs: int, training: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a checkpoint: the entries of stock open_clip, `training` and `about`.

    For a model with LoRA, `state_dict` has the low-rank changes merged into the weights, and `lora` holds the parts
    that a resumed run needs.
    """
    checkpoint = weights_of(stock_state_dict(model), name, epochs, training, metadata)
    checkpoint["optimizer"] = optimizer.state_dict()
    if lora := lora_state_dict(model):
        checkpoint["lora"] = lora
    if scaler is not None:
        checkpoint["scaler"] = scaler.state_dict()
    return checkpoint
