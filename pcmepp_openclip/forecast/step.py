"""A training step of open_clip's loop on fake tensors."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

AUTOCAST = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}
SHARED = ("logit_scale", "logit_bias")  # of a model's output: one value for all samples
INPUT = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "pure_fp16": torch.float16}


@dataclass
class TrainingStep:
    """The steps of a run, to be called within `fake_cuda` and, on more ranks than one, `fake_ranks`.

    Arguments:
        model: with fake tensors, in the dtype of its --precision.
        loss: takes the model's output by name.
        precision: a value of --precision.
        image_size: [height, width] of images.
        context_length: tokens of a text; a step has texts of the full length.
        device: of the fake tensors.
    """

    model: Any
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    precision: str
    image_size: tuple[int, int]
    context_length: int
    device: str = "cuda"

    def make_state(self) -> None:
        """The state of the optimizer, which a run has after its first step."""
        self._make_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self, batch_size: int, accum_freq: int, after_forward: Callable[[], None]) -> None:
        """One step. Gradients are left, as between the end of a step and the start of the next.

        Of `accum_freq` batches, which take the same memory each, one is computed that finds the gradients of another.
        """
        self.optimizer.zero_grad()
        images, texts = self._images(batch_size), self._texts(batch_size)
        others = [(self._images(batch_size), self._texts(batch_size)) for _ in range(accum_freq - 1)]
        if others:
            self._make_gradients()
        loss = self._loss(images, texts, len(others))
        after_forward()
        loss.backward()
        self.optimizer.step()

    def _loss(self, images: Tensor, texts: Tensor, others: int) -> Tensor:
        """Of the features of this batch and of so many others, which open_clip has computed before."""
        with self._autocast():
            out = self.model(images, texts)
            if others:
                features = {name: value for name, value in out.items() if name not in SHARED}
                for name, value in features.items():
                    out[name] = torch.cat([value, *(torch.empty_like(value) for _ in range(others))])
            return torch.stack(list(self.loss(**out, output_dict=True).values())).sum()

    def _make_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)

    def _autocast(self) -> Any:
        dtype = AUTOCAST.get(self.precision)
        return torch.autocast(self.device, dtype) if dtype else contextlib.nullcontext()

    def _images(self, count: int) -> Tensor:
        return torch.empty(count, 3, *self.image_size, dtype=INPUT.get(self.precision), device=self.device)

    def _texts(self, count: int) -> Tensor:
        return torch.zeros(count, self.context_length, dtype=torch.long, device=self.device)
