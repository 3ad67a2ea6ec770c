"""A cache to the DataInfo that open_clip's training loop takes; it is filled first if need be."""

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batches import LoaderSpec
from ..data.build import make_loader_spec
from ..data.crops import as_pixels
from ..data.pixels import Normalization, normalize
from ..data.spec import DataSpec
from ..data.tally import Tally
from ..models.cached import CachedTokens
from . import token_facts as facts
from .rows import Rows
from .store import Content, Footprint, Piece, Store, check_room, footprint_of, pieces_of, readable_size
from .token_loader import CacheLoader, EpochPlan, contents_of
from .token_pass import Ranks, fill


@dataclass(frozen=True)
class Towers:
    """Frozen towers, as a run computes them.

    Arguments:
        model: a PCME++ model after `freeze_towers`.
        config: the config that it was built from, without what only the loss depends on.
        precision: the run's --precision.
        autocast: a new context in which a run with that precision computes.
        dtype: of images; None for their own.
        normalization: of pixels, see `data.pixels`; None for images that come as the model takes them.
    """

    model: Any
    config: dict
    precision: str
    device: torch.device | str = "cpu"
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    dtype: torch.dtype | None = None
    normalization: Normalization | None = None

    def images(self, images: Tensor) -> CachedTokens:
        """Of images as a batch of the loader has them, see `data.batches.Batch`."""
        image_NCHW = normalize(images.to(self.device), self.normalization).to(self.dtype)
        with self.autocast():
            return self.model.cache_image(image_NCHW)

    def texts(self, texts: Tensor) -> tuple[CachedTokens, Tensor]:
        """Of token ids [N, L], and how many tokens of each text count, [N]."""
        texts = texts.to(self.device)
        with self.autocast():
            return self.model.cache_text(texts), self.model.text_lengths(texts)

    def footprint(self, image: Tensor, text: Tensor) -> Footprint:
        """Of a batch of one image, and a text of the full length [1, L]."""
        return footprint_of(self.images(image), self.texts(text)[0])


def train_data(
    folder: Path, spec: DataSpec, towers: Towers, transform: Any, epoch: int, tokenizer: Any, ranks: Ranks
) -> Any:
    """The training data of a run, from a cache of the towers' output in `folder`, which is filled first if need be.

    Arguments:
        transform: the preprocessing of images without augmentation.
    """
    from ..host import data as host_data

    reading = make_loader_spec(spec, transform, tokenizer, rank=ranks.rank, ranks=ranks.world_size)
    towers = replace(towers, normalization=reading.normalization)
    store = _filled(folder, spec, reading, towers, ranks)
    contents = _contents(store)
    counts = [content.samples for content in contents]
    total = Tally()
    for content in contents:
        total.add(content.tally)
    if ranks.rank == 0:
        for line in total.lines(list(reading.names)):
            logging.info("Cache: %s", line)
    total.judge(list(reading.names), spec.flags.train_data_max_bad_fraction, 1)
    if not sum(counts):
        raise ValueError(f"--cache-tokens {folder} has no usable sample: run `pcmepp data check` on --train-data.")
    flags, position = spec.flags, host_data.Position(epoch)
    per_epoch = spec.filled(flags.train_num_samples or sum(counts))
    plan = EpochPlan(
        sum(counts), per_epoch, flags.batch_size, ranks.rank, ranks.world_size, seed=flags.seed, position=position
    )
    rows = Rows([store.path(x) for x in store.pieces], counts, reading.context_length, towers.model.text_pad_id)
    loader = CacheLoader(rows, contents_of(store.identity, counts), plan, flags.workers)
    return host_data.TrainData(dataloader=loader, shared_epoch=position.epoch, position=position)


def _filled(folder: Path, spec: DataSpec, reading: LoaderSpec, towers: Towers, ranks: Ranks) -> Store:
    """The store with all of its files."""
    footprint = _measured(reading, towers)
    pieces = pieces_of(reading.shards, footprint)
    prepared: tuple[str, list[Piece]] | str = ("", [])
    if ranks.rank == 0:
        try:
            prepared = _prepare(folder, pieces, footprint, reading, towers)
        except ValueError as error:
            prepared = str(error)
    prepared = ranks.gather(prepared)[0]
    if isinstance(prepared, str):
        raise ValueError(prepared)
    identity, missing = prepared
    store = Store(folder, identity, pieces)
    if missing:
        fill(store, missing, reading, towers, spec.flags.workers, ranks, spec.flags.train_data_max_bad_fraction)
    return store


def _measured(reading: LoaderSpec, towers: Towers) -> Footprint:
    from PIL import Image

    image = reading.transform(Image.new("RGB", (256, 256)))
    pixels = image if reading.normalization is None else as_pixels(image)
    return towers.footprint(pixels[None], reading.tokenizer([""]))


def _prepare(
    folder: Path, pieces: list[Piece], footprint: Footprint, reading: LoaderSpec, towers: Towers
) -> tuple[str, list[Piece]]:
    """The identity of the cache and the pieces that it lacks; ValueError if it cannot be used or filled."""
    logging.info("Cache: local shards are read for their digests, unless these are known.")
    read = facts.read_shards(folder, reading.shards)
    found = facts.facts_of(towers.model, towers.config, towers.precision, reading, read)
    facts.check_facts(folder, found, read)
    identity = facts.identity_of(found)
    missing = Store(folder, identity, pieces).missing()
    samples, lacking = sum(map(len, pieces)), sum(map(len, missing))
    logging.info(
        "Cache: augmentations are off: the tokens are computed once, with the preprocessing of the validation."
    )
    if not missing:
        logging.info("Using the cache %s, which holds the tokens of %d samples.", folder, samples)
        return identity, missing
    free = check_room(folder, lacking * footprint.total)
    logging.info(
        "Cache: the tokens of %d samples will be written to %s: %s for images and at most %s for texts; %s are free.%s",
        *(lacking, folder, readable_size(lacking * footprint.image), readable_size(lacking * footprint.text)),
        *(readable_size(free), f" {samples - lacking} samples are there already." if samples > lacking else ""),
    )
    return identity, missing


def _contents(store: Store) -> list[Content]:
    contents = []
    for piece in store.pieces:
        content = store.content(piece)
        if content is None:
            raise ValueError(f"{store.path(piece)} is missing or damaged: all ranks must see --cache-tokens.")
        contents.append(content)
    return contents
