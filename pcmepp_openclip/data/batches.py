"""Samples to batches: the code that runs in a worker."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from .captions import CaptionChoice, sample_id
from .crops import RandomCrop
from .decode import BadImage
from .feeds import ExactFeed, Feed, Guard, NothingUsable, Reader, ResampledFeed, UncountedFeed
from .pixels import Normalization, to_pixels
from .plan import (
    ExactPass,
    SampleSequence,
    Shard,
    buffer_size,
    endless_draws,
    fresh_slice,
    lane_batches,
    order_seed,
    seed_for,
    uncounted_walk,
)
from .shards import Sample
from .sources import label, shown
from .tally import Tally

TEXT_MULTIPLE = 8  # texts are cut to a multiple of it, so that there are few different shapes
CHARACTERS_PER_TOKEN = 16  # captions are cut before they are tokenized, which takes quadratic time in long words


@dataclass(frozen=True)
class LoaderSpec:
    """Everything that the batches of a rank depend on, except for the epoch.

    Arguments:
        shards: the shards of all sources, in order.
        names: the names of the sources.
        shares: the wanted mix of a resampled epoch, by source; None for an exact pass.
        samples: images per epoch, in all of its passes and over all ranks, before the last batch is filled.
        batches: the rank's batches per epoch.
        batch_size: the images of a batch; each gives `captions.rows` samples.
        shuffle: the samples in the shuffle buffers of the rank.
        max_empty_shards: so many consecutive shards without a usable sample stop the run.
        at_least, upright: see `decode_image`.
        transform: a function from an image to a tensor [3, H, W], or to an image if there is a normalization.
        crop: replaces decoding and the transform if it can, see `crops`; None if it cannot.
        normalization: the normalization of pixels in the training process; None if the transform includes it.
        tokenizer: a function from texts to token ids [N, L].
        pad: the token id that texts are padded with, to remove padding; None keeps it.
        captions: which captions of a sample are used.
    """

    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    shares: tuple[float, ...] | None
    seed: int
    rank: int
    world_size: int
    batch_size: int
    samples: int
    batches: int
    lanes: int
    shuffle: int
    retries: int
    max_empty_shards: int
    max_pixels: int
    at_least: int | None
    upright: bool
    transform: Callable[[Any], Any]
    crop: RandomCrop | None
    normalization: Normalization | None
    tokenizer: Callable[[list[str]], Tensor]
    context_length: int
    pad: int | None
    captions: CaptionChoice

    @property
    def kind(self) -> str:
        """Return the kind of the epochs: random "draws", an exact "pass", or a "walk" over whole, uncounted shards."""
        return "draws" if self.shares is not None else "pass" if self.counted else "walk"

    @property
    def counted(self) -> bool:
        return all(shard.size is not None for shard in self.shards)


class RemainingEpoch(NamedTuple):
    """The part that is left of an epoch that began with another seed, batch size or number of ranks.

    Arguments:
        first: the index of its first batch, in batches of the present size.
        seed: the seed that the epoch began with, which its captions follow from to its end.
    """

    epoch: int
    first: int
    line: SampleSequence
    seed: int


class Batch(NamedTuple):
    """A batch as a worker delivers it.

    Arguments:
        images, texts: uint8 [n, H, W, 3], or [n, 3, H, W] without a normalization; and token ids [n, L].
        tally: the counts of used and unusable samples since the last batch.
        sample_id: int64 [n], equal for samples of the same image; None if each has its own.
    """

    images: Tensor
    texts: Tensor
    tally: Tally
    sample_id: Tensor | None = None


class Failure(NamedTuple):
    """The reason why a run must stop, in one sentence. An exception would arrive as the traceback of a worker."""

    message: str


class BatchStream:
    """The batches of one lane in one epoch, from the rank's batch `first_batch` on.

    Arguments:
        remaining: the remaining part of the epoch, if it began with other settings.
    """

    def __init__(
        self, spec: LoaderSpec, lane: int, epoch: int, first_batch: int, remaining: "RemainingEpoch | None" = None
    ):
        self._spec, self._lane, self._epoch, self._remaining = spec, lane, epoch, remaining
        self.tally = Tally()
        self._guard = Guard(spec.max_empty_shards)
        self._undecodable: set[tuple[bool, int, str, str]] = set()
        self._captions = replace(spec.captions, seed=remaining.seed) if remaining else spec.captions
        skip = lane_batches(first_batch - (remaining.first if remaining else 0), spec.lanes, lane) * spec.batch_size
        self._feed = self._open(skip, first_batch)

    def _open(self, skip: int, first_batch: int) -> Feed:
        spec, size = self._spec, buffer_size(self._spec.shuffle, self._spec.lanes)
        if spec.shares is not None:
            # A resumed epoch continues with new draws. Otherwise it would see the same samples again.
            rng = random.Random(seed_for("draw", spec.seed, self._epoch, spec.rank, self._lane, first_batch))
            shares = {source: share for source, share in enumerate(spec.shares) if share}
            shards = {source: [shard for shard in spec.shards if shard.source == source] for source in shares}
            visits = {source: endless_draws(shards[source], rng) for source in shares}
            sizes = [min(round(size * shares[source]), _total(shards[source])) for source in shares]
            return ResampledFeed(visits, list(shares.values()), sizes, self._reader, rng)
        rng = random.Random(order_seed(spec.seed, self._epoch, spec.rank, self._lane))
        if spec.counted:
            line: SampleSequence = (
                self._remaining.line if self._remaining else ExactPass(spec.shards, spec.seed, self._epoch)
            )
            batches = spec.batches - (self._remaining.first if self._remaining else 0)
            begin, fresh_end = fresh_slice(
                len(line), batches, spec.lanes, self._lane, rank=spec.rank, batch_size=spec.batch_size
            )
            readers = self._reader(), self._reader(reread=True)
            return ExactFeed(line, begin, fresh_end, size, skip, *readers, self.tally, rng)
        same = random.Random(seed_for("walk", spec.seed, self._epoch))
        part, parts = spec.rank * spec.lanes + self._lane, spec.world_size * spec.lanes
        own, others = uncounted_walk(spec.shards, same, part, parts)
        feed = UncountedFeed(own, others, size, self._reader(), self._reader(reread=True), self.tally, rng)
        feed.take_batch(skip)
        return feed

    def _reader(self, reread: bool = False) -> Reader:
        return Reader(self.tally, self._guard, self._spec.retries, reread, self._spec.captions.every)

    def next(self, index: int) -> Batch:
        """Return the batch of that index in the rank's epoch."""
        spec, images, captions, ids = self._spec, [], [], []
        several = spec.captions.rows > 1
        samples = self._feed.take_batch(spec.batch_size)
        with _seeded(seed_for("transform", spec.seed, self._epoch, spec.rank, index)):
            for taken in samples:
                sample, image = self._usable(taken)
                for caption in self._captions.of(sample, self._epoch):
                    images.append(image)
                    captions.append(caption[: CHARACTERS_PER_TOKEN * spec.context_length])
                    ids.append(sample_id(sample.source, sample.shard, sample.key) if several else 0)
                self.tally.used[sample.source] += 1
        texts = spec.tokenizer(captions)
        if spec.pad is not None:
            texts = cut_texts(texts, spec.pad)
        image_ids = torch.tensor(ids) if several else None
        images = default_collate(images)  # a worker puts them into shared memory at once
        return Batch(images, texts, self.tally.take(), image_ids)

    def _usable(self, taken: Sample | None) -> tuple[Sample, Tensor]:
        """Return a sample with its transformed image, or another sample that stands in for it."""
        sample, attempt = taken, 0
        while True:
            image = None if sample is None else self._decode(sample)
            if sample is not None and image is not None:
                if attempt and self._feed.stand_ins_repeat:
                    self.tally.stood_in += 1
                return sample, image
            sample = self._feed.stand_in(sample, attempt)
            attempt += 1

    def _decode(self, sample: Sample) -> Tensor | None:
        spec, image, cause = self._spec, None, ""
        identity = (sample.reread, sample.visit, sample.shard, sample.key)
        if identity in self._undecodable:  # it was tried before, as a stand-in
            return None
        try:
            image = to_pixels(sample.image, spec)
        except BadImage as error:
            cause = error.cause
        if image is None:
            self._undecodable.add(identity)
            self.tally.note(sample.source, cause, int(not sample.reread), f"{label(sample.shard)} {shown(sample.key)}")
        self._guard.decoded(sample, image is not None)
        return image

    def close(self) -> None:
        self._feed.close()


def _total(shards: list[Shard]) -> int:
    """Return the samples of all shards or, without counts, more than any buffer holds."""
    return sum(shard.size.samples if shard.size else sys.maxsize for shard in shards)


def cut_texts(texts: Tensor, pad: int) -> Tensor:
    """Return token ids [N, L] without the last columns that are padding in every row. L becomes a multiple of 8.

    With a causal mask, the features of a text do not depend on the tokens after it.
    """
    used = (texts != pad).any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    length = min(texts.shape[1], -(-length // TEXT_MULTIPLE) * TEXT_MULTIPLE)
    return texts[:, :length].contiguous()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of the transforms, and restore them: without workers this is the training process.

    `torch.manual_seed` would seed the GPUs as well, and in a worker, where they are not in use, keep a list of that.
    """
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def lane_of(index: int, spec: LoaderSpec, remaining: RemainingEpoch | None) -> int:
    """Return the lane that a batch of a rank's epoch comes from, by the batch's index."""
    return (index - (remaining.first if remaining else 0)) % spec.lanes


class WorkerBatches(IterableDataset):
    """The batches of one worker: those of its lanes, in the order of the epoch."""

    def __init__(
        self,
        spec: LoaderSpec,
        worker: int,
        workers: int,
        position: Callable[[], tuple[int, int]],
        remaining: RemainingEpoch | None = None,
    ):
        """Set the place of the worker.

        Arguments:
            position: a function that returns the epoch and its first batch, as set by the training process.
        """
        self._spec, self._worker, self._workers, self._position = spec, worker, workers, position
        self._remaining = remaining

    def __iter__(self) -> Iterator[Batch | Failure]:
        epoch, first_batch = self._position()
        remaining = self._remaining if self._remaining and self._remaining.epoch == epoch else None
        lanes: dict[int, BatchStream] = {}
        try:
            for index in range(first_batch, self._spec.batches):
                lane = lane_of(index, self._spec, remaining)
                if lane % self._workers == self._worker:
                    if lane not in lanes:
                        lanes[lane] = BatchStream(self._spec, lane, epoch, first_batch, remaining)
                    yield lanes[lane].next(index)
        except NothingUsable as error:
            tally = Tally()
            for opened in lanes.values():
                tally.add(opened.tally)
            yield Failure(nothing_usable(self._spec.names, error, tally))
        finally:
            for opened in lanes.values():
                opened.close()


def nothing_usable(names: tuple[str, ...], error: NothingUsable, tally: Tally) -> str:
    """Return the sentence that stops a run whose source has no usable sample in many shards."""
    name = names[error.source]
    causes = ", ".join(
        f"{cause} (first: {where})" for (source, cause), where in tally.first.items() if source == error.source
    )
    return (
        f"--train-data: source '{name}' has no usable sample in {error.shards} consecutive shards: "
        f"{causes or 'no samples'}; run `pcmepp data check` on it, or raise --train-data-max-empty-shards."
    )
