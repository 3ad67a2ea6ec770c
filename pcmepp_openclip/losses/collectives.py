"""The few collectives of the loss. All do nothing in a world of one rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(x: Tensor, how: str) -> Tensor:
    """Return `x` reduced over ranks in place, without a gradient. `how` is "max" or "sum"."""
    if dist.is_initialized():
        dist.all_reduce(x, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[how])
    return x


class AllGather(torch.autograd.Function):
    """The rows of all ranks in order of rank; the gradient of a rank's rows is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank, rows = dist.get_rank(), len(grad) // dist.get_world_size()
        grad = grad.contiguous()
        if dist.get_backend() == "nccl":
            out = grad.new_empty(rows, *grad.shape[1:])
            dist.reduce_scatter_tensor(out, grad)
            return out
        dist.all_reduce(grad)
        return grad[rank * rows : (rank + 1) * rows]


class MeanOverRanks(torch.autograd.Function):
    """The mean over ranks as a value; the gradient stays the rank's own, since DDP averages it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
