"""Bytes that a rank sends in a step, where collectives are rings."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter


def is_collective(func: Any) -> bool:
    return func.namespace == "c10d"


def sent_by(func: Any, args: Any, ranks: int) -> int:
    """What a rank sends for a collective of W ranks: (W - 1) / W T for a gather or a scatter of T bytes, T being the
    larger of what goes in and what comes out, and twice that for an all-reduce."""
    size = max(_bytes(arg) for arg in args)
    return all_reduced(size, ranks) // (1 if "allreduce" in func.__name__ else 2)


def all_reduced(size: int, ranks: int) -> int:
    """What a rank sends for an all-reduce of so many bytes, such as DDP's of the gradients."""
    return 2 * size * (ranks - 1) // ranks


def _bytes(arg: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_iter(arg) if isinstance(x, Tensor))
