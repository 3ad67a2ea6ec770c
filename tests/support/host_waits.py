"""What would make a host wait for its GPU, found on fake CUDA tensors, and what fake tensors let pass though a GPU
would not.

The CPU prepares work for a GPU faster than the GPU does it. Every read of a CUDA tensor's value ends that: the CPU
waits until the GPU has done all that it was given, and then the GPU waits for the CPU.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
TRUTHS = (aten.equal, aten.allclose)
READS = (aten._local_scalar_dense, *TRUTHS)  # of values: `.item()`, `if tensor`, `.tolist()`
WRITES = (aten.index_put, aten.index_put_, aten._index_put_impl_)
LISTS = (aten.stack, aten.cat)  # fake tensors on several devices pass here if they have no dimensions
HERE = Path(__file__)
TORCH = Path(torch.__file__).parent
PARTS = tuple(str(TORCH / part) for part in ("amp", "nn", "optim"))  # of torch, whose waits are their own


class HostWaits(TorchDispatchMode):
    """Notes every wait by the function that it comes from, as "monitor.py:check", and answers reads of values.

    To be entered within `fake_cuda`. A read is answered by 0 or True, where there is no other answer.

    Arguments:
        answers: the name of a function that reads to the number, and the truth value, that it gets.
    """

    def __init__(self, answers: dict[str, tuple[float, bool]] | None = None):
        super().__init__()
        self.answers = answers or {}
        self.found: list[str] = []

    def __enter__(self) -> "HostWaits":
        # As of a plain tensor, whose text is that of its value; torch compares types, and a fake tensor has another.
        self._format = FakeTensor.__format__
        FakeTensor.__format__ = lambda tensor, spec: format(tensor.item(), spec)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        FakeTensor.__format__ = self._format
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if (
            func.namespace == "aten" and torch.is_inference_mode_enabled()
        ):  # in which composite operators such as `to` arrive here whole
            with self:
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return result
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if packet in LISTS and len(devices) > 1:
            raise RuntimeError(f"{func} takes tensors of one device, not of {', '.join(sorted(devices))}.")
        if packet in READS:
            return self._read(func, args, tensors[0])
        if _waits(packet, args, kwargs, devices):
            self._note()
        return SIZES.get(packet, func)(*args, **kwargs)

    def _read(self, func: Any, args: tuple, read: Tensor) -> Any:
        if read.device.type == "cuda":
            self._note()
        else:
            with contextlib.suppress(DataDependentOutputException):
                return func(*args)  # the values of some small tensors on the CPU are known
        number, truth = self.answers.get(caller().f_code.co_name, (0, True))
        if read.dtype == torch.bool or func.overloadpacket in TRUTHS:
            return truth
        return float(number) if read.dtype.is_floating_point else number

    def _note(self) -> None:
        code = caller().f_code
        self.found.append(f"{Path(code.co_filename).name}:{code.co_name}")


def _waits(packet: Any, args: tuple, kwargs: dict, devices: set[str]) -> bool:
    if "cuda" not in devices and packet is not aten._to_copy:
        return False
    if packet is aten._to_copy:
        target = torch.device(kwargs.get("device") or args[0].device).type
        return {args[0].device.type, target} == {"cpu", "cuda"} and not kwargs.get("non_blocking", False)
    if packet in (aten.copy_, aten.copy):
        return len(devices) > 1 and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if packet in (aten.index, *WRITES):  # a mask is turned into places, and places on the CPU are copied
        return any(
            x.dtype in (torch.bool, torch.uint8) or x.device.type == "cpu"
            for x in tree_leaves(args[1])
            if x is not None
        )
    return packet in SIZES


def _nonzero(x: Tensor) -> Tensor:
    return x.new_empty(x.numel(), x.ndim, dtype=torch.long)


def _unique(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.numel()), torch.empty_like(x, dtype=torch.long), x.new_empty(x.numel(), dtype=torch.long)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return x.new_empty(max(len(x), minlength), dtype=torch.long if weights is None else torch.double)


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    places = [[i] if i is None or i.dtype != torch.bool else _nonzero(i).unbind(dim=1) for i in indices]
    return aten.index.Tensor(x, [each for several in places for each in several])


# Operators whose results have sizes that depend on values, and the result if no entry is zero and all are different.
SIZES = {
    aten.nonzero: _nonzero,
    aten._unique2: _unique,
    aten.bincount: _bincount,
    aten.repeat_interleave: lambda repeats, **_: torch.empty_like(repeats),
    aten.index: _index,
}


def caller() -> FrameType:
    """The innermost function that is no part of torch's dispatch."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file != str(HERE) and (not file.startswith(str(TORCH)) or file.startswith(PARTS)):
            return frame
    raise AssertionError("torch was called by nobody")


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
