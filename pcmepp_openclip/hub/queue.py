"""The checkpoints of a run that wait to be pushed: hard links in its folder, which the run does not delete.

Written by the training process, read and removed by `worker`.
"""

import contextlib
import os
import shutil
from pathlib import Path

QUEUE = "hub-queue"  # the folder of the links, in the run folder
STAGING = ".hub-"  # prefix of the folders, there too, in which a push is prepared


def add(run: Path, checkpoint: Path, step: int) -> Path:
    """A link to the checkpoint of that step.

    On a file system without links it is the checkpoint itself, which is pushed if it is still there in its turn.
    """
    link = run / QUEUE / f"{step}.pt"
    try:
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        os.link(checkpoint, link)
    except OSError:
        return checkpoint
    return link


def drop(path: Path) -> None:
    """Remove the link to a checkpoint, never the checkpoint itself."""
    if path.parent.name == QUEUE:
        with contextlib.suppress(OSError):
            path.unlink()


def clear(run: Path) -> None:
    """Remove all links and all that was being prepared."""
    for place in (run / QUEUE, *run.glob(f"{STAGING}*")):
        shutil.rmtree(place, ignore_errors=True)
