"""The loader that the training loop iterates over, if it is fed from a cache.

An epoch is a permutation of all samples by seed and epoch. Step i of all ranks takes the i-th part of it, and each rank
its share of that; the last part continues at the beginning of the permutation. So what was seen after some steps is a
beginning of the permutation, whatever the number of ranks and the batch size: an epoch can be continued with others.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..data.batches import TEXT_MULTIPLE
from ..data.plan import seed_for
from ..models.batches import CachedTokens
from .encode import without_traceback
from .store import Row, Rows

KIND = "cache"  # the kind of the state in a checkpoint; other loaders have other kinds


class BegunEpoch(NamedTuple):
    """An epoch that was begun before a restart.

    Arguments:
        seed: the seed of its permutation.
        first: the index of its first batch.
        seen: samples of the permutation before that batch, over all ranks.
    """

    epoch: int
    seed: int
    first: int
    seen: int


@dataclass
class EpochPlan:
    """The samples in each batch of a rank's epoch: iterating yields their numbers, from the first batch on.

    Arguments:
        count: number of all samples.
        per_epoch: samples per epoch, over all ranks, before the last batch is filled.
        position: the epoch, and the batch that it begins with.
        begun: the epoch that was begun before a restart, if it was.
    """

    count: int
    per_epoch: int
    batch_size: int
    rank: int
    world_size: int
    seed: int
    position: Callable[[], tuple[int, int]]
    begun: BegunEpoch | None = None

    @property
    def per_step(self) -> int:
        return self.batch_size * self.world_size

    @property
    def batches(self) -> int:
        return -(-self.per_epoch // self.per_step)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first_batch = self.position()
        rest = self.rest_of(epoch)
        order = permutation(self.count, rest.seed, epoch)
        for index in range(first_batch, self.batches):
            begin = rest.seen + (index - rest.first) * self.per_step + self.rank * self.batch_size
            yield order.take(range(begin, begin + self.batch_size), mode="wrap").tolist()

    def rest_of(self, epoch: int) -> BegunEpoch:
        """Return the rest of an epoch: all of it, unless it was begun before a restart."""
        return self.begun if self.begun and self.begun.epoch == epoch else BegunEpoch(epoch, self.seed, 0, 0)

    def go_on(self, epoch: int, seed: int, seen: int, multiple_of: int) -> tuple[int, str]:
        """Continue an epoch after `seen` of its samples; return its first batch, and in words how it continues."""
        first, more = divmod(seen, self.per_step)
        how = "with the samples that were left"
        if more or first % multiple_of:
            left = max(0, self.per_epoch - seen)
            first = max(0, self.batches - -(-left // self.per_step)) // multiple_of * multiple_of
            again = (self.batches - first) * self.per_step - left
            how = f"with the {left} samples that were left, dealt out anew; {again} are seen again"
        self.begun = BegunEpoch(epoch, seed, first, seen)
        return first, how


class CacheLoader:
    """Batches of cached tokens, (images, texts). The training loop reads `num_batches` and `num_samples`.

    Arguments:
        rows: the samples.
        contents: a digest that identifies the samples.
        context_length: the greatest length of a text.
        pad: the token id that fills shorter texts.
    """

    def __init__(self, rows: Rows, contents: str, plan: EpochPlan, workers: int, context_length: int, pad: int):
        self._contents, self._plan = contents, plan
        self.num_batches, self.num_samples = plan.batches, plan.batches * plan.per_step
        self._loader: DataLoader = DataLoader(
            cast(Dataset, rows),
            batch_size=None,
            sampler=plan,  # a batch is asked for by its samples, so the order is the same for any workers
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=functools.partial(batch_of, context_length=context_length, pad=pad),
            generator=torch.Generator(),  # leave the training process's random numbers alone
        )

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[CachedTokens, CachedTokens]]:
        return without_traceback(self._loader)

    def state(self, batches: int) -> dict[str, Any]:
        """Return the state by which `resume` continues after `batches` batches of this epoch, in plain types."""
        rest = self._plan.rest_of(self._plan.position()[0])
        seen = rest.seen + (batches - rest.first) * self._plan.per_step
        return {"kind": KIND, "contents": self._contents, "seed": rest.seed, "seen": seen}

    def resume(self, epoch: int, state: dict[str, Any] | None, multiple_of: int = 1) -> tuple[int | None, str]:
        """Continue an epoch where a loader with that state left off; see `data.loader.Loader.resume`."""
        if state is None or state["kind"] != KIND:
            return None, "its checkpoint does not say which samples of the cache were seen"
        if state["contents"] != self._contents:
            return None, "the cache does not hold the same samples"
        return self._plan.go_on(epoch, state["seed"], state["seen"], multiple_of)


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers below `count` in a random order. It sorts raw random bits: numpy promises that these stay
    the same in all of its versions, which it does not for its own permutations."""
    bits = np.random.PCG64(seed_for("cache", seed, epoch)).random_raw(count)
    return np.argsort(bits, kind="stable")


def batch_of(samples: Sequence[Row], context_length: int, pad: int) -> tuple[CachedTokens, CachedTokens]:
    """Return images and texts as a batch, with texts padded to the longest, rounded up to `TEXT_MULTIPLE`."""
    longest = max(len(sample["text_ids"]) for sample in samples)
    length = min(context_length, -(-longest // TEXT_MULTIPLE) * TEXT_MULTIPLE)
    more, width = len(samples[0]["text_x"]) - len(samples[0]["text_ids"]), samples[0]["text_x"].shape[1]
    x_NLC = torch.zeros(len(samples), length + more, width, dtype=torch.float16)
    text_NL = torch.full((len(samples), length), pad, dtype=torch.int64)
    for i, sample in enumerate(samples):
        x_NLC[i, : len(sample["text_x"])] = sample["text_x"]
        text_NL[i, : len(sample["text_ids"])] = sample["text_ids"]
    joined = {name: torch.cat([sample[name] for sample in samples]) for name in ("image_mean", "image_x", "text_mean")}
    return CachedTokens(joined["image_mean"], joined["image_x"]), CachedTokens(joined["text_mean"], x_NLC, text_NL)
