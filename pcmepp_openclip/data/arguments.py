"""The flags that the data has beside open_clip's own."""

import argparse

from .decode import MAX_PIXELS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them, as a group."""
    group = parser.add_argument_group("training data (webdataset)")
    group.add_argument(
        "--train-data-mix", metavar="NAME=X,...", help="share of each source in a resampled epoch: cc3m=1,redcaps=0.5"
    )
    group.add_argument(
        "--train-data-sizes",
        metavar="NAME=FILE,...",
        help="sizes.json of sources that have none beside their shards, such as pipes",
    )
    group.add_argument(
        "--train-data-max-bad-fraction",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="end the run when more of the samples than this are unusable (default: 0.5)",
    )
    group.add_argument(
        "--train-data-max-empty-shards",
        type=positive_number,
        default=10,
        metavar="N",
        help="end the run when N shards of a source in a row hold nothing usable (default: 10)",
    )
    group.add_argument(
        "--train-data-retries",
        type=whole_number,
        default=5,
        metavar="N",
        help="tries to take up a broken connection or command, with longer and longer waits (default: 5)",
    )
    group.add_argument(
        "--train-data-shuffle-buffer",
        type=positive_number,
        default=24_000,
        metavar="N",
        help="undecoded samples that each rank holds to shuffle (default: 24000)",
    )
    group.add_argument(
        "--train-data-max-pixels",
        type=positive_number,
        default=MAX_PIXELS,
        metavar="N",
        help=f"images with more are skipped undecoded (default: {MAX_PIXELS})",
    )
    group.add_argument(
        "--train-data-reduced-decoding",
        action="store_true",
        help="decode JPEGs much larger than the model's input at 1/2, 1/4 or 1/8 of their size",
    )
    group.add_argument(
        "--train-data-exif-orientation",
        action="store_true",
        help="turn images as their EXIF orientation says; without it they are taken as stored, as open_clip does",
    )
    group.add_argument(
        "--no-trim-captions",
        action="store_true",
        help="do not cut captions to the longest of the batch",
    )


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
