"""Where the samples of a dataset lie: the images in tars and files are located, not read."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from webdataset.tariterators import base_plus_ext

from ..data.shards import IMAGE_SUFFIXES
from ..data.sources import expand, kind, local_path


class Place(NamedTuple):
    """Where the bytes of an image are: a file of its own, or a part of a tar."""

    file: str
    offset: int
    size: int

    def read(self) -> bytes:
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def image_file(path: Path) -> Place:
    return Place(os.path.abspath(path), 0, path.stat().st_size)


def shards_of_folder(folder: Path, split: str, flag: str) -> list[str]:
    """The shards of a split in clip_benchmark's layout."""
    count = folder / split / "nshards.txt"
    try:
        number = int(count.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{flag} {folder}: it has no {split}/nshards.txt; give a folder in clip_benchmark's layout or a pattern of "
            "shards, as in 'coco/{00..09}.tar'."
        ) from None
    except ValueError:
        raise ValueError(f"{flag} {folder}: {split}/nshards.txt must hold the number of shards.") from None
    return [str(folder / split / f"{i}.tar") for i in range(number)]


def shards_of_pattern(pattern: str, flag: str) -> list[str]:
    shards = expand(pattern, flag)
    for shard in shards:
        if kind(shard) != "local":
            raise ValueError(f"{flag}: evaluation reads local shards only; copy them to a disk first.")
    return [local_path(shard) for shard in shards]


def read_samples(shards: list[str], flag: str) -> Iterator[tuple[str, Place, dict[str, bytes]]]:
    """Key, image and small members of all samples. Images are only located: a plain tar needs no unpacking."""
    for shard in shards:
        key: str | None = None
        image: Place | None = None
        members: dict[str, bytes] = {}
        try:
            with tarfile.open(shard, "r:") as tar:
                for info in tar:
                    prefix, suffix = base_plus_ext(info.name)
                    if prefix is None or not info.isreg():
                        continue
                    if prefix != key:
                        if key is not None and image is not None:
                            yield key, image, members
                        key, image, members = prefix, None, {}
                    if suffix.lower() in IMAGE_SUFFIXES:
                        image = Place(os.path.abspath(shard), info.offset_data, info.size)
                    elif suffix in ("txt", "json", "cls"):
                        member = tar.extractfile(info)
                        assert member is not None
                        members[suffix] = member.read()
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{flag}: the shard {shard} cannot be read ({type(error).__name__}).") from None
        if key is not None and image is not None:
            yield key, image, members
