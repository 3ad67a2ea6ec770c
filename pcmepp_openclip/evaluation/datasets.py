"""What there is to evaluate on: where each image lies, its captions or its class. No image is read here.

A folder in clip_benchmark's layout serves both tools:

    FOLDER/test/nshards.txt, FOLDER/test/{0..}.tar     image (jpg, png, webp) + .txt, a caption a line: for retrieval
                                                       image + .cls, the index of a class: for zero-shot
    FOLDER/classnames.txt, FOLDER/zeroshot_classification_templates.txt      a line each; "{c}" is the class
    FOLDER/test/CLASS/*.jpg        in place of shards; CLASS is a line of classnames.txt or its number
    FOLDER/test/matches.json       optional: {"images_of_caption": [[0, 7], ...]}, all images that a caption truly fits

A sample's .json may hold "captions" in place of the .txt, and any other facts, which are kept.
"""

import json
import string
from dataclasses import dataclass, field
from pathlib import Path

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
from ..data.shards import IMAGE_SUFFIXES
from ..data.sources import shown


@dataclass
class Labelled:
    """Images of known classes, and the prompts to find the class by."""

    classes: list[str]
    templates: list[str] | None  # with "{c}"; None where the folder has none of its own
    images: list[ImageRef] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    facts: list[Facts] = field(default_factory=list)


class _MissingImage(ValueError):
    pass


def read_labelled(where: str, split: str = "test", flag: str = "--zeroshot") -> Labelled:
    """The images and classes of a folder in clip_benchmark's layout, or of a folder with one subfolder per class."""
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
    found = Labelled(classes, templates)
    for key, image, members in locate_samples(shards_of_folder(folder, split, flag), flag):
        label = members.get("cls", b"").decode("ascii", "replace").strip()
        if not label.isdigit() or len(label) > 18 or int(label) >= len(classes):
            raise ValueError(
                f"{flag} {where}: the image {shown(key)} is of no class (its .cls is '{shown(label)}'); "
                f"it must be an index from 0 to {len(classes) - 1}."
            )
        found.images.append(image)
        found.labels.append(int(label))
        found.facts.append(facts_of(members, key, flag))
    if not found.images:
        raise ValueError(f"{flag} {where}: there are no images in it.")
    return found


def read_karpathy(annotations: str, images: str, split: str = "test") -> Captioned:
    """COCO captions in Karpathy's split: dataset_coco.json, and the folder with COCO's val2014 (and train2014)."""
    try:
        entries = json.loads(Path(annotations).read_text(encoding="utf-8"))["images"]
        entries = [entry for entry in entries if entry["split"] == split]
        found = Captioned(coco_images=[], coco_captions=[])
        assert found.coco_images is not None and found.coco_captions is not None
        for entry in entries:
            path = Path(images) / entry.get("filepath", "") / entry["filename"]
            if not path.is_file():
                path = Path(images) / entry["filename"]
            if not path.is_file():
                raise _MissingImage(f"--coco-images {images}: {entry['filename']} is not in it.")
            sentences = entry["sentences"]
            captions = [" ".join(sentence["raw"].split()) for sentence in sentences]
            image_id, caption_ids = int(entry["cocoid"]), [int(sentence["sentid"]) for sentence in sentences]
            found.add(image_file(path), captions, {"key": path.stem})
            found.coco_images.append(image_id)
            found.coco_captions += caption_ids
    except _MissingImage:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--coco {annotations}: it is not Karpathy's dataset_coco.json ({type(error).__name__}: {error})."
        ) from None
    if not found.images:
        raise ValueError(f"--coco {annotations}: it has no images of the split '{split}'.")
    return found


def _check_template(template: str, where: str) -> None:
    """It is filled by str.format: anything but {c} would fail there, or reach into Python."""
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
    found = Labelled(classes or names, templates)
    labels = _labels(names, classes) if classes else range(len(names))
    if labels is None:
        raise ValueError(
            f"{flag} {folder}: the {len(names)} subfolders of {root} do not pair with the {len(found.classes)} lines "
            f"of {folder / 'classnames.txt'}: name each subfolder like its class, or number them from 0 in the order "
            "of the lines; without classnames.txt the subfolders name the classes."
        )
    for label, subfolder in zip(labels, subfolders, strict=True):
        for path in sorted(subfolder.rglob("*")):
            if is_other_image(path.name) and path.is_file():
                raise ValueError(
                    f"{flag} {folder}: {path.relative_to(root)} is not of a kind that is read "
                    f"(.{', .'.join(IMAGE_SUFFIXES)}): convert it, or take it out."
                )
            if path.suffix.lower().lstrip(".") in IMAGE_SUFFIXES:
                found.images.append(image_file(path))
                found.labels.append(label)
                found.facts.append({"key": str(path.relative_to(root))})
    if not found.images:
        raise ValueError(f"{flag} {folder}: there are no images in the subfolders of its classes.")
    return found


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
    """Return the lines of a file without blank ones at its end; ValueError if another one is blank, since lines are
    counted."""
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
