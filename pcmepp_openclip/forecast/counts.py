"""Counters of a computation on fake tensors: its memory, now and at the peak, its FLOPs and its collectives."""

import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BLOCK = 512  # bytes; torch's caching allocator rounds every tensor up to a multiple of this
KINDS = {  # kinds of collectives by the names of torch's operators
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operations make on one kind of device, until their last reference is gone.

        >>> with FakeTensorMode(), LiveBytes() as memory:
        ...     train(model)
        >>> memory.peak

    It counts neither what a kernel takes for itself while it runs nor what an allocator keeps of freed blocks.

    Arguments:
        device_type: the kind of device whose tensors are counted.
    """

    def __init__(self, device_type: str = "cpu"):
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = 0
        self._made = self._made_at_peak = 0
        self._held: dict[int, tuple[weakref.ref, int, int]] = {}  # id of a storage: reference, bytes, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            self.count(func, args, kwargs or {}, out)
        return out

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation that has run."""
        self.add(out)

    def add(self, made: Any) -> None:
        """Count the fake tensors within `made` that are not counted yet."""
        if isinstance(made, FakeTensor):
            self._add(made)
        elif isinstance(made, (tuple, list)):
            for each in made:
                self.add(each)

    def restart(self) -> None:
        """Forget the peak so far."""
        self._mark_peak()

    def bytes_of(self, tensors: Iterable[Tensor], at_peak: bool = False) -> int:
        """Return the bytes of those tensors that are alive; with `at_peak`, only of those made by the peak."""
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        held = [self._held[name] for name in storages if name in self._held]
        return sum(size for _, size, number in held if not at_peak or number <= self._made_at_peak)

    def _add(self, tensor: FakeTensor) -> None:
        if tensor.fake_device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        name = id(storage)
        if name in self._held:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._made += 1
        self._held[name] = (weakref.ref(storage, lambda _: self._drop(name)), size, self._made)
        self.now += size
        if self.now > self.peak:
            self._mark_peak()

    def _mark_peak(self) -> None:
        self.peak, self._made_at_peak = self.now, self._made

    def _drop(self, name: int) -> None:
        self.now -= self._held.pop(name)[1]


class StepCounter(LiveBytes):
    """Count the memory, FLOPs and collectives of one rank.

    torch's `FlopCounterMode` counts FLOPs alone, by the same formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.forward_flops = 0
        self.collectives: list[Collective] = []

    def restart(self) -> None:
        super().restart()
        self.flops, self.collectives = 0, []

    def count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super().count(func, args, kwargs, out)
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=out)
        if collective := collective_of(func, args):
            self.collectives.append(collective)


class Collective(NamedTuple):
    """A collective of this rank.

    Arguments:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        bytes: how much is gathered, scattered or reduced; of all ranks together for the first two.
        device: the kind of device of its tensors; NCCL takes only "cuda".
    """

    kind: str
    bytes: int
    device: str

    def sent(self, ranks: int) -> int:
        """Return the bytes that a rank sends where ranks form a ring, as NCCL's do: each chunk passes W - 1 of W ranks,
        twice so for an all-reduce."""
        return self.bytes * (ranks - 1) * (2 if self.kind == "all_reduce" else 1) // ranks


def collective_of(func: Any, args: tuple) -> Collective | None:
    """Return the collective that an operator is, or None."""
    if func.namespace != "c10d":
        return None
    # The first two arguments are the output and the input, or one tensor is both; the larger one is that of all ranks.
    device = next(x.device.type for x in tree_leaves(args) if isinstance(x, Tensor))
    return Collective(KINDS[func.overloadpacket.__name__], max(touched_bytes(x) for x in args[:2]), device)


def touched_bytes(tensors: Any) -> int:
    """Return the bytes of memory that tensors refer to: an expanded dimension has one entry."""
    total = 0
    for x in tree_leaves(tensors):
        if isinstance(x, Tensor):
            lengths = (length for length, stride in zip(x.shape, x.stride(), strict=True) if stride or not length)
            total += math.prod(lengths) * x.element_size()
    return total
