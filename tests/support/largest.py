"""The largest tensor that some code makes, and what it must not call."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Counts while it is entered: `elements` of the largest output of any operation.

    Arguments:
        forbidden: operations that must not be called.
    """

    def __init__(self, *forbidden):
        super().__init__()
        self.forbidden, self.elements = forbidden, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.forbidden, func
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@contextlib.contextmanager
def kept_for_backward():
    """A list of the sizes of the tensors that operations keep for the backward pass; those that are computed again
    there are not among them."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes
