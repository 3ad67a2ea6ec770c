"""Samples to batches: what runs in a worker."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from . import defects
from .decode import BadImage, decode_image
from .feeds import ExactFeed, Guard, NothingUsable, Reader, ResampledFeed, UncountedFeed
from .plan import (
    ExactPass,
    Line,
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

TEXT_MULTIPLE = 8  # texts are cut to a multiple of it: few shapes
CHARACTERS_A_TOKEN = 16  # captions are cut to so many: a tokenizer takes quadratic time on endless words


@dataclass(frozen=True)
class LoaderSpec:
    """All that the batches of a rank depend on, except the epoch.

    Arguments:
        shards: of all sources, in order.
        names: of the sources.
        shares: the wanted mix of a resampled epoch, by source; None for an exact pass.
        samples: of an epoch, over all ranks, before the last batch is filled.
        batches: of the rank, in an epoch.
        shuffle: samples that wait in the shuffle buffers of the rank.
        max_empty_shards: so many in a row without a usable sample end the run.
        at_least, upright: see `decode_image`.
        transform: image to tensor [3, H, W]; or image to image, where there is a normalization.
        normalization: (mean, std) of pixels in [0, 1], [3, 1, 1] each.
        tokenizer: texts to token ids [N, L].
        pad: the token id that texts are padded with, to cut texts; None leaves them whole.
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
    normalization: tuple[Tensor, Tensor] | None
    tokenizer: Callable[[list[str]], Tensor]
    context_length: int
    pad: int | None

    @property
    def kind(self) -> str:
        """Of its epochs: random draws, an exact pass, or a walk over whole shards that were not counted."""
        return "draws" if self.shares is not None else "pass" if self.counted else "walk"

    @property
    def counted(self) -> bool:
        return all(shard.size is not None for shard in self.shards)


class Rest(NamedTuple):
    """What is left of an epoch that had begun with another seed, batch size or number of ranks.

    Arguments:
        first: the batch of the epoch, in batches of now, that it begins with.
    """

    epoch: int
    first: int
    line: Line


class Batch(NamedTuple):
    images: Tensor
    texts: Tensor
    tally: Tally


class Failure(NamedTuple):
    """Why a run must end, in one sentence. A message, since an exception would arrive as a worker's traceback."""

    message: str


class Lane:
    """The batches of one lane in one epoch, from `first_batch` of the rank on.

    Arguments:
        rest: what is left of the epoch, where it had begun otherwise.
    """

    def __init__(self, job: LoaderSpec, lane: int, epoch: int, first_batch: int, rest: "Rest | None" = None):
        self._job, self._lane, self._epoch, self._rest = job, lane, epoch, rest
        self.tally = Tally()
        self._guard = Guard(job.max_empty_shards)
        self._undecodable: set[tuple[int, str, str]] = set()
        skip = lane_batches(first_batch - (rest.first if rest else 0), job.lanes, lane) * job.batch_size
        self._feed = self._open(skip, first_batch)

    def _open(self, skip: int, first_batch: int) -> ExactFeed | ResampledFeed | UncountedFeed:
        job, size = self._job, buffer_size(self._job.shuffle, self._job.lanes)
        if job.shares is not None:
            # A resumed epoch goes on with fresh draws, else it would see the same samples again.
            rng = random.Random(seed_for("draw", job.seed, self._epoch, job.rank, self._lane, first_batch))
            shares = {number: share for number, share in enumerate(job.shares) if share}
            shards = {number: [shard for shard in job.shards if shard.source == number] for number in shares}
            visits = {number: endless_draws(shards[number], rng) for number in shares}
            sizes = [min(round(size * shares[number]), _total(shards[number])) for number in shares]
            return ResampledFeed(visits, list(shares.values()), sizes, self._reader, rng)
        rng = random.Random(order_seed(job.seed, self._epoch, job.rank, self._lane))
        if job.counted:
            line: Line = self._rest.line if self._rest else ExactPass(job.shards, job.seed, self._epoch)
            batches = job.batches - (self._rest.first if self._rest else 0)
            begin, fresh_end = fresh_slice(
                len(line), batches, job.lanes, self._lane, rank=job.rank, batch_size=job.batch_size
            )
            readers = self._reader(), self._reader(again=True)
            return ExactFeed(line, begin, fresh_end, size, skip, *readers, self._tally, rng)
        same = random.Random(seed_for("walk", job.seed, self._epoch))
        part, parts = job.rank * job.lanes + self._lane, job.world_size * job.lanes
        own, others = uncounted_walk(job.shards, same, part, parts)
        feed = UncountedFeed(own, others, size, self._reader(), self._reader(again=True), self._tally, rng)
        feed.take_batch(skip)
        return feed

    def _reader(self, again: bool = False) -> Reader:
        return Reader(self._tally, self._guard, self._job.retries, again)

    def _tally(self) -> Tally:
        return self.tally

    def next(self, number: int) -> Batch:
        """Batch `number` of the rank."""
        job, images, captions = self._job, [], []
        samples = self._feed.take_batch(job.batch_size)
        with _seeded(seed_for("transform", job.seed, self._epoch, job.rank, number)):
            for taken in samples:
                sample, image = self._usable(taken)
                images.append(image)
                captions.append(sample.caption[: CHARACTERS_A_TOKEN * job.context_length])
                self.tally.used[sample.source] += 1
        texts = job.tokenizer(captions)
        if job.pad is not None:
            texts = cut_texts(texts, job.pad)
        tally, self.tally = self.tally, Tally()
        return Batch(default_collate(images), texts, tally)  # in a worker, into shared memory at once

    def _usable(self, taken: Sample | None) -> tuple[Sample, Tensor]:
        """A sample with its transformed image, or another that stands in for it."""
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
        job, image, cause = self._job, None, defects.UNFIT_IMAGE
        if (sample.visit, sample.shard, sample.key) in self._undecodable:  # it stood in for another before
            return None
        try:
            options: dict[str, Any] = {"at_least": job.at_least, "max_pixels": job.max_pixels, "upright": job.upright}
            image = job.transform(decode_image(sample.image, **options))
            if job.normalization is not None:
                image = to_tensor(image, job.normalization)
        except BadImage as error:
            cause = error.cause
        except Exception:  # a transform that cannot take this image, such as one of a single row
            pass
        if image is None:
            self._undecodable.add((sample.visit, sample.shard, sample.key))
            once = int(sample.visit > 0)  # else it is read again, and was counted the first time
            self.tally.note(sample.source, cause, once, f"{label(sample.shard)} {shown(sample.key)}")
        self._guard.decoded(sample, image is not None)
        return image

    def close(self) -> None:
        self._feed.close()


def _total(shards: list[Shard]) -> int:
    """Samples of all; without counts, more than any buffer holds."""
    return sum(shard.size.samples if shard.size else sys.maxsize for shard in shards)


def to_tensor(image: Any, normalization: tuple[Tensor, Tensor]) -> Tensor:
    """An RGB image to [3, H, W], pixels in [0, 1] normalised by (mean, std): one pass less than step by step."""
    mean, std = normalization
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return torch.empty(pixels.shape).copy_(pixels).mul_(1 / (255 * std)).add_(-mean / std)


def cut_texts(texts: Tensor, pad: int) -> Tensor:
    """Token ids [N, L] without the columns that are padding in every row, L rounded up to a multiple of 8.

    Under a causal mask nothing that a text's tokens compute depends on what follows them.
    """
    used = (texts != pad).any(dim=0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    length = min(texts.shape[1], -(-length // TEXT_MULTIPLE) * TEXT_MULTIPLE)
    return texts[:, :length].contiguous()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of the transforms from `seed`; without workers this is the training process: leave no trace."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def lane_of(number: int, job: LoaderSpec, rest: Rest | None) -> int:
    """The lane that batch `number` of a rank's epoch comes from."""
    return (number - (rest.first if rest else 0)) % job.lanes


class WorkerBatches(IterableDataset):
    """The batches of one worker: those of the lanes that are its own, in the order of the epoch."""

    def __init__(
        self,
        job: LoaderSpec,
        worker: int,
        workers: int,
        position: Callable[[], tuple[int, int]],
        rest: Rest | None = None,
    ):
        """`position` gives the epoch and the batch to begin with, as the training process has set them."""
        self._job, self._worker, self._workers, self._position = job, worker, workers, position
        self._rest = rest

    def __iter__(self) -> Iterator[Batch | Failure]:
        epoch, first_batch = self._position()
        rest = self._rest if self._rest and self._rest.epoch == epoch else None
        lanes: dict[int, Lane] = {}
        try:
            for number in range(first_batch, self._job.batches):
                lane = lane_of(number, self._job, rest)
                if lane % self._workers == self._worker:
                    if lane not in lanes:
                        lanes[lane] = Lane(self._job, lane, epoch, first_batch, rest)
                    yield lanes[lane].next(number)
        except NothingUsable as error:
            tally = Tally()
            for opened in lanes.values():
                tally.add(opened.tally)
            yield Failure(_nothing_usable(self._job.names, error, tally))
        finally:
            for opened in lanes.values():
                opened.close()


def _nothing_usable(names: tuple[str, ...], error: NothingUsable, tally: Tally) -> str:
    name = names[error.source]
    found = ", ".join(
        f"{cause} (first: {where})" for (number, cause), where in tally.first.items() if number == error.source
    )
    return (
        f"--train-data: source '{name}' gave nothing usable in {error.shards} shards in a row: "
        f"{found or 'no samples'}; run `pcmepp data check` on it, or raise --train-data-max-empty-shards."
    )
