"""The captions of a sample, and the choice of those that a batch gets.

A sample has a .txt, which is one caption, or a .json with "captions", a list of texts, or both; then those of the .json
are all of its captions, and the .txt is the one that is used where one is enough.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import defects
from .plan import seed_for
from .sources import shard_key

if TYPE_CHECKING:
    from .shards import Sample

TEXT_SUFFIX, JSON_SUFFIX = "txt", "json"
FIRST, DRAW, ALL = MODES = ("first", "draw", "all")


class Unusable(Exception):
    """A sample that cannot be used, with the cause."""

    def __init__(self, cause: str):
        super().__init__(cause)
        self.cause = cause


def read_captions(members: Mapping[str, bytes | None], every: bool = False) -> tuple[str, ...]:
    """Return the captions of a sample, at least one. Raises Unusable with the cause.

    Arguments:
        members: the contents by suffix, None for a member that is too large to be read.
        every: whether to return all captions, and not the .txt alone, or the first of the .json without a .txt.
    """
    if JSON_SUFFIX in members and (every or TEXT_SUFFIX not in members):
        captions = _of_json(members[JSON_SUFFIX])
        if captions:
            return captions if every else captions[:1]
    if TEXT_SUFFIX not in members:
        raise Unusable(defects.NO_CAPTION)
    data = members[TEXT_SUFFIX]
    if data is None:
        raise Unusable(defects.HUGE_FILE)
    try:
        caption = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise Unusable(defects.NOT_UTF8) from None
    if not caption.strip("\0"):
        raise Unusable(defects.EMPTY_CAPTION)
    return (caption,)


def _of_json(data: bytes | None) -> tuple[str, ...]:
    """Return the texts under "captions" without blank ones, or none if there is no such entry."""
    if data is None:
        raise Unusable(defects.HUGE_FILE)
    try:
        facts: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise Unusable(defects.BAD_CAPTIONS) from None
    entry = facts.get("captions") if isinstance(facts, dict) else None
    if entry is None:
        return ()
    if not isinstance(entry, list) or not all(isinstance(caption, str) for caption in entry):
        raise Unusable(defects.BAD_CAPTIONS)
    captions = (caption.strip() for caption in entry)
    return tuple(caption for caption in captions if caption.strip("\0"))


def sample_id(source: int, shard: str, key: str) -> int:
    """Return a number of 63 bits that identifies a sample, whatever folder its shard is in."""
    return seed_for("sample", source, shard_key(shard), key) >> 1


@dataclass(frozen=True)
class CaptionChoice:
    """The choice of the captions of a sample that a batch gets.

    It depends on seed, epoch and sample alone: neither on ranks, workers and the order of the samples, nor on whether
    the epoch was resumed.

    A sample with n captions, in pass p over the images, gets those at

        (h + p + i) mod n    for i = 0 .. rows - 1,    where h is a hash of seed, epoch and sample

    "draw" has one pass and one row; "all" has either k passes with one row, or one pass with k rows.

    Arguments:
        mode: one of `MODES`. "first" takes the only caption of a sample that is read with `every=False`.
        rows: the number of samples in a batch that are made from one image.
        exchanged: captions that take the place of a sample's own, by `sample_id`.
    """

    mode: str = FIRST
    seed: int = 0
    rows: int = 1
    exchanged: Mapping[int, tuple[str, ...]] = field(default_factory=dict, repr=False)

    @property
    def every(self) -> bool:
        """Return whether all captions of a sample have to be read."""
        return self.mode != FIRST

    def of(self, sample: "Sample", epoch: int) -> list[str]:
        """Return the captions of a sample that an epoch uses, `rows` of them."""
        captions = sample.captions
        if self.exchanged:
            captions = self.exchanged.get(sample_id(sample.source, sample.shard, sample.key), captions)
        if not self.every:
            return [captions[0]]
        start = seed_for("caption", self.seed, epoch, sample.source, shard_key(sample.shard), sample.key)
        return [captions[(start + sample.pass_index + i) % len(captions)] for i in range(self.rows)]
