"""The part of the host boundary (see `__init__.py`) that belongs to the data: what open_clip_train expects of it."""

from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from open_clip_train.data import DataInfo, SharedEpoch
from torch import Tensor
from torchvision import transforms


class Position:
    """The epoch and the batch that it begins with, seen by the workers too."""

    def __init__(self, epoch: int = 0):
        self.epoch, self.first_batch = SharedEpoch(epoch), SharedEpoch(0)

    def __call__(self) -> tuple[int, int]:
        return self.epoch.get_value(), self.first_batch.get_value()


@dataclass
class TrainData(DataInfo):
    """open_clip's DataInfo, whose epochs can be entered in their middle."""

    position: Any = None

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """The next iteration is over batches `first_batch`, ... of that epoch."""
        if not 0 <= first_batch <= self.dataloader.num_batches:
            raise ValueError(f"An epoch has {self.dataloader.num_batches} batches: it cannot go on at {first_batch}.")
        self.position.epoch.set_value(epoch)
        self.position.first_batch.set_value(first_batch)


def split_transform(transform: Any) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """A transform of open_clip's without its last two steps, and (mean, std) of those: to tensor, normalise.

    Both can then be done in fewer passes over the pixels. Any other transform comes back whole, with None.
    """
    steps = getattr(transform, "transforms", None)
    if not isinstance(transform, transforms.Compose) or not steps or len(steps) < 2:
        return transform, None
    *first, tensor, last = steps
    if not isinstance(last, transforms.Normalize) or type(tensor).__name__ not in ("ToTensor", "MaybeToTensor"):
        return transform, None
    mean, std = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (last.mean, last.std))
    return transforms.Compose(first), (mean, std)


def input_size(model: str, force_image_size: Any = None) -> int:
    """The longer side of the images that a model takes."""
    config = open_clip.get_model_config(model) or {}
    size = force_image_size or config.get("vision_cfg", {}).get("image_size", 224)
    return max(size) if isinstance(size, (list, tuple)) else int(size)


def takes_cut_texts(model: str) -> bool:
    """Whether texts without their padding give the same result: PCME++ with a causal mask."""
    config = open_clip.get_model_config(model) or {}
    return "pcmepp_cfg" in config and not config.get("text_cfg", {}).get("no_causal_mask", False)
