"""A count of the memory that a computation on fake tensors would hold, at every moment and at its peak."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 512  # bytes; torch's caching allocator rounds every tensor up to a multiple of it


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make on one kind of device, each once, until the last reference is gone.

        >>> with fake_cuda(), LiveBytes("cuda") as memory:
        ...     train(model)
        >>> memory.peak

    Not counted: what a kernel takes for itself while it runs, and what an allocator keeps of freed blocks.

    Arguments:
        device_type: "cuda" or "cpu".
    """

    def __init__(self, device_type: str = "cuda"):
        super().__init__()
        self.device_type = device_type
        self.now = self.peak = 0
        self._made = self._made_at_peak = 0
        self._held: dict[int, tuple[weakref.ref, int, int]] = {}  # by the id of the storage: reference, bytes, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            self.saw(func, args, kwargs or {}, out)
        return out

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Called after each operation."""
        self.add(out)

    def add(self, made: Any) -> None:
        """Counts the fake tensors within `made` that are not counted yet."""
        if isinstance(made, FakeTensor):
            self._add(made)
        elif isinstance(made, (tuple, list)):
            for each in made:
                self.add(each)

    def restart(self) -> None:
        """Forgets the peak so far."""
        self._mark_peak()

    def bytes_of(self, tensors: Iterable[Tensor], at_peak: bool = False) -> int:
        """The memory of tensors that are alive; with `at_peak` of those alone that were made by then."""
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
