"""Image bytes to an RGB image of bounded size, or the cause of the failure."""

import io
import warnings
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from . import defects

# Pillow picks a reader by content, not by name, and some of its readers start programs (Ghostscript for EPS).
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000
# The operation that makes an image upright, by EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(Exception):
    def __init__(self, cause: str):
        super().__init__(cause)
        self.cause = cause


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """Return an image of which only the header has been read. Raises BadImage with the cause."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise BadImage(defects.HUGE_IMAGE) from None
    except Image.UnidentifiedImageError:
        known = data[:3] == b"\xff\xd8\xff" or data[:4] in (b"\x89PNG", b"RIFF", b"GIF8")
        raise BadImage(defects.BROKEN_IMAGE if known or not data else defects.UNKNOWN_FORMAT) from None
    except Exception:
        raise BadImage(defects.BROKEN_IMAGE) from None
    if image.width * image.height > max_pixels:
        raise BadImage(defects.HUGE_IMAGE)
    return image


def decode_image(
    data: bytes, *, at_least: int | None = None, max_pixels: int = MAX_PIXELS, upright: bool = False
) -> Any:
    """Return an RGB image: the first frame of an animation, 16 bits scaled to 8. Raises BadImage with the cause.

    Arguments:
        at_least: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size by the codec itself, as long as both sides
            stay at least this long. None decodes every pixel.
        max_pixels: an image with more, according to its header, is not decoded.
        upright: rotate the image according to its EXIF orientation, which open_clip does not.
    """
    image = open_image(data, max_pixels)
    if at_least is not None:
        image.draft(None, (at_least, at_least))
    return load_image(image, upright)


def load_image(image: Any, upright: bool = False) -> Any:
    """Return an opened image decoded to RGB. Raises BadImage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            if not (image.width and image.height):
                raise BadImage(defects.BROKEN_IMAGE)
            return _to_rgb(_turned(image) if upright else image)
    except Exception:  # Pillow's plugins raise whatever the damage leads to
        raise BadImage(defects.BROKEN_IMAGE) from None


def is_turned(image: Any) -> bool:
    """Return whether an opened image has to be turned to be upright, by its EXIF orientation."""
    return _turn(image) is not None


def _turned(image: Any) -> Any:
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: Any) -> Any:
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # a damaged EXIF block is ignored
        return None


def _to_rgb(image: Any) -> Any:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # Pillow would clip 16 bits to white
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")
