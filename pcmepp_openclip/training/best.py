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
RSUM, MEASURED = "rsum", "measured"  # the entries of the file: the value, and the data and distance behind it


def rsum(metrics: Mapping[str, float], distance: str) -> float | None:
    """Return the sum of R@1, R@5 and R@10 of both directions in per cent, or None if there was no retrieval.

    Arguments:
        metrics: the metrics of a validation by open_clip's names, prefixed by the distance unless that is the cosine.
    """
    prefix = "" if distance == "cosine" else f"{distance}/"
    names = [f"{prefix}{direction}_R@{k}" for direction in SAMPLES for k in KS]
    return float(sum(100 * metrics[name] for name in names)) if names[0] in metrics else None


class BestCheckpoint:
    """The best checkpoint of a run folder. A resumed run reads its value from the file.

    A value counts only if it was measured in the same way: on the same validation data, by the same distance.

    Arguments:
        folder: the folder of checkpoints.
        distance: the distance that items are ranked by.
        data: a digest of the validation data.
    """

    def __init__(self, folder: Path, distance: str, data: str):
        self.path, self.distance = folder / FILE, distance
        self.measured = {"distance": distance, "data": data}
        self.value = -math.inf
        if self.path.exists():
            problem = checkpoints.fault(self.path) or self._take_value()
            if problem:
                logging.warning("%s is not used as the best checkpoint so far: %s.", self.path, problem)

    def _take_value(self) -> str:
        """Take the value from the file, and return "" or the reason why it does not count."""
        saved = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        value = saved.get(RSUM) if isinstance(saved, dict) else None
        if not isinstance(value, float) or math.isnan(value):
            return "it holds no RSUM"
        if saved.get(MEASURED) != self.measured:
            return f"its RSUM of {value:.2f} was measured on other validation data or by another distance"
        self.value = value
        return ""

    def is_better(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a validation is better than all before."""
        value = rsum(metrics, self.distance)
        return value is not None and value > self.value

    def save(self, metrics: Mapping[str, float], checkpoint: dict[str, Any]) -> bool:
        """Replace the file by a checkpoint of the weights that were validated, and return whether that has worked."""
        value = rsum(metrics, self.distance)
        assert value is not None
        if not checkpoints.save({**checkpoint, RSUM: value, MEASURED: self.measured}, self.path):
            return False
        self.value, epochs = value, checkpoint["epoch"]
        logging.info("Saved %s, the best validation so far: RSUM %.2f after %d epochs.", self.path, value, epochs)
        return True
