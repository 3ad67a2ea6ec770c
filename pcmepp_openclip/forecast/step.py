"""The costs of a training step: the memory and FLOPs of a rank's GPU, and the bytes that the rank sends.

The step runs on fake tensors of the CPU, which have shapes and no numbers. A card's other
memory is not counted: the CUDA context and its libraries, workspaces of kernels, and fragments of the allocator.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..distances import tiles
from ..host.loss import pcmepp_loss
from ..host.towers.blocks import pair
from ..models.pcmepp import ProbabilisticModel
from .counts import Collective, StepCounter

AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}
SHARED = ("logit_scale", "logit_bias")  # outputs of a model with one value for all samples
INPUT = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "pure_fp16": torch.float16}


@dataclass(frozen=True)
class StepCosts:
    """The costs of a step on one rank. The parts of the memory are bytes at the moment of the peak, and add up to it.

    Arguments:
        peak: bytes of memory at the peak.
        weights: parameters and buffers.
        gradients: those that exist at the peak; few where it is at the start of the backward pass.
        optimizer: the state of the optimizer.
        buckets: DDP's copy of the gradients; none on a single rank.
        activations: all else: what is saved for the backward pass, the batch, the loss and temporary tensors.
        flops: FLOPs of one batch, forward and backward; --accum-freq batches make a step.
        forward_flops: FLOPs of its forward pass alone, which --accum-freq repeats.
        collectives, sent: number of collectives of the loss of one batch, and the bytes that the rank sends for them.
        reduced: bytes that the rank sends for DDP's mean of the gradients, once per step.
    """

    peak: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    flops: int
    forward_flops: int
    collectives: int
    sent: int
    reduced: int

    @property
    def at_update(self) -> int:
        """Return the memory when AdamW updates the weights: it has two numbers per gradient, and takes a third."""
        return self.weights + 2 * self.optimizer + self.buckets


@contextlib.contextmanager
def as_on_a_card() -> Iterator[None]:
    """Make the CPU compute as a card does while the context lasts: autocast computes layer norms in fp32, which keeps
    their inputs in fp32 for the backward pass, and the loss takes larger tiles."""
    plain = F.layer_norm

    def layer_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    with mock.patch.object(F, "layer_norm", layer_norm), mock.patch.dict(tiles.CHUNK, cpu=tiles.CHUNK["cuda"]):
        yield


class FakeTraining:
    """Training steps of one model, measured at several batch sizes, with and without checkpointing.

    Arguments:
        model: a model on the device "meta" whose output is a dict; its tensors are replaced.
        loss: the loss for `ranks` ranks, which takes the model's output by name.
        precision: a value of --precision.

    The optimizer is AdamW as open_clip makes it, which on a GPU takes one more copy of the gradients for a moment. All
    texts have the full length.
    """

    def __init__(self, model: Any, loss: nn.Module, *, precision: str, ranks: int = 1):
        self.model, self.loss, self.precision, self.ranks = model, loss, precision, ranks
        self.counter = StepCounter()
        self._mode = FakeTensorMode(allow_non_fake_inputs=False)
        with self._fake():
            self.trained = [p for p in to_fake(model.train()).parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(self.trained, foreach=True)
            self._make_gradients()
            self.optimizer.step()  # makes the state, which a run has after its first step
            self.optimizer.zero_grad()

    def measure(self, batch_size: int, accum_freq: int = 1, grad_checkpointing: bool = False) -> StepCosts:
        """Return the costs of a step of `accum_freq` batches."""
        self.model.set_grad_checkpointing(grad_checkpointing)
        counter = self.counter
        with self._fake():
            self.optimizer.zero_grad()
            counter.restart()
            self._step(batch_size, accum_freq)
            state = [x for values in self.optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
            gradients = [p.grad for p in self.trained if p.grad is not None]
            weights = counter.bytes_of([*self.model.parameters(), *self.model.buffers()])
            copy, kept = counter.bytes_of(gradients), counter.bytes_of(state)
            at_peak = counter.bytes_of(gradients, at_peak=True)
        buckets = copy if self.ranks > 1 else 0
        return StepCosts(
            peak=counter.peak + buckets,
            weights=weights,
            gradients=at_peak,
            optimizer=kept,
            buckets=buckets,
            activations=counter.peak - weights - at_peak - kept,
            flops=counter.flops,
            forward_flops=counter.forward_flops,
            collectives=len(counter.collectives),
            sent=sum(each.sent(self.ranks) for each in counter.collectives),
            reduced=Collective("all_reduce", copy, "cuda").sent(self.ranks),
        )

    def _step(self, batch_size: int, accum_freq: int) -> None:
        """Train for one step and keep the gradients, as open_clip does until the next step.

        Only one of the `accum_freq` batches, which need equal memory, is computed, while gradients of another exist.
        """
        images, texts = self._batch(batch_size)
        others = [self._batch(batch_size) for _ in range(accum_freq - 1)]
        if others:
            self._make_gradients()
        loss = self._loss(images, texts, len(others))
        self.counter.forward_flops = self.counter.flops
        loss.backward()
        self.optimizer.step()

    def _loss(self, images: Tensor, texts: Tensor, others: int) -> Tensor:
        """Return the loss of a batch with the features of `others` batches, which open_clip has computed before.

        As in a run, the output of the model is gone when the backward pass begins.
        """
        dtype = AUTOCAST.get(self.precision)
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            out = self.model(images, texts)
            if others:
                features = {name: value for name, value in out.items() if name not in SHARED}
                for name, value in features.items():
                    out[name] = torch.cat([value, *(torch.empty_like(value) for _ in range(others))])
            return torch.stack(list(self.loss(**out, output_dict=True).values())).sum()

    def _make_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = torch.empty_like(parameter)

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        height, width = pair(self.model.visual.image_size)
        images = torch.empty(size, 3, height, width, dtype=INPUT.get(self.precision))
        return images, torch.zeros(size, self.model.context_length, dtype=torch.long)

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        with fake_ranks(self.ranks), self._mode, self.counter, as_on_a_card():
            yield


def step_costs(
    model: str,
    batch_size: int,
    *,
    precision: str = "amp",
    accum_freq: int = 1,
    grad_checkpointing: bool = False,
    ranks: int = 1,
) -> StepCosts:
    """Return the costs of a rank in a training step of the named model, all of whose parameters are trained.

    Arguments:
        batch_size, precision, accum_freq, grad_checkpointing: the flags of these names.

    Plain models have open_clip's loss with --local-loss and --gather-with-grad.
    """
    with torch.device("meta"):
        built = open_clip.create_model(
            model, precision=precision, device="meta", output_dict=True, pretrained_text=False
        )
    loss: nn.Module = open_clip.ClipLoss(local_loss=True, gather_with_grad=True, world_size=ranks)
    if isinstance(built, ProbabilisticModel):
        loss = pcmepp_loss(built.pcmepp_cfg, world_size=ranks)
    training = FakeTraining(built, loss, precision=precision, ranks=ranks)
    return training.measure(batch_size, accum_freq, grad_checkpointing)


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group that seems NCCL's while the context lasts; of no group if `ranks` is 1."""
    if ranks == 1:
        yield
        return
    if dist.is_initialized():
        raise ValueError("This process is a rank of a run already.")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with mock.patch.object(dist, "get_backend", lambda *_, **__: "nccl"):
            yield
    finally:
        dist.destroy_process_group()


def to_fake(model: nn.Module, device: str = "cpu") -> nn.Module:
    """Replace a model's tensors, which may be on the device "meta", by fake ones, and return the model."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        owners: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in owners:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved.setdefault(id(tensor), _fake(tensor, device))
    return model


def _fake(tensor: Tensor, device: str) -> Tensor:
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
