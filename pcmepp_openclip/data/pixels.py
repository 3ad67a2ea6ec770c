"""An image file to pixels, in a worker, and pixels to the input of the model, in the training process.

Pixels leave the workers as uint8: a quarter of the bytes in shared memory, and on the way to a GPU.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import defects
from .crops import as_pixels
from .decode import BadImage, decode_image

if TYPE_CHECKING:
    from .batches import LoaderSpec

Normalization = tuple[Tensor, Tensor]
"""Mean and std of pixels in [0, 1], each [3, 1, 1]."""


def to_pixels(data: bytes, spec: "LoaderSpec") -> Tensor:
    """Return the pixels of an image file, uint8 [H, W, 3]. Raises BadImage.

    Without a normalization, return the output of the transform.
    """
    try:
        if spec.crop is not None:
            return spec.crop(data, spec.max_pixels, spec.upright)
        image = decode_image(data, at_least=spec.at_least, max_pixels=spec.max_pixels, upright=spec.upright)
        image = spec.transform(image)
        return image if spec.normalization is None else as_pixels(image)
    except BadImage:
        raise
    except Exception:  # some transforms cannot take every image, such as one of a single row
        raise BadImage(defects.UNFIT_IMAGE) from None


def normalize(pixels_NHWC: Tensor, normalization: Normalization | None) -> Tensor:
    """Return (x / 255 - mean) / std of uint8 pixels as fp32 [N, 3, H, W], or the input without a normalization.

    The numbers are those of torchvision's ToTensor and Normalize to 1e-6, in fewer passes.
    """
    if normalization is None:
        return pixels_NHWC
    mean, std = (part.to(pixels_NHWC.device) for part in normalization)
    image_NCHW = torch.empty(pixels_NHWC.permute(0, 3, 1, 2).shape, device=pixels_NHWC.device)
    image_NCHW.copy_(pixels_NHWC.permute(0, 3, 1, 2))
    return image_NCHW.mul_(1 / (255 * std)).add_(-mean / std)
