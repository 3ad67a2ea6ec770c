"""Checkpoint files that survive: written whole or not at all, verified when read, pruned to never less than one.

A file is `epoch_E.pt` at the end of epoch E and `epoch_E_batch_B.pt` within it: E epochs are complete and B batches
of the next one. It holds tensors and plain types only.

Its last bytes are a digest of all the others, see `system.digest`.
"""

import contextlib
import functools
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..system.digest import Damaged, damage, is_sealed, seal, verified

NAME = re.compile(r"epoch_(\d+)(?:_batch_(\d+))?\.pt")
RETRY_PAUSE_S = 5.0  # seconds between two tries to save the last state of a run


def file_name(epochs: int, batches: int = 0) -> str:
    return f"epoch_{epochs}_batch_{batches}.pt" if batches else f"epoch_{epochs}.pt"


def position(path: Path) -> tuple[int, int] | None:
    """Return (complete epochs, batches of the next one) by a checkpoint's name, or None for any other file."""
    match = NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def save(checkpoint: dict, path: Path) -> bool:
    """Write a checkpoint: to a temporary file next to it, flushed to disk, renamed. Return whether that worked.

    A failure, such as a full disk, costs only this file: it is logged, and the run continues.
    """
    return _write(checkpoint, path) and _settle(path)


class Saver:
    """Saves checkpoints one after the other, and holds a run up no longer than a plain `torch.save` does.

    The run waits for the writing only; a thread waits for the disk while the run continues. A file has its name only
    when it is safely there. `failed` is the last file if its saving failed, once it was waited for.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._again: Callable[[], None] = lambda: None
        self.failed: Path | None = None

    def save(self, checkpoint: dict, path: Path, then: Callable[[], None]) -> None:
        """Save a checkpoint, and call `then` in the thread once the file is there; its OSError counts as a failure to
        save."""
        self.wait()
        self.failed = path
        self._again = functools.partial(self.save, checkpoint, path, then)
        if _write(checkpoint, path):
            self._thread = threading.Thread(target=self._finish, args=(path, then), name="checkpoint")
            self._thread.start()

    @property
    def writing(self) -> bool:
        """Return whether the last checkpoint is still being saved."""
        return self._thread is not None

    def _finish(self, path: Path, then: Callable[[], None]) -> None:
        if _settle(path, then):
            self.failed = None

    def insist(self, seconds: float) -> bool:
        """Save the last checkpoint again and again, for `seconds` at most, if it failed; its tensors must not have
        changed since. Return whether it is on the disk."""
        end = time.monotonic() + seconds
        while True:
            self.wait()
            left = end - time.monotonic()
            if self.failed is None or left <= 0:
                return self.failed is None
            pause = min(RETRY_PAUSE_S, left)
            logging.error("%s is the last state of the run: trying again for %.0f s.", self.failed, left)
            time.sleep(pause)
            self._again()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _write(checkpoint: dict, path: Path) -> bool:
    try:
        torch.save(checkpoint, _temporary(path))
        return True
    except (OSError, RuntimeError) as error:  # torch wraps a failing write in a RuntimeError
        return _failed(path, error)


def _settle(path: Path, then: Callable[[], None] = lambda: None) -> bool:
    try:
        seal(_temporary(path))
        _sync(_temporary(path))
        os.replace(_temporary(path), path)
        _sync(path.parent)  # makes the rename itself durable
        then()
    except OSError as error:
        return _failed(path, error)
    return True


def _failed(path: Path, error: Exception) -> bool:
    logging.error("CHECKPOINT NOT SAVED: %s (%s). Training continues; free space or check the disk.", path, error)
    with contextlib.suppress(OSError):
        _temporary(path).unlink(missing_ok=True)
    return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint file; None if it is as it was saved, to the last bit.

    Files without a digest, of stock open_clip or of an earlier version of this package, are good if their checksums
    fit and they can be read. That is logged once.
    """
    problem = damage(path)
    if problem is not None:
        return problem
    try:
        if is_sealed(path):
            return None
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        return _reason(error)
    _log_unsealed(path)
    return None


@functools.cache
def _log_unsealed(path: Path) -> None:
    logging.info("%s was saved without a digest: it is verified by its checksums only, which do not cover all.", path)


def _reason(error: Exception) -> str:
    return f"it cannot be read ({' '.join(str(error).split())[:200] or type(error).__name__})"


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint and verify it; only tensors and plain types, so that no code of a file is ever run."""
    with verified(path):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise Damaged(path, _reason(error)) from None


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by position, temporary and other files left out."""
    return sorted(filter(position, folder.glob("epoch_*.pt")), key=lambda path: position(path) or (), reverse=True)


def newest_good(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole, and log the ones that were passed over with the reason."""
    for path in newest_first(folder):
        problem = fault(path)
        if problem is None:
            return path
        logging.warning("Skipped the checkpoint %s: %s.", path, problem)
    return None


def prune(folder: Path, keep: Path, keep_every_epoch: bool) -> None:
    """Remove what `keep`, just saved and known to be good, makes superfluous.

    Files within an epoch are always removed, those at an epoch's end unless `keep_every_epoch`. Only files older than
    `keep` are ever removed, so that one good checkpoint remains whatever happens.
    """
    newest = position(keep)
    assert newest is not None and keep.exists()
    for path in newest_first(folder):
        where = position(path)
        if where is not None and where < newest and (where[1] or not keep_every_epoch):
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(".*.pt.*.tmp"):  # the temporary files of processes that were killed while they saved
        if path.suffixes[-2] != f".{os.getpid()}":
            with contextlib.suppress(OSError):
                path.unlink()
