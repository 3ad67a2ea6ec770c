"""The flags of the training data, in addition to those of open_clip: a table, with the checks of each."""

import re
from typing import Any

from ..system.flags import PUBLISHED, Flag, number
from .captions import ALL, FIRST, MODES
from .decode import MAX_PIXELS

CAPTIONS_PER_IMAGE = 5  # as in COCO and Flickr30k
DECODING = EXACT, FAST, REDUCED = "exact", "fast", "reduced"
share = number(float, 0, 1)


def reads_shards(dataset_type: str, train_data: str | None) -> bool:
    """Return whether the training data are webdataset shards. Anything else is read by open_clip."""
    if not train_data or dataset_type not in ("webdataset", "auto"):
        return False
    return dataset_type == "webdataset" or not re.search(r"\.[ct]sv$", train_data)


def captions_per_epoch(config: Any) -> int:
    """Return how often an image occurs in an exact pass, each time with another caption."""
    return (config.captions_per_image or CAPTIONS_PER_IMAGE) if config.captions == ALL else 1


def rows_per_image(config: Any) -> int:
    """Return the number of samples in a batch that are made from one image."""
    return captions_per_epoch(config) if config.multi_positives else 1


def _needs_shards(flag: str, config: Any) -> None:
    """Raise ValueError if the training data are no shards, which `flag` is about."""
    if not reads_shards(config.dataset_type, config.train_data):
        raise ValueError(f"{flag} needs shards: give them by --train-data and --dataset-type webdataset.")


def _check_mix(config: Any) -> str | None:
    if config.dataset_resampled and config.train_data_upsampling_factors is not None:
        return "Give --train-data-mix (by samples) or --train-data-upsampling-factors, not both."
    return _needs_resampling("--train-data-mix", config)


def check_upsampling(config: Any) -> str | None:
    """Return what is wrong with open_clip's flag about the mix."""
    if config.train_data_upsampling_factors is None:
        return None
    return _needs_resampling("--train-data-upsampling-factors", config)


def _needs_resampling(flag: str, config: Any) -> str | None:
    if config.dataset_resampled or not reads_shards(config.dataset_type, config.train_data):
        return None
    return f"{flag} needs --dataset-resampled: an exact pass sees every sample once."


def _check_crop_sides(config: Any) -> str | None:
    _needs_shards("--crop-sides", config)
    if not 0 < config.crop_sides[0] <= config.crop_sides[1]:
        return "--crop-sides takes the least share first, above 0: for example 0.6 1."
    return None


def _check_captions(config: Any) -> str | None:
    _needs_shards(f"--captions {config.captions}", config)
    if config.captions == ALL and config.dataset_resampled:
        return (
            "--captions all needs exact passes: drop --dataset-resampled, or choose --captions draw, which draws one."
        )
    return None


def _check_captions_per_image(config: Any) -> str | None:
    if config.captions != ALL:
        return "--captions-per-image is for --captions all: add that, or drop it."
    if config.captions_per_image < 2:
        return "--captions-per-image must be at least 2; --captions draw uses one per epoch."
    return None


def _check_multi_positives(config: Any) -> str | None:
    _needs_shards("--multi-positives", config)
    if config.captions != ALL:
        return "--multi-positives needs several captions of an image in a batch: add --captions all."
    rows = rows_per_image(config)
    if config.batch_size % rows:
        return (
            f"--batch-size {config.batch_size} must be a multiple of the {rows} captions per image with "
            "--multi-positives: change it, or --captions-per-image."
        )
    return None


def _needs_noise(flag: str, config: Any) -> str | None:
    return None if config.noise_ratio else f"{flag} has no effect without --noise-ratio: add that, or drop it."


TRAINING_DATA = (
    Flag(
        "--train-data-mix",
        None,
        "relative share of each source in a resampled epoch, e.g. cc3m=1,redcaps=0.5",
        metavar="NAME=X,...",
        record=PUBLISHED,
        check=_check_mix,
    ),
    Flag(
        "--train-data-sizes",
        None,
        "sizes.json of sources that have none next to their shards, such as pipes",
        metavar="NAME=FILE,...",
    ),
    Flag(
        "--train-data-max-bad-fraction",
        share,
        "stop the run if a larger fraction of the samples is unusable (default: 0.5)",
        default=0.5,
        metavar="FRACTION",
    ),
    Flag(
        "--train-data-max-empty-shards",
        number(int, 1),
        "stop the run after N consecutive shards of a source without a usable sample (default: 10)",
        default=10,
    ),
    Flag(
        "--train-data-retries",
        number(int, 0),
        "attempts to resume a broken connection or command, with increasing waits (default: 5)",
        default=5,
    ),
    Flag(
        "--train-data-shuffle-buffer",
        number(int, 1),
        "undecoded samples in the shuffle buffers of each rank (default: 24000)",
        default=24_000,
    ),
    Flag(
        "--train-data-max-pixels",
        number(int, 1),
        f"skip images with more pixels, without decoding them (default: {MAX_PIXELS})",
        default=MAX_PIXELS,
    ),
    Flag(
        "--train-data-decoding",
        None,
        "how to make random resized crops: 'fast' (default) resizes by torch, so that pixels differ from open_clip's "
        "by rounding; 'reduced' also decodes large JPEGs at 1/2, 1/4 or 1/8 of their size; 'exact' gives open_clip's "
        "pixels",
        choices=DECODING,
        default=FAST,
    ),
    Flag(  # the older name, from when there were two ways
        "--train-data-reduced-decoding",
        None,
        "an older name of --train-data-decoding reduced",
        action="store_const",
        const=REDUCED,
        dest="train_data_decoding",
    ),
    Flag(
        "--train-data-exif-orientation",
        bool,
        "rotate images according to their EXIF orientation; by default they are used as stored, as in open_clip",
    ),
    Flag(
        "--crop-sides",
        share,
        "in place of open_clip's random resized crop, crop both sides of an image to one share of them between these, "
        "and squash the crop to the model's size; 0.6 1 in the code of PCME++'s authors",
        nargs=2,
        metavar=("LEAST", "MOST"),
        check=_check_crop_sides,
    ),
    Flag(
        "--flip",
        bool,
        "mirror each image with a probability of 1/2",
        check=lambda config: _needs_shards("--flip", config),
    ),
    Flag("--no-trim-captions", bool, "keep the padding of captions after the longest caption of a batch"),
)
CAPTIONS = (
    Flag(
        "--captions",
        None,
        "if a sample has several captions, a list under 'captions' in its .json: use the .txt or the first one "
        "(default), draw one per epoch, or use all of them in every epoch",
        choices=MODES,
        default=FIRST,
        check=_check_captions,
    ),
    Flag(
        "--captions-per-image",
        number(int, 1),
        "with --captions all: how often each image occurs per epoch, each time with another caption (default: "
        f"{CAPTIONS_PER_IMAGE})",
        metavar="K",
        check=_check_captions_per_image,
    ),
    Flag(
        "--multi-positives",
        bool,
        "with --captions all: the captions of an image come in the same batch, and all of them match all of its "
        "copies; needs --contrastive-weight 0",
        check=_check_multi_positives,
    ),
    Flag(
        "--noise-ratio",
        share,
        "give this fraction of the samples the captions of another one, for experiments with noisy correspondence "
        "(default: 0)",
        default=0.0,
        metavar="FRACTION",
        check=lambda config: _needs_shards("--noise-ratio", config),
    ),
    Flag(
        "--noise-seed",
        number(int, 0),
        "which samples --noise-ratio takes (default: 0)",
        check=lambda config: _needs_noise("--noise-seed", config),
    ),
    Flag(
        "--noise-per-caption",
        bool,
        "with --noise-ratio: exchange single captions, as the authors of PCME++ do, so that an image with several "
        "captions keeps some of them; by default all captions of an image move together",
        check=lambda config: _needs_noise("--noise-per-caption", config),
    ),
)
FLAGS = {
    "training data (webdataset)": TRAINING_DATA,
    "several captions per image, and noisy correspondence (webdataset)": CAPTIONS,
}
