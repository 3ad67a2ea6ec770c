"""Checkpoints that survive against a plain `torch.save` and `torch.load`: the time that a run is held up by them.

python -m benchmarks checkpoint

The weights are `PCMEpp-ViT-B-32`'s, 650 MB. Loading is measured with the file on the disk, as when a run starts again,
and with the file in memory, where a plain load takes little longer than a copy and the checksums cannot hide.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import open_clip
import torch

import pcmepp_openclip  # noqa: F401  registers the model
from pcmepp_openclip.runs import checkpoints

from .measure import Row, timed


def forget(*paths: Path) -> None:
    """Drop files from the machine's memory."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows() -> Iterator[Row]:
    checkpoint = {"state_dict": open_clip.create_model("PCMEpp-ViT-B-32").state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "epoch_1.pt", Path(folder) / "theirs.pt"
        saver = checkpoints.Saver()

        def settle() -> None:
            """Delete the files, so that both sides write a new one to a disk that does nothing else."""
            saver.wait()
            for path in (ours, theirs):
                path.unlink(missing_ok=True)
            os.sync()

        yield timed(
            "checkpoint, time that a save blocks training",
            lambda: saver.save(checkpoint, ours, then=lambda: None),
            lambda: torch.save(checkpoint, theirs),
            1.2,
            before=settle,
            repeats=16,
        )
        settle()
        checkpoints.save(checkpoint, ours)
        torch.save(checkpoint, theirs)
        loads = (lambda: checkpoints.load(ours)), (lambda: torch.load(theirs, weights_only=True))
        yield timed("checkpoint, verified load from the disk", *loads, 1.2, 16, before=lambda: forget(ours, theirs))
        yield timed("checkpoint, verified load of a file in memory", *loads, 1.2, 12)
