"""The peak memory of a rank's GPU in a training step, counted on fake tensors.

What a card needs beyond that is not counted: the CUDA context and its libraries, workspaces of kernels, and the
fragments that the caching allocator leaves.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..host.loss import pcmepp_loss
from ..host.towers import pair
from ..models.pcmepp import ProbabilisticModel
from .attention import fused_attention
from .fake_cuda import fake_cuda, to_fake
from .fake_ranks import fake_ranks
from .flops import flops_of
from .live_bytes import LiveBytes
from .step import TrainingStep
from .wire import all_reduced, is_collective, sent_by


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the moment of the peak, whose parts add up to it.

    Arguments:
        weights: parameters and buffers.
        gradients: those that exist at the peak: few of them where it is at the start of the backward pass.
        optimizer: its state.
        buckets: DDP's copy of the gradients; none on a single rank.
        activations: all else: what is saved for the backward pass, the batch, the loss and temporary tensors.
    """

    peak: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int

    @property
    def at_update(self) -> int:
        """When AdamW updates the weights: it has two numbers per gradient, and takes a third for a moment."""
        return self.weights + 2 * self.optimizer + self.buckets


@dataclass(frozen=True)
class StepCosts:
    """What a step takes on one rank.

    Arguments:
        flops: of one batch, forward and backward; --accum-freq batches make a step.
        forward_flops: of its forward pass alone, which --accum-freq repeats.
        collectives, sent: of the loss of one batch: their number, and the bytes that the rank sends for them.
        reduced: bytes that the rank sends for DDP's mean of the gradients, once per step.
    """

    memory: StepMemory
    flops: int
    forward_flops: int
    collectives: int
    sent: int
    reduced: int


class StepCounter(LiveBytes):
    """Counts memory, FLOPs and collectives of one rank."""

    def __init__(self, device_type: str, ranks: int):
        super().__init__(device_type)
        self.ranks = ranks
        self.flops = self.forward_flops = self.collectives = self.sent = 0

    def restart(self) -> None:
        super().restart()
        self.flops = self.collectives = self.sent = 0

    def after_forward(self) -> None:
        self.forward_flops = self.flops

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super().saw(func, args, kwargs, out)
        self.flops += flops_of(func, args, kwargs, out)
        if is_collective(func):
            self.collectives += 1
            self.sent += sent_by(func, args, self.ranks)


class FakeTraining:
    """Steps of one model, to be measured at several batch sizes, with and without checkpointing.

    Arguments:
        model: on the device "meta", giving a dict; its tensors are replaced.
        loss: for `ranks` ranks.
        precision: a value of --precision.
        device: "cuda", or "cpu" to compare with what a CPU takes.

    The optimizer is AdamW as open_clip makes it, which on a GPU takes one more copy of the gradients for a moment.
    """

    def __init__(self, model: Any, loss: nn.Module, *, precision: str, ranks: int = 1, device: str = "cuda"):
        self.model, self.ranks = model, ranks
        self.counter = StepCounter(device, ranks)
        self._mode: FakeTensorMode | None = None
        with self._fake():
            self.trained = [p for p in to_fake(model.train(), device).parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(self.trained, foreach=device == "cuda")
            height, width = pair(model.visual.image_size)
            self.step = TrainingStep(model, loss, optimizer, precision, (height, width), model.context_length, device)
            self.step.make_state()

    def measure(self, batch_size: int, accum_freq: int = 1, grad_checkpointing: bool = False) -> StepCosts:
        self.model.set_grad_checkpointing(grad_checkpointing)
        counter, optimizer = self.counter, self.step.optimizer
        with self._fake():
            optimizer.zero_grad()
            counter.restart()
            self.step(batch_size, accum_freq, counter.after_forward)
            state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, torch.Tensor)]
            gradients = [p.grad for p in self.trained if p.grad is not None]
            weights = counter.bytes_of([*self.model.parameters(), *self.model.buffers()])
            copy, kept = counter.bytes_of(gradients), counter.bytes_of(state)
            at_peak = counter.bytes_of(gradients, at_peak=True)
        buckets = copy if self.ranks > 1 else 0
        return StepCosts(
            StepMemory(
                peak=counter.peak + buckets,
                weights=weights,
                gradients=at_peak,
                optimizer=kept,
                buckets=buckets,
                activations=counter.peak - weights - at_peak - kept,
            ),
            flops=counter.flops,
            forward_flops=counter.forward_flops,
            collectives=counter.collectives,
            sent=counter.sent,
            reduced=all_reduced(copy, self.ranks),
        )

    @contextlib.contextmanager
    def _fake(self) -> Iterator[None]:
        with fake_ranks(self.ranks), fake_cuda(self._mode) as self._mode, fused_attention(), self.counter:
            yield


def step_memory(
    model: str,
    batch_size: int,
    *,
    precision: str = "amp",
    accum_freq: int = 1,
    grad_checkpointing: bool = False,
    ranks: int = 1,
) -> StepMemory:
    """The memory of a rank in a training step of the model of that name, all of whose parameters are trained.

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
    return training.measure(batch_size, accum_freq, grad_checkpointing).memory
