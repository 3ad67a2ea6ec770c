"""The weights that a run keeps beside its checkpoints: the best of its validations, and an average of its epochs.

`best.pt` is replaced only by a better one. `swa.pt` is from stochastic weight averaging (Izmailov et al. 2018), the
mean of the weights after each of the last epochs. It covers all that a model saves: both towers, a, b and the
statistics of batch norms, which are averaged like weights; counters are those of the last epoch. It is kept in fp32 on
the CPU of the rank that saves, and in every checkpoint.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

from ..evaluation.retrieval import KS, SAMPLES
from ..runs import checkpoints

BEST, AVERAGE = "best.pt", "swa.pt"
RSUM, MEASURED = "rsum", "measured"  # the entries of the best: the value, and the data and distance behind it


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
        self.path, self.distance = folder / BEST, distance
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


class WeightAverage:
    """The average of a run's weights.

    Arguments:
        start: index of the first epoch after which the weights are averaged.
    """

    def __init__(self, start: int):
        self.start, self.snapshots = start, 0
        self.tensors: dict[str, Tensor] = {}
        self._mean = get_swa_avg_fn()

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """Take the weights of a model into the average."""
        for name, tensor in model.state_dict().items():
            now = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
            averaged = self.tensors.get(name)
            is_mean = averaged is not None and now.is_floating_point()
            self.tensors[name] = self._mean(averaged, now, self.snapshots) if is_mean else now
        self.snapshots += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"start": self.start, "snapshots": self.snapshots, "tensors": dict(self.tensors)}

    def load_state_dict(self, saved: dict[str, Any] | None, epochs: int) -> None:
        """Continue from the entry of a checkpoint after `epochs` epochs; ValueError if epochs are missing in it."""
        expected = max(0, epochs - self.start)
        if not expected:
            return  # the first snapshot is yet to come
        if saved is None or (saved["start"], saved["snapshots"]) != (self.start, expected):
            first = "no average" if saved is None else f"an average that starts with epoch {saved['start']}"
            raise ValueError(
                f"--swa-start-epoch {self.start}: the checkpoint to resume has {first} and {epochs} complete epochs; "
                f"give the --swa-start-epoch of that run, or one of at least {epochs}."
            )
        self.snapshots, self.tensors = saved["snapshots"], dict(saved["tensors"])

    def averaged(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averaged weights in the dtypes of a model."""
        return {name: self.tensors[name].to(tensor.dtype) for name, tensor in model.state_dict().items()}

    @contextlib.contextmanager
    def loaded(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights while the context lasts."""
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        copy_into(model, self.averaged(model))
        try:
            yield
        finally:
            copy_into(model, before)


@torch.no_grad()
def copy_into(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into the state of a model in place, so that wrappers of the model see them."""
    for name, tensor in model.state_dict().items():
        tensor.copy_(tensors[name])
