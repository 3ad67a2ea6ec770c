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
    """The elements of each block of memory that operations keep for the backward pass, by its address; what is computed
    again there is not among them."""
    sizes = {}

    def keep(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes
