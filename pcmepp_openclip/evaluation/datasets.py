"""The data to evaluate on: where each image lies, its captions or its class. No image is read here.

A folder in clip_benchmark's layout serves both tools:

    FOLDER/test/nshards.txt, FOLDER/test/{0..}.tar     image (jpg, png, webp) + .txt, a caption a line: for retrieval
                                                       image + .cls, the index of a class: for zero-shot
    FOLDER/classnames.txt, FOLDER/zeroshot_classification_templates.txt      a line each; "{c}" is the class
    FOLDER/test/CLASS/*.jpg        in place of shards; CLASS is a line of classnames.txt or its number
    FOLDER/test/matches.json       optional: {"images_of_caption": [[0, 7], ...]}, all images that a caption truly fits

A sample's .json may hold "captions" in place of the .txt, and any other facts, which are kept. Chains of captions from
vague to exact are read as they are published:

    HierarCaps    hierarcaps_test.csv: a row has `captions`, four of them with " => " between, and `image_url`, which
                  ends in the name of an image of COCO's val2014
    HiMo-DOCCI    himo_docci_data.json: a line is {"img_path": "test_00000.jpg", "caption": ["...", "...", ...]}
"""

import csv
import json
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..data.caption_table import check_local, check_readable, read_table
from ..data.captioned import (
    Captioned,
    Facts,
    ImageRef,
    facts_of,
    image_file,
    is_other_image,
    locate_samples,
    shards_of_folder,
    split_lines,
)
from ..data.noise import exchange
from ..data.shards import IMAGE_SUFFIXES
from ..data.sizes import read_sizes
from ..data.sources import label, local_path, parse_sources, shown

DEPTHS = 4  # A chain of HierarCaps has this many captions.
MAX_FIELD = 1 << 20  # A field of a CSV file has at most this many characters.


@dataclass
class Labelled:
    """Images of known classes, and the prompts to find the class by."""

    classes: list[str]
    templates: list[str] | None  # Each has "{c}"; None where the folder has none of its own.
    images: list[ImageRef] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)


def read_labelled(where: str, split: str = "test", flag: str = "--zeroshot") -> Labelled:
    """Read the images and classes of a folder in clip_benchmark's layout, or with one subfolder per class."""
    folder = Path(where)
    if not folder.is_dir():
        raise ValueError(f"{flag} {where}: there is no such folder.")
    classes, templates = _lines(folder / "classnames.txt"), _lines(folder / "zeroshot_classification_templates.txt")
    for template in templates or ():
        _check_template(template, f"{flag} {where}")
    if not (folder / split / "nshards.txt").is_file():
        return _image_folder(folder, split, classes, templates, flag)
    if not classes:
        raise ValueError(f"{flag} {where}: it has no classes; put their names into classnames.txt, one per line.")
    data = Labelled(classes, templates)
    for key, image, members in locate_samples(shards_of_folder(folder, split, flag), flag):
        index = members.get("cls", b"").decode("ascii", "replace").strip()
        if not index.isdigit() or len(index) > 18 or int(index) >= len(classes):
            raise ValueError(
                f"{flag} {where}: the image {shown(key)} is of no class (its .cls is '{shown(index)}'); "
                f"it must be an index from 0 to {len(classes) - 1}."
            )
        data.images.append(image)
        data.labels.append(int(index))
        data.facts.append(facts_of(members, key, flag))
    if not data.images:
        raise ValueError(f"{flag} {where}: there are no images in it.")
    return data


def read_karpathy(annotations: str, images: str, split: str = "test") -> Captioned:
    """Read COCO captions in Karpathy's split: dataset_coco.json, and the folder with COCO's val2014 (and train2014)."""
    data = Captioned(coco_images=[], coco_captions=[])
    assert data.coco_images is not None and data.coco_captions is not None
    try:
        entries = json.loads(Path(annotations).read_text(encoding="utf-8"))["images"]
        entries = [entry for entry in entries if entry["split"] == split]
        names = [(str(Path(entry.get("filepath", ""), entry["filename"])), entry["filename"]) for entry in entries]
        captions = [[" ".join(sentence["raw"].split()) for sentence in entry["sentences"]] for entry in entries]
        data.coco_images += [int(entry["cocoid"]) for entry in entries]
        data.coco_captions += [int(sentence["sentid"]) for entry in entries for sentence in entry["sentences"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--coco {annotations}: it is not Karpathy's dataset_coco.json ({type(error).__name__}: {error})."
        ) from None
    if not entries:
        raise ValueError(f"--coco {annotations}: it has no images of the split '{split}'.")
    for places, texts in zip(names, captions, strict=True):
        data.add(_image(Path(images), "--coco-images", *places), texts, {"key": Path(places[0]).stem})
    return data


def _check_template(template: str, where: str) -> None:
    """Check a template, which str.format fills: anything but {c} would fail there, or reach into Python."""
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(template)]
        fields = [field for field in fields if field[0] is not None]
    except ValueError:
        fields = [("", "", None)]
    if any(field != ("c", "", None) for field in fields):
        raise ValueError(f"{where}: the template '{shown(template)}' may have {{c}} for the class, no other braces.")
    if not fields:
        raise ValueError(f"{where}: the template '{shown(template)}' has no {{c}} for the class.")


def _image_folder(
    folder: Path, split: str, classes: list[str] | None, templates: list[str] | None, flag: str
) -> Labelled:
    root = folder / split if (folder / split).is_dir() else folder
    subfolders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not subfolders:
        raise ValueError(
            f"{flag} {folder}: it has no classes; it needs {split}/nshards.txt and classnames.txt, or a subfolder of "
            "images for each class."
        )
    names = [path.name.replace("_", " ") for path in subfolders]
    data = Labelled(classes or names, templates)
    labels = _labels(names, classes) if classes else range(len(names))
    if labels is None:
        raise ValueError(
            f"{flag} {folder}: the {len(names)} subfolders of {root} do not pair with the {len(data.classes)} lines "
            f"of {folder / 'classnames.txt'}: name each subfolder like its class, or number them from 0 in the order "
            "of the lines; without classnames.txt the subfolders name the classes."
        )
    for index, subfolder in zip(labels, subfolders, strict=True):
        for path in sorted(subfolder.rglob("*")):
            if is_other_image(path.name) and path.is_file():
                raise ValueError(
                    f"{flag} {folder}: {path.relative_to(root)} is not of a kind that is read "
                    f"(.{', .'.join(IMAGE_SUFFIXES)}): convert it, or take it out."
                )
            if path.suffix.lower().lstrip(".") in IMAGE_SUFFIXES:
                data.images.append(image_file(path))
                data.labels.append(index)
                data.facts.append({"key": str(path.relative_to(root))})
    if not data.images:
        raise ValueError(f"{flag} {folder}: there are no images in the subfolders of its classes.")
    return data


def _labels(names: list[str], classes: list[str]) -> list[int] | None:
    """Return the index of the class of each folder: by name, else by number, from 0 or from 1 on; None if neither
    pairs every folder with a class of its own."""
    keys, wanted = ([" ".join(name.replace("_", " ").split()) for name in some] for some in (names, classes))
    if sorted(keys) == sorted(wanted) and len(set(keys)) == len(keys):
        return [wanted.index(key) for key in keys]
    if all(name.isdecimal() for name in names):
        first = min(map(int, names))
        if first < 2 and sorted(map(int, names)) == list(range(first, first + len(classes))):
            return [int(name) - first for name in names]
    return None


def _lines(path: Path) -> list[str] | None:
    """Return the lines of a file without blank ones at its end, None without a file; raise a ValueError if another one
    is blank, since lines are counted."""
    if not path.is_file():
        return None
    try:
        text = path.read_bytes().decode().rstrip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8.") from None
    lines = split_lines(text) if text else []
    if "" in lines:
        raise ValueError(f"{path}: line {lines.index('') + 1} is blank: delete it, or write what belongs there.")
    return lines


@dataclass
class Hierarchies:
    """Chains of captions; several may belong to one image. `images` is empty where none were given."""

    chains: list[list[str]] = field(default_factory=list)
    image_of_chain: list[int] = field(default_factory=list)
    images: list[ImageRef] = field(default_factory=list)


def read_hierarcaps(file: str, images: str | None, flag: str = "--hierarcaps") -> Hierarchies:
    """Read the chains of HierarCaps' CSV file; `images` is COCO's val2014, or the folder that contains it."""

    def rows() -> Iterator[tuple[list[str], str]]:
        with open(file, encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                chain = [caption.strip() for caption in row["captions"].split("=>")]
                if len(chain) != DEPTHS:
                    raise ValueError(f"'{shown(row['captions'])}' has not {DEPTHS} captions with => between")
                yield chain, PurePosixPath(row["image_url"]).name

    return _read_chains(rows(), file, images, flag, "HierarCaps' hierarcaps_test.csv")


def read_himo(file: str, images: str | None, flag: str = "--himo") -> Hierarchies:
    """Read the chains of HiMo-DOCCI's file of one JSON object per line; `images` is the folder of DOCCI's images."""

    def rows() -> Iterator[tuple[list[str], str]]:
        with open(file, encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row: Any = json.loads(line)
                if not isinstance(row["caption"], list) or not all(isinstance(text, str) for text in row["caption"]):
                    raise ValueError("a caption is not a list of texts")
                yield [caption.strip() for caption in row["caption"]], PurePosixPath(row["img_path"]).name

    return _read_chains(rows(), file, images, flag, "HiMo-CLIP's himo_docci_data.json")


def _read_chains(
    rows: Iterable[tuple[list[str], str]], file: str, images: str | None, flag: str, kind: str
) -> Hierarchies:
    data, names = Hierarchies(), dict[str, int]()
    old_limit = csv.field_size_limit(MAX_FIELD)
    try:
        for chain, name in rows:
            if not chain or not all(chain):
                raise ValueError("a caption is empty")
            data.chains.append(chain)
            data.image_of_chain.append(names.setdefault(name, len(names)))
    except OSError as error:
        raise ValueError(f"{flag} {file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise ValueError(f"{flag} {file}: it is not {kind} ({reason}).") from None
    finally:
        csv.field_size_limit(old_limit)
    if not data.chains:
        raise ValueError(f"{flag} {file}: there are no captions in it; give {kind}.")
    if images is not None:
        data.images = [_image(Path(images), f"{flag}-images", name, f"val2014/{name}") for name in names]
    return data


def _image(folder: Path, flag: str, *names: str) -> ImageRef:
    """Return the first of these files that the folder has."""
    for path in (folder / name for name in names):
        if path.is_file():
            return image_file(path)
    raise ValueError(f"{flag} {folder}: {shown(Path(names[0]).name)} is not in it.")


@dataclass
class NoisyPairs:
    """Images with one caption each, and whether it is that of another image."""

    images: list[ImageRef]
    captions: list[str]
    wrong: list[bool]


def read_noisy_pairs(pattern: str, ratio: float, seed: int, flag: str = "--noisy-pairs") -> tuple[str, NoisyPairs]:
    """Return the names of the sources, and all pairs of counted local shards with their noise.

    Arguments:
        pattern: as in `--train-data`, whose noise depends on all sources and their order.
        ratio, seed: settings of the noise, see `exchange`.
    """
    sources = parse_sources(pattern, flag)
    for source in sources:
        check_local(source, flag)
    sizes = [read_sizes(source) for source in sources]
    givers = exchange(check_readable(sources, sizes, flag), ratio, seed)
    if not givers:
        raise ValueError(f"--noise-ratio {ratio:g} leaves all captions of {flag} where they are: raise it.")
    samples = {sample.number: sample for sample in read_table(sources, sizes, every=False, progress=True)}
    data = NoisyPairs([], [], [])
    for number, sample in samples.items():
        if sample.image is None:
            raise ValueError(f"{flag}: {label(sample.shard)} is compressed: unpack it first, as with gunzip.")
        giver = samples.get(givers.get(number, number), sample)
        data.images.append(ImageRef(local_path(sample.shard), *sample.image))
        data.captions.append(giver.captions[0])
        data.wrong.append(giver is not sample)
    return "+".join(source.name for source in sources), data
