"""Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights after each of the last epochs.

It covers all that a model saves: both towers, a, b and the statistics of batch norms, which are averaged like weights;
counters are those of the last epoch. It is kept in fp32 on the CPU of the rank that saves, and in every checkpoint.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

FILE = "swa.pt"


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

    def restore(self, saved: dict[str, Any] | None, epochs: int) -> None:
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
