"""A training step of open_clip's loop on fake tensors."""

import contextlib
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
        for parameter in self._trained():
            parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self, batch_size: int, accum_freq: int = 1) -> None:
        """One step. Gradients are left, as between the end of a step and the start of the next.

        Of `accum_freq` batches, which take the same memory each, two are computed: the first, and one that finds
        gradients of another.
        """
        self.optimizer.zero_grad()
        images, texts = self._images(batch_size), self._texts(batch_size)
        if accum_freq == 1:
            self._loss(images, texts).backward()
        else:
            self._accumulate(images, texts, accum_freq)
        self.optimizer.step()

    def _accumulate(self, images: Tensor, texts: Tensor, accum_freq: int) -> None:
        """As open_clip: features of all batches first, without gradients, then each batch once more with them."""
        later = [(self._images(len(images)), self._texts(len(texts))) for _ in range(accum_freq - 1)]
        with torch.no_grad(), self._autocast():
            features = self.model(images, texts)
        others = {
            name: [torch.empty_like(value) for _ in later] for name, value in features.items() if name not in SHARED
        }
        for _ in range(2):
            self._loss(images, texts, others).backward()

    def _loss(self, images: Tensor, texts: Tensor, others: dict[str, list[Tensor]] | None = None) -> Tensor:
        """Of the features of this batch and, by name, those of `others`."""
        with self._autocast():
            out = self.model(images, texts)
            out.update({name: torch.cat([out[name], *more]) for name, more in (others or {}).items()})
            return torch.stack(list(self.loss(**out, output_dict=True).values())).sum()

    def _autocast(self) -> Any:
        dtype = AUTOCAST.get(self.precision)
        return torch.autocast(self.device, dtype) if dtype else contextlib.nullcontext()

    def _images(self, count: int) -> Tensor:
        return torch.empty(count, 3, *self.image_size, dtype=INPUT.get(self.precision), device=self.device)

    def _texts(self, count: int) -> Tensor:
        return torch.zeros(count, self.context_length, dtype=torch.long, device=self.device)

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
