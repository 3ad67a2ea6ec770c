"""JPEGs decoded by simplejpeg, if it is installed, without Pillow's detours over a stream and an image.

Both packages bring libjpeg-turbo along, and it gives both the same pixels. JPEGs that are not plain, or damaged, are
left to Pillow, which also names the cause.
"""

from typing import Any

from .decode import MAX_PIXELS

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

PLAIN = ("YCbCr", "Gray")  # colour spaces that become RGB as in Pillow


def jpeg_size(data: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return the height and width of a JPEG that can be decoded here, or None for anything else."""
    if simplejpeg is None or data[:2] != b"\xff\xd8":
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if colours in PLAIN and height * width <= min(max_pixels, MAX_PIXELS) else None


def decode_jpeg(data: bytes, height: int, width: int) -> Any | None:
    """Return RGB pixels as an array [H, W, 3] of that size, or None if decoding fails.

    The codec must be able to scale to the size.
    """
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    except ValueError:  # simplejpeg is strict, and never makes up the rest of an image
        return None
    return pixels if pixels.shape[:2] == (height, width) else None
