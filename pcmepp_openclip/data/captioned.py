"""Images with all of their captions, from shards on a disk: the images are located, not read."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from . import defects
from .shards import IMAGE_SUFFIXES, MAX_TEXT_BYTES, TEXT_SUFFIXES, Group, ShardError, read_groups
from .sources import expand, kind, label, local_path, shown

MAX_SHARDS = 1_000_000
OTHER_IMAGES = ("heic", "heif", "avif", "jxl", "svg")  # beside those that Pillow has a name for


class ImageRef(NamedTuple):
    """The place of the bytes of an image: a file of its own, or a part of a tar."""

    file: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


Facts = dict[str, Any]


@dataclass
class Captioned:
    """Images with one or more captions each, in reading order; captions are counted through all images."""

    images: list[ImageRef] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)
    image_of_caption: list[int] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)  # of each image, with its "key"
    images_of_caption: list[list[int]] | None = None  # the true matches, where they are known
    coco_images: list[int] | None = None  # COCO's ids, where it is COCO
    coco_captions: list[int] | None = None

    def add(self, image: ImageRef, captions: list[str], facts: Facts) -> None:
        self.image_of_caption += [len(self.images)] * len(captions)
        self.images.append(image)
        self.captions += captions
        self.facts.append(facts)


def image_file(path: Path) -> ImageRef:
    return ImageRef(os.path.abspath(path), 0, path.stat().st_size)


def shards_of_folder(folder: Path, split: str, flag: str) -> list[str]:
    """Return the shards of a split in clip_benchmark's layout."""
    count = folder / split / "nshards.txt"
    try:
        shards = int(count.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{flag} {folder}: it has no {split}/nshards.txt; give a folder in clip_benchmark's layout or a pattern of "
            "shards, as in 'coco/{00..09}.tar'."
        ) from None
    except ValueError:
        raise ValueError(f"{flag} {folder}: {split}/nshards.txt must hold the number of shards.") from None
    if not 0 < shards <= MAX_SHARDS:
        raise ValueError(f"{flag} {folder}: {split}/nshards.txt must hold a number from 1 to {MAX_SHARDS:,}.")
    return [str(folder / split / f"{i}.tar") for i in range(shards)]


def shards_of_pattern(pattern: str, flag: str) -> list[str]:
    shards = expand(pattern, flag)
    for shard in shards:
        if kind(shard) != "local":
            raise ValueError(f"{flag}: evaluation reads local shards only; copy them to a disk first.")
    return [local_path(shard) for shard in shards]


def is_other_image(name: str) -> bool:
    """Return whether a file is called like an image, but not of a kind that is read."""
    suffix = name.lower().rpartition(".")[2]
    return suffix not in IMAGE_SUFFIXES and (f".{suffix}" in Image.registered_extensions() or suffix in OTHER_IMAGES)


def locate_samples(shards: list[str], flag: str) -> Iterator[tuple[str, ImageRef, dict[str, bytes]]]:
    """Yield key, image and texts of all samples, as training groups them. Images are only located: a plain tar needs no
    unpacking. What would leave out an image, and change the numbers, is a ValueError.
    """
    for shard in shards:
        try:
            for group in read_groups(shard, lambda *_: None, images=False):
                yield from _located(group, shard, flag)
        except ShardError as error:
            if error.cause == defects.MISSING_SHARD:
                raise ValueError(f"{flag}: there is no file or folder {shard}.") from None
            why = error.where.removeprefix(f"{label(shard)}: ")
            raise ValueError(f"{flag}: the shard {shard} cannot be read ({error.cause}: {why}).") from None


def _located(group: Group, shard: str, flag: str) -> Iterator[tuple[str, ImageRef, dict[str, bytes]]]:
    """Yield the sample of a group, if it is meant to be one."""
    if group.offset is None:
        raise ValueError(f"{flag}: the shard {shard} cannot be read (it is compressed): unpack it, as with gunzip.")
    key, suffixes = shown(group.key), list(group.members)
    images = [suffix for suffix in IMAGE_SUFFIXES if suffix in group.members]
    texts = {suffix: group.members[suffix] for suffix in suffixes if suffix in TEXT_SUFFIXES}
    if group.problem == defects.LINK:
        linked = next(x for x in suffixes if x not in group.places and (x in images or texts.get(x, b"") is None))
        raise ValueError(
            f"{flag}: {key}.{linked} of {shard} is a link, not a file: write the shard again with "
            "`tar --dereference --hard-dereference`."
        )
    if group.problem == defects.DUPLICATE_KEY or len(images) > 1:
        raise ValueError(f"{flag}: {shard} has the key {key} twice: give each sample its own.")
    if not images and (texts or any(map(is_other_image, suffixes))):
        raise ValueError(
            f"{flag}: the sample {key} of {shard} has no image of a kind that is read (.{', .'.join(IMAGE_SUFFIXES)}), "
            f"only {', '.join(f'{key}.{shown(suffix)}' for suffix in suffixes[:5])}: convert it, or take it out."
        )
    for suffix, text in texts.items():
        if text is None:
            raise ValueError(f"{flag}: {key}.{suffix} of {shard} has more than {MAX_TEXT_BYTES >> 20} MB.")
    if images:
        image = ImageRef(os.path.abspath(shard), *group.places[images[0]])
        yield group.key, image, {suffix: text for suffix, text in texts.items() if text is not None}


def read_captioned(where: str, split: str = "test", flag: str = "--retrieval") -> Captioned:
    """Read the images and captions of a folder in clip_benchmark's layout, or of a pattern of shards."""
    folder = Path(where)
    shards = shards_of_folder(folder, split, flag) if folder.is_dir() else shards_of_pattern(where, flag)
    data = captioned_shards(shards, where, flag)
    if (matches := folder / split / "matches.json").is_file():
        data.images_of_caption = _matches(matches, data, flag)
    return data


def captioned_shards(shards: list[str], where: str, flag: str) -> Captioned:
    """Read the images and captions of shards. Whatever would leave out an image is a ValueError.

    Arguments:
        where, flag: the shards as they were given, and by which flag, for messages.
    """
    data = Captioned()
    for key, image, members in locate_samples(shards, flag):
        facts = facts_of(members, key, flag)
        captions = _captions(facts.pop("captions", None), members, key, flag)
        if not captions:
            raise ValueError(
                f"{flag} {where}: the image {shown(key)} has no caption; each needs a .txt with one caption per line."
            )
        data.add(image, captions, facts)
    if not data.images:
        raise ValueError(f"{flag} {where}: there are no images in it.")
    return data


def facts_of(members: dict[str, bytes], key: str, flag: str) -> Facts:
    try:
        facts = json.loads(members.get("json", b"{}"))
    except (ValueError, RecursionError):
        raise ValueError(f"{flag}: the .json of the image {shown(key)} is not JSON.") from None
    return {"key": key, **(facts if isinstance(facts, dict) else {})}


def _captions(captions: Any, members: dict[str, bytes], key: str, flag: str) -> list[str]:
    """Return the captions of the .json, else the lines of the .txt, without blank ones."""
    if captions is None or captions == []:
        captions = split_lines(members.get("txt", b"").decode("utf-8", "replace"))
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(
            f'{flag}: the captions of the image {shown(key)} must be a list of texts, as in ["a dog", "a black dog"].'
        )
    return [caption.strip() for caption in captions if caption.strip()]


def _matches(path: Path, data: Captioned, flag: str) -> list[list[int]]:
    try:
        matches = json.loads(path.read_text(encoding="utf-8"))["images_of_caption"]
        good = len(matches) == len(data.captions) and all(
            all(type(i) is int and 0 <= i < len(data.images) for i in images) and own in images
            for images, own in zip(matches, data.image_of_caption, strict=True)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise ValueError(
            f"{flag}: {path} must hold, for each of the {len(data.captions)} captions in order, the indices of the "
            "images it fits, its own among them."
        )
    return [sorted(set(images)) for images in matches]


def split_lines(text: str) -> list[str]:
    """Return the lines of a text, stripped. Only \\n and \\r\\n end a line: `str.splitlines` splits captions at U+2028
    and form feeds, too."""
    return [line.strip() for line in text.split("\n")]
