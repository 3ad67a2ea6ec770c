"""Shards to samples: the members of a tar are grouped by key, and every defect is noted.

The position of a sample in its shard counts the groups of members that the manifest does not list as unusable. It
depends on names only, so that samples can be skipped without reading them.
"""

import tarfile
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from . import defects, tars
from .captions import JSON_SUFFIX, TEXT_SUFFIX, Unusable, read_captions
from .defects import Note
from .resuming import LostShard, MissingShard
from .sizes import UNKNOWN_SIZE, ShardSize
from .sources import kind, label, shown
from .streams import open_shard

TEXT_SUFFIXES = (TEXT_SUFFIX, JSON_SUFFIX, "cls")  # the last is the index of a class
IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp")  # as in open_clip, in its order of preference
MAX_FILE_BYTES = 1 << 27  # the limit for an image: a JPEG within the limit of pixels is far smaller
MAX_TEXT_BYTES = 1 << 20


class Sample(NamedTuple):
    """A sample as read: undecoded image bytes, and one or more captions.

    Arguments:
        source: the index of its source.
        captions: see `captions.read_captions`.
        visit: the number of shards that its reader had opened.
        reread: whether it is read a second time in the epoch.
        pass_index: the pass over the images in which it is read, if the epoch has several, see `Shard`.
    """

    source: int
    shard: str
    key: str
    image: bytes
    captions: tuple[str, ...]
    visit: int
    reread: bool
    pass_index: int = 0

    @property
    def caption(self) -> str:
        """Return the first caption."""
        return self.captions[0]


@dataclass(frozen=True)
class Group:
    """The members of a tar that share a key.

    Arguments:
        index: its index in the shard, from 0.
        position: the number of usable groups of the shard before it.
        offset: the offset of its first header in bytes; None in a compressed tar, a pipe and the like.
        members: the contents by suffix; None if a content was not asked for, is too large, or elsewhere (a link).
        problem: the cause that makes it unusable as a whole, if there is one.
        places: offset and length of the bytes of its images in the tar, by suffix; empty if `offset` is None.
    """

    index: int
    position: int
    offset: int | None
    key: str
    members: dict[str, bytes | None]
    problem: str | None
    places: dict[str, tuple[int, int]]


def iter_samples(
    shard: str,
    note: Note,
    *,
    source: int = 0,
    visit: int = 0,
    reread: bool = False,
    pass_index: int = 0,
    every_caption: bool = False,
    start: int = 0,
    stop: int | None = None,
    size: ShardSize = UNKNOWN_SIZE,
    retries: int = 5,
    note_excess: bool = False,
) -> Iterator[Sample | None]:
    """Yield the samples at positions [start, stop) of a shard, None for an unusable one, which is noted.

    Arguments:
        note: a function that is called with (cause, samples lost, place) for every defect.
        every_caption: whether to read all captions of a sample, see `captions.read_captions`.
        size: the manifest's entry, with the groups that do not count as positions, and offsets of groups.
        note_excess: whether samples after `stop` mean that the shard was counted wrongly.
    """
    position, seen = 0, False
    groups = read_groups(shard, note, size, start, retries)
    try:
        for group in groups:
            seen = True
            if group.index in size.unusable:
                continue
            if stop is not None and group.position >= stop:
                if note_excess:
                    note(defects.MORE_THAN_COUNTED, 1, label(shard))
                return
            position = group.position + 1
            if group.position < start:
                continue
            try:
                image, captions = usable_pair(group, every_caption)
            except Unusable as error:
                note(error.cause, 1, f"{label(shard)} {shown(group.key)}")
                yield None
                continue
            yield Sample(source, shard, group.key, image, captions, visit, reread, pass_index)
        if stop is not None and position < stop:
            note(defects.FEWER_THAN_COUNTED, stop - max(position, start), label(shard))
    except ShardError as error:
        lost = 1 if stop is None else max(1, stop - max(position, start))
        note(error.cause if seen or error.cause != defects.TRUNCATED_SHARD else defects.NOT_A_TAR, lost, error.where)
    finally:
        groups.close()


def usable_pair(group: Group, every_caption: bool = False) -> tuple[bytes, tuple[str, ...]]:
    """Return the undecoded image and the captions of a group of members. Raises Unusable with the cause."""
    captions = usable_captions(group, every_caption)
    image = next((data for suffix in IMAGE_SUFFIXES if (data := group.members.get(suffix)) is not None), None)
    if image is None:
        raise Unusable(defects.HUGE_FILE)
    return image, captions


def usable_captions(group: Group, every: bool = False) -> tuple[str, ...]:
    """Return the captions of a group that has an image, read or not. Raises Unusable with the cause."""
    if group.problem:
        raise Unusable(group.problem)
    if not any(suffix in group.members for suffix in IMAGE_SUFFIXES):
        raise Unusable(defects.NO_IMAGE)
    return read_captions(group.members, every)


class ShardError(Exception):
    """Raised for a shard that cannot be read, or not to its end."""

    def __init__(self, cause: str, where: str):
        super().__init__(f"{cause}: {where}")
        self.cause, self.where = cause, where


def read_groups(
    shard: str,
    note: Note,
    size: ShardSize = UNKNOWN_SIZE,
    start: int = 0,
    retries: int = 5,
    images: bool = True,
) -> Generator[Group, None, None]:
    """Yield the groups of a shard in order, with contents from position `start` on. Raises ShardError if it is broken.

    Groups before `start` are left out if the manifest knows the offset of a later one.

    Arguments:
        images: whether to read the images' bytes.
    """
    first, offset = size.entry(start) if kind(shard) != "pipe" else (0, 0)

    def open_at(position: int) -> BinaryIO:
        return open_shard(shard, retries, lambda: note("retry", 0, label(shard)), position)

    try:
        if offset:
            with open_at(offset) as file:
                try:
                    tar = tars.open_tar(file, offset)
                except tars.ERRORS as error:
                    if isinstance(error, (MissingShard, LostShard)):
                        raise
                else:
                    yield from _group(tar, size.unusable, start, images, first)
                    return
        with open_at(0) as file:  # no offset is known, or the offsets belong to another file
            yield from _group(tars.open_tar(file), size.unusable, start, images)
    except MissingShard as error:
        raise ShardError(defects.MISSING_SHARD, str(error)) from None
    except LostShard as error:
        raise ShardError(defects.LOST_SHARD, str(error)) from None
    except tars.Expands as error:
        raise ShardError(defects.EXPANDS, f"{label(shard)}: {error}") from None
    except tars.ERRORS as error:
        why = str(error) if isinstance(error, tarfile.TarError) else type(error).__name__
        raise ShardError(defects.TRUNCATED_SHARD, f"{label(shard)}: {why}") from None


def _group(
    tar: tarfile.TarFile, unusable: Collection[int], start: int, images: bool, first: int = 0
) -> Iterator[Group]:
    """Yield the groups of a tar.

    Arguments:
        first: the index of the group that the tar begins with.
    """
    keys: set[str] = set()
    key, problem = None, None
    index, offset = first - 1, None
    position = first - sum(index_before < first for index_before in unusable)  # the position of the next usable group
    can_seek = tars.can_seek(tar)
    members: dict[str, bytes | None] = {}
    places: dict[str, tuple[int, int]] = {}
    try:
        for info in tars.members(tar):
            is_link = tars.is_link(info)
            if not (info.isreg() or is_link) or (parts := tars.split_name(info.name)) is None:
                continue
            prefix, suffix = parts[0], parts[1].lower()
            if is_link and suffix not in (*IMAGE_SUFFIXES, TEXT_SUFFIX, JSON_SUFFIX):
                continue
            if prefix != key or suffix in members:
                if key is not None:
                    yield Group(index, position, offset, key, members, problem, places)
                    position += index not in unusable
                key, members, places, index = prefix, {}, {}, index + 1
                offset = info.offset if can_seek else None
                problem = defects.DUPLICATE_KEY if key in keys else None
                keys.add(key)
            if is_link:
                problem = problem or defects.LINK
            wanted = position >= start and index not in unusable and not is_link
            if suffix in IMAGE_SUFFIXES:
                wanted = wanted and images
                if can_seek and not is_link:
                    places[suffix] = info.offset_data, info.size
            members[suffix] = _content(tar, info, suffix) if wanted else None
    except tars.ERRORS:
        if key is not None and TEXT_SUFFIX in members and any(suffix in members for suffix in IMAGE_SUFFIXES):
            yield Group(index, position, offset, key, members, problem, places)  # complete before the rest broke off
        raise
    if key is not None:
        yield Group(index, position, offset, key, members, problem, places)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo, suffix: str) -> bytes | None:
    limit = MAX_TEXT_BYTES if suffix in TEXT_SUFFIXES else MAX_FILE_BYTES if suffix in IMAGE_SUFFIXES else -1
    return None if info.size > limit else tars.content(tar, info)
