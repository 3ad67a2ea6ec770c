"""What a computation on fake CUDA tensors would launch, move and send: kernels, bytes of memory, collectives."""

import math
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {  # by the names of torch's operators
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
}
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
FILLS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_")  # read nothing


class Collective(NamedTuple):
    """One collective of this rank.

    Arguments:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        bytes: of what is gathered, scattered or reduced: of all ranks together for the first two.
        device: "cuda", since NCCL takes no other tensors.
    """

    kind: str
    bytes: int
    device: str

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends where ranks form a ring, as NCCL's do: each chunk passes W - 1 of W ranks, and that
        twice for an all-reduce."""
        return self.bytes * (ranks - 1) / ranks * (2 if self.kind == "all_reduce" else 1)


class Traffic(TorchDispatchMode):
    """Counts while it is entered, within `fake_cuda` and `fake_ranks`.

        >>> with fake_ranks(64), fake_cuda(), Traffic() as traffic:
        ...     loss(**features).backward()
        >>> [each.kind for each in traffic.collectives]

    Attributes:
        kernels: operators that compute; views and allocations launch nothing. Some operators launch several kernels.
        bytes: of the inputs and outputs of these operators, each read or written once; caches are not considered.
        collectives: in the order of their calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collectives.append(_collective(name, args))
        elif func.namespace == "aten" and not func.is_view and name not in FREE:
            self.kernels += 1
            self.bytes += _bytes(out) + (0 if name in FILLS else _bytes(args))
        return out

    def sent(self, ranks: int) -> float:
        """Bytes that a rank sends, see `Collective.sent`."""
        return sum(each.sent(ranks) for each in self.collectives)


def _collective(name: str, args: tuple) -> Collective:
    # The first two arguments are what is written and what is read, or the same; the larger one is that of all ranks.
    device = next(x.device.type for x in tree_leaves(args) if isinstance(x, Tensor))
    return Collective(KINDS[name], max(_bytes(x) for x in args[:2]), device)


def _bytes(tensors: Any) -> int:
    """Of the memory that is touched: an expanded dimension has one entry."""
    total = 0
    for x in tree_leaves(tensors):
        if isinstance(x, Tensor):
            lengths = (length for length, stride in zip(x.shape, x.stride(), strict=True) if stride or not length)
            total += math.prod(lengths) * x.element_size()
    return total
