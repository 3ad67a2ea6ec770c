"""Load images as batches of pixels: one loader serves all images of a dataset, so that its workers start once."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import functional

from ..data.captioned import ImageRef
from ..data.decode import BadImage, decode_image


class ImageDataset(Dataset):
    """Images as their preprocessing gives them, pixels [C, H, W]. An image that cannot be read is a ValueError.

    Arguments:
        crops: for each image the side of the centre crop in its place, as a share of its own, or None.
    """

    def __init__(
        self, places: Sequence[ImageRef], preprocess: Any, upright: bool = False, crops: Sequence[float] | None = None
    ):
        self.places, self.preprocess, self.upright, self.crops = places, preprocess, upright, crops

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Tensor:
        place = self.places[index]
        try:
            pixels = self.preprocess(decode_image(place.read(), upright=self.upright))
        except BadImage as error:
            # Leaving it out would change the numbers without a word.
            raise ValueError(f"An image of {place.file} (at byte {place.offset}) cannot be read: {error}.") from None
        return pixels if self.crops is None else centre_crop(pixels, self.crops[index])


def centre_crop(pixels_CHW: Tensor, ratio: float) -> Tensor:
    """Return the middle of an image, a square of `ratio` times its shorter side, at the size of the whole."""
    size = list(pixels_CHW.shape[1:])
    side = max(1, round(min(size) * ratio))
    return functional.resize(functional.center_crop(pixels_CHW, [side, side]), size, antialias=True)


def image_batches(data: ImageDataset, batches: Sequence[list[int]], workers: int, device: str) -> Iterator[Tensor]:
    """Yield the pixels of each batch of indices, [N, C, H, W], in the order of `batches`.

    Arguments:
        workers: processes that decode; they work ahead of the caller, over the whole list. 0 for this process.
        device: where the pixels go. For CUDA they come in pinned memory, from which a copy needs no wait.
    """
    loader: DataLoader = DataLoader(
        data,
        batch_sampler=batches,
        num_workers=min(workers, len(batches)),
        pin_memory=torch.device(device).type == "cuda",
    )
    try:
        yield from loader
    except ValueError as error:  # a worker's error comes with its traceback as text
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None
