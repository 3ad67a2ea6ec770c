"""A random resized crop that is drawn before its image is decoded, so that the codec need not decode all of it.

The box follows from the header and the random numbers, which are those that torchvision draws for the same transform:
the crop is the same. Unless it has to be exact, it is resized by torch's kernel for uint8, which is several times as
fast as Pillow's and rounds its weights to 16 bits.
"""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from .decode import BadImage, is_turned, load_image, open_image
from .jpeg import decode_jpeg, jpeg_size

DENOMINATORS = (8, 4, 2, 1)  # every JPEG codec has the scales 1/8 to 1, and computes them fast


class Box(NamedTuple):
    """Part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def scaled(self, by: int) -> "Box":
        """Return the box in an image of 1/by of the size, its sides rounded to pixels."""
        top, left = int(self.top / by + 0.5), int(self.left / by + 0.5)
        bottom, right = int((self.top + self.height) / by + 0.5), int((self.left + self.width) / by + 0.5)
        return Box(top, left, bottom - top, right - left)


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop and the steps after it: `crop(data, max_pixels, upright)` returns pixels.

    Arguments:
        crop: torchvision's RandomResizedCrop, which draws the box.
        mode: the interpolation, as torch names it.
        after: the steps after the crop, a function from image to image; None if there are none.
        exact: whether the crop is resized by Pillow, as torchvision does it with an image.
        reduced: whether a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, as long as the crop is at least as large as
            the output. The box is then rounded to pixels of the smaller image.
    """

    crop: Any
    mode: str
    after: Any
    exact: bool = False
    reduced: bool = False

    def __call__(self, data: bytes, max_pixels: int, upright: bool) -> Tensor:
        """Return the pixels of a random crop of an image file, uint8 [H, W, 3]. Raises BadImage with the cause.

        Arguments:
            max_pixels, upright: see `decode_image`.
        """
        before = torch.get_rng_state()
        cropped = None if upright else self._of_jpeg(data, max_pixels)
        if cropped is None:
            torch.set_rng_state(before)
            try:
                cropped = self._of_image(data, max_pixels, upright)
            except BadImage:  # a bad image must not change the random numbers of the others in its batch
                torch.set_rng_state(before)
                raise
        resized = self._by_pillow(cropped) if self.exact else self._by_torch(as_pixels(cropped))
        return as_pixels(resized if self.after is None else self.after(_as_image(resized)))

    def _by_pillow(self, cropped: Any) -> Any:
        height, width = self.crop.size
        return _as_image(cropped).resize((width, height), Image.Resampling[self.mode.upper()])

    def _by_torch(self, pixels_HWC: Tensor) -> Tensor:
        image_1CHW = pixels_HWC[None].permute(0, 3, 1, 2)  # has the strides of channels_last, which are faster
        resized_1CHW = functional.interpolate(image_1CHW, self.crop.size, mode=self.mode, antialias=True)
        return resized_1CHW.permute(0, 2, 3, 1)[0].contiguous()

    def _of_jpeg(self, data: bytes, max_pixels: int) -> Tensor | None:
        """Return a crop made by simplejpeg, as pixels, or None if it cannot decode the image."""
        size = jpeg_size(data, max_pixels)
        if size is None:
            return None
        box, by = self._draw(torch.empty(1, *size, device="meta"), scalable=True)
        pixels = decode_jpeg(data, *(-(-side // by) for side in size))
        if pixels is None:
            return None
        return torch.from_numpy(pixels)[box.top :, box.left :][: box.height, : box.width]

    def _of_image(self, data: bytes, max_pixels: int, upright: bool) -> Any:
        """Return a crop made by Pillow, as an image. Raises BadImage."""
        image = open_image(data, max_pixels)
        if upright and is_turned(image):
            image = load_image(image, upright=True)
        box, by = self._draw(image, scalable=image.format == "JPEG")
        if by > 1:
            image.draft(None, (image.width // by, image.height // by))
        return load_image(image).crop((box.left, box.top, box.left + box.width, box.top + box.height))

    def _draw(self, image: Any, scalable: bool) -> tuple[Box, int]:
        """Return a random box, and the denominator of the scale that the box is for."""
        box = Box(*self.crop.get_params(image, self.crop.scale, self.crop.ratio))
        height, width = self.crop.size
        for by in DENOMINATORS if self.reduced and scalable else ():
            if box.height // by >= height and box.width // by >= width:
                return box.scaled(by), by
        return box, 1


def _as_image(pixels: Any) -> Any:
    return Image.fromarray(pixels.numpy()) if isinstance(pixels, Tensor) else pixels


def as_pixels(image: Any) -> Tensor:
    """Return an RGB image, or a tensor of pixels as it is, as uint8 [H, W, 3].

    The result is only to be read, since an image may own the memory.
    """
    if isinstance(image, Tensor):
        return image
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that writing to it would be undefined
        return torch.from_numpy(np.asarray(image))
