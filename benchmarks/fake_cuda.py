"""CUDA tensors without a CUDA device: shapes, dtypes, devices and memory of a computation, but no numbers.

torch's fake tensors run forward passes and optimizers on the device "cuda" anywhere. Its autograd engine does not,
since it asks the driver for a device; `backward` below visits the same nodes in the same order in Python.

    >>> with fake_cuda():
    ...     model = to_cuda(model_on_meta)
    ...     model(torch.empty(8, 3, 224, 224, device="cuda")).sum().backward()
"""

import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pcmepp_openclip.forecast.step import to_fake


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Make tensors that are created within the context fake, on any device, and let "cuda" exist."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.Tensor, "backward", backward),
            (torch.autograd, "grad", grad),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))


def to_cuda(model: nn.Module) -> nn.Module:
    """Return the model with fake CUDA tensors in place of its own, which may be on the device "meta"."""
    return to_fake(model, "cuda")


def backward(loss: Tensor, *_: Any, **__: Any) -> None:
    """Replace `Tensor.backward` of a scalar."""
    _visit(loss, _accumulate)


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Keep the first gradient and add later ones to it as soon as they arrive, as the engine does."""
    if leaf.grad is None:
        leaf.grad = gradient
    else:
        leaf.grad.add_(gradient)


def grad(loss: Tensor, inputs: Sequence[Tensor], *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
    """Replace `torch.autograd.grad` of a scalar with respect to leaves."""
    gradients: dict[int, Tensor] = {}
    _visit(loss, lambda leaf, gradient: gradients.update({id(leaf): gradient}))
    return tuple(gradients.get(id(leaf)) for leaf in inputs)


def _visit(loss: Tensor, arrive: Callable[[Tensor, Tensor], None]) -> None:
    """Call `arrive` with every leaf and its gradient. A node and what it saved for its backward pass are dropped once
    it has run, as the engine does."""
    root: Any = loss.grad_fn
    assert root is not None
    loss.detach_()  # it would hold all nodes to the end
    waiting = _dependencies(root)
    arrived: dict[Any, list[Tensor | None]] = {root: [torch.ones_like(loss)]}
    order = itertools.count()
    ready = [(-root._sequence_nr(), next(order), root)]
    del root
    # One id for the whole pass: by it, checkpointing knows that a block was recomputed already.
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", lambda: 1):
        while ready:
            node = heapq.heappop(ready)[2]
            inputs = arrived.pop(node)
            if hasattr(node, "variable"):
                if inputs[0] is not None:
                    arrive(node.variable, inputs[0])
                continue
            targets = [(target, index) for target, index in node.next_functions if target is not None]
            outputs = _run(node, inputs)
            del inputs
            for (target, index), gradient in zip(targets, outputs, strict=True):
                slots = arrived.setdefault(target, [None] * len(target._input_metadata))
                if gradient is not None:
                    gradient = _like(gradient, target._input_metadata[index])
                    slots[index] = gradient if slots[index] is None else slots[index] + gradient
                waiting[target] -= 1
                if not waiting[target]:
                    del waiting[target]
                    priority = -(2**63) if hasattr(target, "variable") else -target._sequence_nr()
                    heapq.heappush(ready, (priority, next(order), target))
            del outputs, node


def _run(node: Any, inputs: list[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients that a node passes on, without those that nothing takes."""
    taken: Sequence[bool]
    own = torch.autograd.function.BackwardCFunction  # of a subclass of `torch.autograd.Function`
    if issubclass(type(node), own):
        described = zip(inputs, node._input_metadata, strict=True)
        filled = [_zeros(metadata) if gradient is None else gradient for gradient, metadata in described]
        outputs, taken = node.apply(*filled), node.needs_input_grad
    else:
        outputs, taken = node(*inputs), [target is not None for target, _ in node.next_functions]
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [gradient for gradient, wanted in zip(outputs, taken, strict=True) if wanted]


def _zeros(metadata: Any) -> Tensor:
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _like(gradient: Tensor, metadata: Any) -> Tensor:
    """Return a gradient in the dtype and the shape of what it is a gradient of, as the engine makes it."""
    if gradient.shape != torch.Size(metadata.shape):
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)


def _dependencies(root: Any) -> dict[Any, int]:
    """Count the gradients that every node waits for."""
    counts: dict[Any, int] = {}
    seen, stack = {root}, [root]
    while stack:
        for target, _ in stack.pop().next_functions:
            if target is None:
                continue
            counts[target] = counts.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return counts
