"""The way of a batch from the workers to the device that trains.

    workers            uint8 in shared memory
    a thread of torch  to pinned memory (CUDA only)
    a side stream      to the device, while the step before runs
    the step's stream  to fp32, normalized

One batch is copied ahead. A batch counts as seen once a step was given it, so that a resumed run repeats this copy.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .batches import Batch
from .pixels import Normalization, normalize


class ToDevice:
    """Turns batches of pixels in host memory into normalized images, on the device if that is CUDA.

    Texts and ids stay where they are: they are small, the augmentation of batches changes them on the CPU, and
    The training loop moves them without a wait, from pinned memory. On other devices than CUDA the images stay on the
    CPU as well, where they are normalized, and nothing is fetched ahead.

    Arguments:
        device: the device that trains.
        normalization: the normalization of the pixels; None if images come as the model takes them.
    """

    def __init__(self, device: torch.device, normalization: Normalization | None):
        self.copies = device.type == "cuda"
        self._device, self._normalization = device, normalization
        if self.copies and normalization is not None:
            self._normalization = normalization[0].to(device), normalization[1].to(device)
        self._side: Any = None  # the stream, once there is a batch to copy

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches in their order. On CUDA, each is handed on after the copy of the next one was begun."""
        if not self.copies:
            for batch in batches:
                yield batch._replace(images=normalize(batch.images, self._normalization))
            return
        ahead: tuple[Batch, Any] | None = None
        for batch in batches:
            copied = self._copy(batch)
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._arrived(*ahead)

    def _copy(self, batch: Batch) -> tuple[Batch, Any]:
        """Return the batch with its images on their way, and the event of their arrival."""
        self._side = self._side or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._side):
            images = batch.images.to(self._device, non_blocking=True)
            return batch._replace(images=images), self._side.record_event()

    def _arrived(self, batch: Batch, event: Any) -> Batch:
        step = torch.cuda.current_stream(self._device)
        step.wait_event(event)  # the side stream as a whole is busy with the next batch by now
        batch.images.record_stream(step)  # otherwise its memory would be given to the next copy before it is read here
        return batch._replace(images=normalize(batch.images, self._normalization))
