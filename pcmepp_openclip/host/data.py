"""Training data as open_clip_train expects them, and changes to its transforms of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import Tensor
from torchvision import transforms

from .towers.config import text_may_be_cut
from .trainer import data

MAX_RESIZED_PIXELS = 16_000_000


def validation_data(loader: Any) -> data.DataInfo:
    return data.DataInfo(dataloader=loader)


def image_and_text(batch: Any) -> tuple[Any, Any]:
    """Return the images and texts of a batch, which open_clip 3 has in a tuple and open_clip 4 in a dict."""
    return (batch["image"], batch["text"]) if isinstance(batch, dict) else batch


class Position:
    """The epoch and the batch that it begins with, which the workers see too."""

    def __init__(self, epoch: int = 0):
        self.epoch, self.first_batch = data.SharedEpoch(epoch), data.SharedEpoch(0)

    def __call__(self) -> tuple[int, int]:
        return self.epoch.get_value(), self.first_batch.get_value()


@dataclass
class TrainData(data.DataInfo):
    """open_clip's DataInfo, whose epochs can be entered in their middle."""

    position: Any = None

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Let the next iteration begin at batch `first_batch` of `epoch`."""
        if not 0 <= first_batch <= self.dataloader.num_batches:
            raise ValueError(
                f"An epoch has {self.dataloader.num_batches} batches: it cannot be resumed at batch {first_batch}."
            )
        self.position.epoch.set_value(epoch)
        self.position.first_batch.set_value(first_batch)


def split_transform(transform: Any) -> tuple[Any, tuple[Tensor, Tensor] | None]:
    """Return a transform of open_clip's without its last two steps, to tensor and normalise, and their (mean, std).

    Both steps can then be done in fewer passes over the pixels. Any other transform is returned whole, with None.
    """
    steps = getattr(transform, "transforms", None)
    if not isinstance(transform, transforms.Compose) or not steps or len(steps) < 2:
        return transform, None
    *first, tensor, last = steps
    if not isinstance(last, transforms.Normalize) or type(tensor).__name__ not in ("ToTensor", "MaybeToTensor"):
        return transform, None
    mean, std = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (last.mean, last.std))
    return transforms.Compose(first), (mean, std)


def split_crop(transform: Any) -> tuple[Any, str, Any] | None:
    """Return the random resized crop that a transform begins with, torch's name of its interpolation, and the steps
    after it or None. Return None for any other transform."""
    steps = getattr(transform, "transforms", None)
    if not isinstance(transform, transforms.Compose) or not steps or type(steps[0]) not in CROPS:
        return None
    crop, *after = steps
    if crop.interpolation.value not in ("bilinear", "bicubic") or not crop.antialias:
        return None
    after = [step for step in after if type(step).__name__ != "MaybeConvertMode"]  # the image is RGB by then
    return crop, crop.interpolation.value, transforms.Compose(after) if after else None


@dataclass(frozen=True)
class SidesCrop:
    """A crop of both sides of an image by one share, at any place, and its interpolation to `size`: the crop keeps the
    proportions of the image, which `size` changes. It is used in place of torchvision's `RandomResizedCrop`.

    Arguments:
        size: height and width of the result.
        scale: the least and the largest share; it is drawn uniformly between them.
    """

    size: Any
    scale: tuple[float, float]
    interpolation: Any
    ratio: None = None
    antialias: bool = True

    @staticmethod
    def get_params(image: Any, scale: tuple[float, float], ratio: None) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a random box."""
        _, *sides = transforms.functional.get_dimensions(image)
        share = torch.empty(1).uniform_(*scale).item()
        box = [max(1, int(side * share)) for side in sides]
        place = [int(torch.randint(side - part + 1, (1,))) for side, part in zip(sides, box, strict=True)]
        return place[0], place[1], box[0], box[1]


def with_crop(transform: Any, sides: Sequence[float] | None, flip: bool) -> Any:
    """Return a transform for training with a `SidesCrop` of the scale `sides` in place of open_clip's own crop, and, if
    `flip`, a random flip after the crop. Raise ValueError if `transform` does not begin with a crop."""
    if not (sides or flip):
        return transform
    if split_crop(transform) is None:
        raise ValueError("--crop-sides and --flip need open_clip's own crop: drop use_timm of --aug-cfg, or drop them.")
    crop, *after = transform.transforms
    if sides:
        crop = SidesCrop(crop.size, (sides[0], sides[1]), crop.interpolation)
    return transforms.Compose([crop, *([transforms.RandomHorizontalFlip()] if flip else []), *after])


CROPS = (transforms.RandomResizedCrop, SidesCrop)


class Middle:
    """A crop to the middle of an image that a resize of its shorter side would blow up, such as a strip of 1 x 60,000.

    Arguments:
        size: (height, width) of the box that is cut out of the resized image afterwards.
        max_pixels: most pixels of the resized image; an image that stays below is not cropped.
    """

    def __init__(self, size: tuple[int, int], max_pixels: int):
        self.size, self.max_pixels = size, max_pixels

    def __call__(self, image: Any) -> Any:
        (width, height), (target_height, target_width) = image.size, self.size
        ratio = min(height / target_height, width / target_width)
        if width * height <= self.max_pixels * ratio**2:
            return image
        tall = height / target_height > width / target_width
        long, short = (height, width) if tall else (width, height)
        cut = (long - int(self.max_pixels * ratio**2 / short)) // 2
        return image.crop((0, cut, width, height - cut) if tall else (cut, 0, width - cut, height))

    def __repr__(self) -> str:
        return f"Middle({self.size}, {self.max_pixels})"


def bounded(transform: Any, max_pixels: int = MAX_RESIZED_PIXELS) -> Any:
    """Return a transform of open_clip's for inference that never resizes to more than `max_pixels`."""
    steps = getattr(transform, "transforms", None)
    if not isinstance(transform, transforms.Compose) or not steps or len(steps) < 2:
        return transform
    if not isinstance(steps[1], transforms.CenterCrop):  # other transforms resize to a fixed size
        return transform
    height, width = steps[1].size
    return transforms.Compose([Middle((height, width), max_pixels), *steps])


def input_size(model: str, force_image_size: Any = None) -> int:
    """Return the longer side of the images that a model takes."""
    config = open_clip.get_model_config(model) or {}
    size = force_image_size or config.get("vision_cfg", {}).get("image_size", 224)
    return max(size) if isinstance(size, (list, tuple)) else int(size)


def takes_cut_texts(model: str) -> bool:
    """Return whether texts give the same result without padding, as in PCME++ with a causal mask that pools EOT."""
    config = open_clip.get_model_config(model) or {}
    return "pcmepp_cfg" in config and text_may_be_cut(config)
