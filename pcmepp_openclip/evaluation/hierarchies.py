"""Chains of captions from vague to exact, as they are published: where the files are read, and the images located.

HierarCaps    hierarcaps_test.csv: a row has `captions`, four of them with " => " between, and `image_url`, which ends
              in the name of an image of COCO's val2014
HiMo-DOCCI    himo_docci_data.json: a line is {"img_path": "test_00000.jpg", "caption": ["...", "...", ...]}
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..data.captioned import ImageRef, image_file
from ..data.sources import shown

DEPTHS = 4  # of HierarCaps
MAX_FIELD = 1 << 20  # characters of a field of a CSV file


@dataclass
class Hierarchies:
    """Chains of captions; several may belong to one image. `images` is empty where none were given."""

    chains: list[list[str]] = field(default_factory=list)
    image_of_chain: list[int] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)


def read_hierarcaps(file: str, images: str | None, flag: str = "--hierarcaps") -> Hierarchies:
    """The chains of HierarCaps' CSV file; `images` is the folder of COCO's val2014, or the one that contains it."""

    def rows() -> Iterator[tuple[list[str], str]]:
        with open(file, encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                chain = [caption.strip() for caption in row["captions"].split("=>")]
                if len(chain) != DEPTHS:
                    raise ValueError(f"'{shown(row['captions'])}' has not {DEPTHS} captions with => between")
                yield chain, PurePosixPath(row["image_url"]).name

    return _read(rows(), file, images, flag, "HierarCaps' hierarcaps_test.csv")


def read_himo(file: str, images: str | None, flag: str = "--himo") -> Hierarchies:
    """The chains of HiMo-DOCCI's file of one JSON object per line; `images` is the folder of DOCCI's images."""

    def rows() -> Iterator[tuple[list[str], str]]:
        with open(file, encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row: Any = json.loads(line)
                if not isinstance(row["caption"], list) or not all(isinstance(text, str) for text in row["caption"]):
                    raise ValueError("a caption is not a list of texts")
                yield [caption.strip() for caption in row["caption"]], PurePosixPath(row["img_path"]).name

    return _read(rows(), file, images, flag, "HiMo-CLIP's himo_docci_data.json")


def _read(rows: Iterable[tuple[list[str], str]], file: str, images: str | None, flag: str, kind: str) -> Hierarchies:
    found, names = Hierarchies(), dict[str, int]()
    before = csv.field_size_limit(MAX_FIELD)
    try:
        for chain, name in rows:
            if not chain or not all(chain):
                raise ValueError("a caption is empty")
            found.chains.append(chain)
            found.image_of_chain.append(names.setdefault(name, len(names)))
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise ValueError(f"{flag} {file}: it is not {kind} ({reason}).") from None
    finally:
        csv.field_size_limit(before)
    if not found.chains:
        raise ValueError(f"{flag} {file}: there are no captions in it; give {kind}.")
    if images is not None:
        found.images = [_image(name, Path(images), f"{flag}-images") for name in names]
    return found


def _image(name: str, folder: Path, flag: str) -> ImageRef:
    for path in (folder / name, folder / "val2014" / name):
        if name and path.is_file():
            return image_file(path)
    raise ValueError(f"{flag} {folder}: {shown(name)} is not in it.")
