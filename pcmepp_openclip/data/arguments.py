"""The flags of the training data, in addition to those of open_clip."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .captions import ALL, FIRST, MODES
from .decode import MAX_PIXELS

CAPTIONS_PER_IMAGE = 5  # as in COCO and Flickr30k
DECODING = EXACT, FAST, REDUCED = "exact", "fast", "reduced"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, as a group."""
    group = parser.add_argument_group("training data (webdataset)")
    group.add_argument(
        "--train-data-mix",
        metavar="NAME=X,...",
        help="relative share of each source in a resampled epoch, e.g. cc3m=1,redcaps=0.5",
    )
    group.add_argument(
        "--train-data-sizes",
        metavar="NAME=FILE,...",
        help="sizes.json of sources that have none next to their shards, such as pipes",
    )
    group.add_argument(
        "--train-data-max-bad-fraction",
        type=share,
        default=0.5,
        metavar="FRACTION",
        help="stop the run if a larger fraction of the samples is unusable (default: 0.5)",
    )
    group.add_argument(
        "--train-data-max-empty-shards",
        type=positive_number,
        default=10,
        metavar="N",
        help="stop the run after N consecutive shards of a source without a usable sample (default: 10)",
    )
    group.add_argument(
        "--train-data-retries",
        type=whole_number,
        default=5,
        metavar="N",
        help="attempts to resume a broken connection or command, with increasing waits (default: 5)",
    )
    group.add_argument(
        "--train-data-shuffle-buffer",
        type=positive_number,
        default=24_000,
        metavar="N",
        help="undecoded samples in the shuffle buffers of each rank (default: 24000)",
    )
    group.add_argument(
        "--train-data-max-pixels",
        type=positive_number,
        default=MAX_PIXELS,
        metavar="N",
        help=f"skip images with more pixels, without decoding them (default: {MAX_PIXELS})",
    )
    group.add_argument(
        "--train-data-decoding",
        choices=DECODING,
        default=FAST,
        help="how to make random resized crops: 'fast' (default) resizes by torch, so that pixels differ from "
        "open_clip's by rounding; 'reduced' also decodes large JPEGs at 1/2, 1/4 or 1/8 of their size; 'exact' gives "
        "open_clip's pixels",
    )
    group.add_argument(  # the older name, from when there were two ways
        "--train-data-reduced-decoding",
        action="store_const",
        const=REDUCED,
        dest="train_data_decoding",
        help="an older name of --train-data-decoding reduced",
    )
    group.add_argument(
        "--train-data-exif-orientation",
        action="store_true",
        help="rotate images according to their EXIF orientation; by default they are used as stored, as in open_clip",
    )
    group.add_argument(
        "--crop-sides",
        type=share,
        nargs=2,
        metavar=("LEAST", "MOST"),
        help="in place of open_clip's random resized crop, crop both sides of an image to one share of them between "
        "these, and squash the crop to the model's size; 0.6 1 in the code of PCME++'s authors",
    )
    group.add_argument("--flip", action="store_true", help="mirror each image with a probability of 1/2")
    group.add_argument(
        "--no-trim-captions",
        action="store_true",
        help="keep the padding of captions after the longest caption of a batch",
    )
    group = parser.add_argument_group("several captions per image, and noisy correspondence (webdataset)")
    group.add_argument(
        "--captions",
        choices=MODES,
        default=FIRST,
        help="if a sample has several captions, a list under 'captions' in its .json: use the .txt or the first one "
        "(default), draw one per epoch, or use all of them in every epoch",
    )
    group.add_argument(
        "--captions-per-image",
        type=positive_number,
        metavar="K",
        help=f"with --captions all: how often each image occurs per epoch, each time with another caption (default: "
        f"{CAPTIONS_PER_IMAGE})",
    )
    group.add_argument(
        "--multi-positives",
        action="store_true",
        help="with --captions all: the captions of an image come in the same batch, and all of them match all of its "
        "copies; needs --contrastive-weight 0",
    )
    group.add_argument(
        "--noise-ratio",
        type=share,
        default=0.0,
        metavar="FRACTION",
        help="give this fraction of the samples the captions of another one, for experiments with noisy "
        "correspondence (default: 0)",
    )
    group.add_argument(
        "--noise-seed", type=whole_number, metavar="N", help="which samples --noise-ratio takes (default: 0)"
    )
    group.add_argument(
        "--noise-per-caption",
        action="store_true",
        help="with --noise-ratio: exchange single captions, as the authors of PCME++ do, so that an image with several "
        "captions keeps some of them; by default all captions of an image move together",
    )


@dataclass(frozen=True)
class DataFlags:
    """The flags of open_clip and of this package that the training data depend on.

    The three places may hold credentials, so that `repr` leaves them out.
    """

    train_data: str | None = field(repr=False)
    val_data: str | None = field(repr=False)
    train_data_sizes: str | None = field(repr=False)
    dataset_type: str
    dataset_resampled: bool
    train_num_samples: int | None
    train_data_mix: str | None
    train_data_upsampling_factors: str | None
    train_data_max_bad_fraction: float
    train_data_max_empty_shards: int
    train_data_retries: int
    train_data_shuffle_buffer: int
    train_data_max_pixels: int
    train_data_decoding: str
    train_data_exif_orientation: bool
    crop_sides: list[float] | None
    flip: bool
    no_trim_captions: bool
    captions: str
    captions_per_image: int | None
    multi_positives: bool
    noise_ratio: float
    noise_seed: int | None
    noise_per_caption: bool
    model: str
    force_image_size: Any
    batch_size: int
    workers: int
    seed: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, unredacted: Mapping[str, str] | None = None) -> "DataFlags":
        """Take the flags from all arguments.

        Arguments:
            unredacted: the original values of redacted arguments, see `redact_args`.
        """
        values = {**vars(args), **(unredacted or {})}
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def reads_shards(self) -> bool:
        """Return whether the training data are webdataset shards. Anything else is read by open_clip."""
        if not self.train_data or self.dataset_type not in ("webdataset", "auto"):
            return False
        return self.dataset_type == "webdataset" or not re.search(r"\.[ct]sv$", self.train_data)

    @property
    def captions_per_epoch(self) -> int:
        """Return how often an image occurs in an exact pass, each time with another caption."""
        return (self.captions_per_image or CAPTIONS_PER_IMAGE) if self.captions == ALL else 1

    @property
    def rows(self) -> int:
        """Return the number of samples in a batch that are made from one image."""
        return self.captions_per_epoch if self.multi_positives else 1


def whole_number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def positive_number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return value
