"""The validation data of a run: local shards are read as `pcmepp eval` reads them, with all captions of an image."""

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..data import validation as val
from ..data.captioned import Captioned, captioned_shards
from ..encode.encode import ImageDataset, image_batches
from ..host.data import validation_data

FLAG = "--val-data"
REMOTE = (
    "--val-data: shards that are not on a disk are read by open_clip, which leaves out samples that it cannot read and "
    "takes the .txt of an image as its one caption. Copy them to a disk to validate as pcmepp eval does."
)


class ValidationLoader:
    """The images of local shards with their first captions, in batches of pixels [N, C, H, W] and token ids [N, L].

    The shards are read when they are needed, which is on the rank that validates. A sample that would be left out is a
    ValueError.

    Arguments:
        where: the shards as they were given, for messages.
    """

    def __init__(
        self, shards: list[str], where: str, preprocess: Any, tokenizer: Any, batch_size: int, workers: int, device: str
    ):
        self.shards, self.where, self.preprocess, self.tokenizer = shards, where, preprocess, tokenizer
        self.batch_size, self.workers, self.device = batch_size, workers, device

    @functools.cached_property
    def captioned(self) -> Captioned:
        captioned = captioned_shards(self.shards, self.where, FLAG)
        logging.info("Validation: %d images with %d captions.", len(captioned.images), len(captioned.captions))
        return captioned

    @property
    def num_samples(self) -> int:
        return len(self.captioned.images)

    @property
    def facts(self) -> list[Any]:
        """Return the identity of the data, wherever their folder is: all captions, and key and size of each image."""
        captioned = self.captioned
        images = [[facts["key"], image.size] for facts, image in zip(captioned.facts, captioned.images, strict=True)]
        return [images, captioned.captions, captioned.image_of_caption]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        captioned = self.captioned
        first = dict(zip(reversed(captioned.image_of_caption), reversed(captioned.captions), strict=True))
        batches = self._batches(len(captioned.images))
        pixels = image_batches(ImageDataset(captioned.images, self.preprocess), batches, self.workers, self.device)
        for batch, pixels_NCHW in zip(batches, pixels, strict=True):
            yield pixels_NCHW, self.tokenizer([first[i] for i in batch])

    def texts(self) -> Iterator[Tensor]:
        """Yield the token ids of all captions, in batches."""
        captions = self.captioned.captions
        for batch in self._batches(len(captions)):
            yield self.tokenizer([captions[i] for i in batch])

    def _batches(self, count: int) -> list[list[int]]:
        return [list(range(i, min(i + self.batch_size, count))) for i in range(0, count, self.batch_size)]


def check(config: Any, val_data: str | None) -> None:
    """Raise ValueError for validation data that are missing or would be left out in part.

    Arguments:
        val_data: --val-data as the user wrote it; `config` has it without credentials.
    """
    val.check_validation(config, val_data)
    shards = val.local_shards(config.dataset_type, val_data)
    if shards is not None:
        captioned_shards(shards, str(val_data), FLAG)
    elif val.has_shards(config.dataset_type, val_data):
        print(f"pcmepp train: {REMOTE}", file=sys.stderr)


def maker(config: Any, val_data: str | None) -> Callable[..., Any] | None:
    """Return a function of (preprocess_fns, tokenizer) that makes the validation data, or None if open_clip does."""
    shards = val.local_shards(config.dataset_type, val_data)
    if shards is None:
        return None

    def make(preprocess_fns: Any, tokenizer: Any) -> Any:
        how = preprocess_fns[1], tokenizer, config.batch_size, config.workers, config.device
        return validation_data(ValidationLoader(shards, str(val_data), *how))

    return make


def digest(loader: Any) -> str:
    """Return a digest of the facts of a loader, which tells one validation set from another."""
    return hashlib.sha256(json.dumps(loader.facts, default=str).encode()).hexdigest()


def describe(loader: Any, val_data: str | None) -> None:
    """Give a loader of open_clip's the attribute `facts`: --val-data and, for a table, its rows."""
    rows = getattr(loader, "dataset", None)
    loader.facts = [val_data, getattr(rows, "images", None), getattr(rows, "captions", None)]
