"""The checkpoint with the best validation of a run: its weights as `best.pt`, replaced only by a better one."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..evaluation.retrieval import KS, SAMPLES
from ..runs import checkpoints

FILE = "best.pt"
RSUM = "rsum"  # the entry of the file


def rsum(metrics: Mapping[str, float], distance: str) -> float | None:
    """R@1, R@5 and R@10 of both directions in per cent, added; None if there was no retrieval.

    Arguments:
        metrics: of a validation, by open_clip's names, with the distance in front where it is not the cosine.
    """
    prefix = "" if distance == "cosine" else f"{distance}/"
    names = [f"{prefix}{direction}_R@{k}" for direction in SAMPLES for k in KS]
    return float(sum(100 * metrics[name] for name in names)) if names[0] in metrics else None


class BestCheckpoint:
    """The best checkpoint of a run folder, which is also where a resumed run finds how good it is.

    Arguments:
        folder: the folder of checkpoints.
        distance: the distance that items are ranked by.
    """

    def __init__(self, folder: Path, distance: str):
        self.path, self.distance = folder / FILE, distance
        self.value = self._saved()

    def _saved(self) -> float:
        if not self.path.exists():
            return -math.inf
        problem = checkpoints.fault(self.path)
        if problem is not None:
            logging.warning("%s is not used as the best checkpoint so far: %s.", self.path, problem)
            return -math.inf
        return float(torch.load(self.path, map_location="cpu", weights_only=True, mmap=True).get(RSUM, -math.inf))

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        """Whether a validation is better than all before."""
        found = rsum(metrics, self.distance)
        return found is not None and found > self.value

    def save(self, metrics: Mapping[str, float], checkpoint: dict[str, Any]) -> bool:
        """Replace the file by a checkpoint of the weights that were validated. Whether that has worked."""
        found = rsum(metrics, self.distance)
        assert found is not None
        if not checkpoints.save({**checkpoint, RSUM: found}, self.path):
            return False
        self.value, epochs = found, checkpoint["epoch"]
        logging.info("Saved %s, the best validation so far: RSUM %.2f after %d epochs.", self.path, found, epochs)
        return True
