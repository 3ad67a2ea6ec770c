"""COCO and Flickr30k in Karpathy's splits to webdataset shards with all captions of each image.

python karpathy.py coco      dataset_coco.json      COCO/             /data/coco
python karpathy.py flickr30k dataset_flickr30k.json flickr30k-images/ /data/flickr30k

The images are in a folder, in its subfolders that the annotations name (COCO's train2014 and val2014), or in the .zip
files of that folder; or the path is a .zip file itself. They are copied as they are. A sample has KEY.jpg, KEY.txt with
its first caption, and KEY.json with all of them under "captions".

    OUTPUT/train/00000.tar, ...                     train, for COCO with restval, in an order shuffled once
    OUTPUT/val/0.tar, ..., OUTPUT/val/nshards.txt   val, in clip_benchmark's layout and the order of the file
    OUTPUT/test/0.tar, ..., OUTPUT/test/nshards.txt  test, in the same way

Complete shards are kept, so that an interrupted call can be repeated.
"""

import argparse
import io
import json
import os
import random
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

SPLITS = {"train": "train", "restval": "train", "val": "val", "test": "test"}  # the split of each image: the folder
PER_SHARD = 1000


class Images:
    """The files of a folder, or the members of .zip files, by name."""

    def __init__(self, place: Path):
        self.place = place
        archives = [place] if place.is_file() else sorted(place.glob("*.zip"))
        try:
            self._zips = [zipfile.ZipFile(archive) for archive in archives]
        except (OSError, zipfile.BadZipFile) as error:
            sys.exit(f"{place} has a .zip file that cannot be read ({error}): download it again.")
        self._members = {
            Path(name).name: (archive, name)
            for archive in self._zips
            for name in archive.namelist()
            if name[-1:] != "/"
        }

    def read(self, folder: str, name: str) -> bytes:
        for path in (self.place / folder / name, self.place / name):
            if path.is_file():
                return path.read_bytes()
        if name not in self._members:
            sys.exit(f"{self.place} does not contain {name}, neither as a file nor in a .zip: give the images' folder.")
        archive, member = self._members[name]
        try:
            return archive.read(member)
        except (OSError, zipfile.BadZipFile, EOFError) as error:
            sys.exit(f"{archive.filename} cannot be read ({error}): download it again.")


def read_annotations(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The images of each folder: file name, subfolder, captions and what else is worth keeping."""
    found: dict[str, list[dict[str, Any]]] = {folder: [] for folder in SPLITS.values()}
    try:
        for entry in json.loads(path.read_text(encoding="utf-8"))["images"]:
            captions = [" ".join(sentence["raw"].split()) for sentence in entry["sentences"]]
            facts = {"captions": [caption for caption in captions if caption], "split": entry["split"]}
            facts |= {name: entry[name] for name in ("cocoid", "imgid", "sentids") if name in entry}
            if not facts["captions"]:
                raise ValueError(f"{entry['filename']} has no caption")
            image = {
                "folder": Path(entry.get("filepath", "")).name,
                "name": Path(entry["filename"]).name,
                "facts": facts,
            }
            found[SPLITS[entry["split"]]].append(image)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        sys.exit(f"{path} does not hold Karpathy's annotations ({type(error).__name__}: {error}): download it again.")
    missing = [folder for folder, images in found.items() if not images]
    if missing:
        sys.exit(f"{path} has no images of {' and '.join(missing)}: is it Karpathy's file?")
    return found


def write_shard(path: Path, entries: list[dict[str, Any]], images: Images) -> None:
    """A tar that is either complete or not there."""
    temporary = path.with_suffix(".part")
    with tarfile.open(temporary, "w") as tar:
        for entry in entries:
            key, dot, suffix = entry["name"].partition(".")
            if not dot or suffix.lower() not in ("jpg", "jpeg", "png"):
                sys.exit(f"{entry['name']} is not called like an image: is it Karpathy's file?")
            members = {
                suffix.lower(): images.read(entry["folder"], entry["name"]),
                "txt": entry["facts"]["captions"][0].encode(),
                "json": json.dumps(entry["facts"]).encode(),
            }
            for name, data in members.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    os.replace(temporary, path)


def write_split(folder: Path, entries: list[dict[str, Any]], images: Images, per_shard: int, digits: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [entries[i : i + per_shard] for i in range(0, len(entries), per_shard)]
    for number, part in enumerate(tqdm(parts, desc=folder.name, unit="shard")):
        path = folder / f"{number:0{digits}d}.tar"
        if not path.exists():
            write_shard(path, part, images)
    return len(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=["coco", "flickr30k"])
    parser.add_argument("annotations", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--per-shard", type=int, default=PER_SHARD, metavar="N", help="default: 1000")
    args = parser.parse_args()
    if args.per_shard < 1:
        sys.exit("--per-shard must be at least 1.")
    for path in (args.annotations, args.images):
        if not path.exists():
            sys.exit(f"There is no {path}: download {args.dataset} first.")
    splits, images = read_annotations(args.annotations), Images(args.images)
    random.Random(0).shuffle(splits["train"])
    for split, entries in splits.items():
        digits = 5 if split == "train" else 1
        try:
            shards = write_split(args.output / split, entries, images, args.per_shard, digits)
            if split != "train":
                (args.output / split / "nshards.txt").write_text(f"{shards}\n")
        except OSError as error:
            sys.exit(f"{args.output} cannot be written to ({error.strerror}).")
        captions = sum(len(entry["facts"]["captions"]) for entry in entries)
        print(f"{args.output / split}: {len(entries)} images with {captions} captions in {shards} shards")


if __name__ == "__main__":
    main()
