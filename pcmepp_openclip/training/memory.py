"""The memory of the longest texts, tried before the first step, and the error of a GPU that has too little.

One forward and backward pass at the full text length comes first, and its results are dropped.

Texts are cut to the longest caption of their batch, so the memory of a step depends on that caption, and the longest
one may come hours after the start: a batch that does not fit is to fail at once. There is no such pass on a CPU, where
a step takes long, and where tensors that do not fit are not an error but swapped, or the process is killed.

The pass leaves nothing behind: it does not touch `grad`, the hooks of DDP, the random number generators or the buffers
of batch norms, so that the run, and a resumed one, go on to the bit as without it. All ranks take it together, since
the loss exchanges the features of all ranks.
"""

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.batches import CachedTokens
from ..models.pcmepp import ProbabilisticModel
from ..runs import rng
from ..system.errors import RunFailed

NOT_ACCUMULATED = ("logit_scale", "logit_bias")  # outputs of the model that exist once for all samples


def is_wanted(model: nn.Module, texts: Tensor | CachedTokens, device: torch.device) -> bool:
    """Return whether later batches may have longer texts than this one, on a device whose memory is limited."""
    cut = isinstance(texts, CachedTokens) or (isinstance(model, ProbabilisticModel) and model.texts_may_be_cut)
    return cut and device.type != "cpu"


def full_length_pass(
    model: ProbabilisticModel,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, Tensor | CachedTokens],
    *,
    accum_freq: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    dtype: torch.dtype | None,
) -> None:
    """Compute what a later step will compute, with as much memory in use, and drop the results.

    Arguments:
        model: the model itself, without DDP or a compiled wrapper.
        loss: the loss itself, without a wrapper that counts or watches its calls.
        optimizer: the run's optimizer. Memory is set aside for its state, which the first step creates.
        batch: the first batch of the run, on any device.
        accum_freq: the number of batches of a step.
        autocast, dtype: the context that the run computes in, and the dtype of images.
    """
    images = batch[0].to(device=device, dtype=dtype)
    texts = at_full_length(batch[1].to(device=device), model.context_length, model.text_pad_id)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _unchanged(model, device):
        later = _memory_of_later_steps(optimizer, accum_freq)
        earlier = [[x.clone() for x in (*_tensors(images), *_tensors(texts))] for _ in range(accum_freq - 1)]
        features: dict[str, Tensor] = {}
        if earlier:
            with torch.no_grad(), autocast():  # as `features_of` does: a context keeps its casts of weights
                features = model(images, texts)
        with autocast():
            out = model(images, texts)
            for name in features.keys() - set(NOT_ACCUMULATED):
                out[name] = torch.cat([out[name], *[features[name]] * len(earlier)])
            total = sum(loss(**out, output_dict=True).values())
        gradients = torch.autograd.grad(total, trained, allow_unused=True)
        del later, earlier, features, out, total, gradients
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.empty_cache()
        logging.info("A pass with texts of the full %d tokens fits: %.1f GB at its peak.", model.context_length, peak)


def _tensors(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, which is one tensor of pixels or texts, or a record of several."""
    return [batch] if isinstance(batch, Tensor) else [x for x in vars(batch).values() if isinstance(x, Tensor)]


def at_full_length(texts: Tensor | CachedTokens, length: int, pad: int) -> Any:
    """Return texts padded to `length` tokens: token ids [N, L], or the cached output of a tower for them."""
    if isinstance(texts, CachedTokens):
        assert texts.text_NL is not None
        more = length - texts.text_NL.shape[1]
        padded = F.pad(texts.text_NL, (0, more), value=pad)
        return CachedTokens(texts.mean_ND, F.pad(texts.x_NLC, (0, 0, 0, more)), padded)
    return F.pad(texts, (0, length - texts.shape[1]), value=pad)


def _memory_of_later_steps(optimizer: torch.optim.Optimizer, accum_freq: int) -> list[Tensor]:
    """Return empty tensors that take the memory which a later step needs in addition to the first one.

    These are the state of the optimizer and, with several batches per step, the gradients of the batches before. The
    buckets of DDP are there from the start.
    """
    gradients, states = int(accum_freq > 1), _states_per_parameter(optimizer)
    return [
        torch.empty_like(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _ in range(gradients + (0 if parameter in optimizer.state else states))
    ]


def _states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it.

    A step on a small parameter shows it. An optimizer that cannot be copied, since it wraps another, is taken to keep
    as many as AdamW.
    """
    twin, small = copy.copy(optimizer), nn.Parameter(torch.zeros(4, 4))
    twin.state, twin.param_groups = defaultdict(dict), [{**optimizer.param_groups[0], "params": [small]}]
    small.grad = torch.zeros_like(small)
    try:
        twin.step()
    except Exception:
        return 2
    return sum(isinstance(x, Tensor) and x.shape == small.shape for x in twin.state[small].values())


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the random number generators and the buffers when the context ends."""
    numbers, buffers = rng.state(str(device)), [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        rng.restore(numbers, str(device))
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class OutOfMemory(RunFailed):
    """A tensor did not fit into the memory of the GPU."""


def out_of_memory_message(error: BaseException, config: Any, forecast: str | None = None) -> str:
    """Return a paragraph with the size of the card, the memory that was expected, and the flags that help.

    Arguments:
        error: torch's error, whose text has the numbers.
        config: all flags of the run.
        forecast: one sentence on the memory that the run was expected to take, or None.
    """
    text = str(error)
    total, wanted = (re.search(rf"{words} ([\d.]+ \w+)", text) for words in ("total capacity of", "Tried to allocate"))
    card = f" of {total[1]}" if total else ""
    problem = f"The memory of the GPU{card} is not enough" + (f": {wanted[1]} more did not fit." if wanted else ".")
    advice = [
        f"lower --batch-size ({config.batch_size}) and raise --accum-freq ({config.accum_freq}) by the same factor"
    ]
    if not config.grad_checkpointing:
        advice.append("add --grad-checkpointing")
    if config.precision == "fp32":
        advice.append("use --precision amp_bf16")
    *most, last = advice
    remedy = f"{', '.join(most)}, or {last}" if most else last
    return " ".join(filter(None, (problem, forecast, f"{remedy[0].upper()}{remedy[1:]}.")))
