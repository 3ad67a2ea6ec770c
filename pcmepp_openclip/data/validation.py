"""Whether the validation data can be read, before a model is built: open_clip looks at them after the first epoch."""

import argparse
import os
from dataclasses import dataclass, field, fields

from .count import count_shard
from .sources import expand, kind, label, local_path, shown

FIRST_SAMPLES = 20  # of the first shard, of which one must be usable


@dataclass(frozen=True)
class ValidationFlags:
    """The flags of open_clip about validation.

    Arguments:
        val_data: shards or a table, which may hold credentials, so that `repr` leaves it out; None for none.
        imagenet_val: a folder with one subfolder of images per class; None for none.
        csv_img_key, csv_caption_key, csv_separator: of a table.
    """

    val_data: str | None = field(repr=False)
    imagenet_val: str | None
    dataset_type: str
    csv_img_key: str
    csv_caption_key: str
    csv_separator: str

    @classmethod
    def from_args(cls, args: argparse.Namespace, val_data: str | None) -> "ValidationFlags":
        """Arguments:
        val_data: as it was given; `args` has it without credentials.
        """
        names = [each.name for each in fields(cls) if each.name != "val_data"]
        return cls(val_data, **{name: getattr(args, name) for name in names})

    @property
    def is_table(self) -> bool:
        named_so = (self.val_data or "").endswith((".csv", ".tsv"))
        return self.dataset_type == "csv" or (self.dataset_type == "auto" and named_so)


def check_validation(flags: ValidationFlags, max_pixels: int) -> None:
    """ValueError if --val-data or --imagenet-val is missing or unreadable; only local files are looked at."""
    if flags.val_data and flags.dataset_type != "synthetic":
        if flags.is_table:
            _check_table(flags.val_data, flags)
        else:
            _check_shards(flags.val_data, max_pixels)
    if flags.imagenet_val is not None:
        _check_classes(flags.imagenet_val)


def _check_shards(val_data: str, max_pixels: int) -> None:
    """All must exist: open_clip skips what it cannot read, so that the numbers would be about fewer samples."""
    parts = [part for part in val_data.split("::") if kind(part) == "local"]
    if any("*" in part for part in parts):
        raise ValueError("--val-data is read by open_clip, which does not expand *: use braces, as in {00..09}.tar.")
    shards = [shard for part in parts for shard in expand(part, "--val-data")]
    for shard in shards:
        try:
            with open(local_path(shard), "rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"--val-data: {label(shard)} cannot be read ({error.strerror}); is the path right?"
            ) from None
    if shards:
        first = count_shard(shards[0], max_pixels, limit=FIRST_SAMPLES)
        if not first.usable:
            why = f" ({first.cause})" if first.cause else ""
            raise ValueError(
                f"--val-data: the first samples of {label(shards[0])} hold no pair of an image and a .txt{why}: give "
                "shards as in --train-data."
            )


def _check_table(path: str, flags: ValidationFlags) -> None:
    import pandas

    if kind(path) != "local":
        return
    try:
        table = pandas.read_csv(local_path(path), sep=flags.csv_separator, nrows=1)
    except OSError as error:
        raise ValueError(f"--val-data: {shown(path)} cannot be read ({error.strerror}); is the path right?") from None
    except ValueError as error:  # pandas' own errors, and bytes that are no text
        raise ValueError(f"--val-data: {shown(path)} is not a table ({type(error).__name__}).") from None
    for flag, key in (("--csv-img-key", flags.csv_img_key), ("--csv-caption-key", flags.csv_caption_key)):
        if key not in table:
            columns = ", ".join(shown(str(column)) for column in list(table)[:5])
            raise ValueError(
                f"--val-data: {shown(path)} has no column {shown(key)}, only {columns}: change {flag} or "
                "--csv-separator."
            )
    if table.empty:
        raise ValueError(f"--val-data: {shown(path)} has no rows.")
    image = str(table[flags.csv_img_key][0])
    if not os.path.exists(image):
        raise ValueError(f"--val-data: {shown(image)}, the first image of {shown(path)}, does not exist.")


def _check_classes(folder: str) -> None:
    try:
        with os.scandir(folder) as entries:
            found = any(entry.is_dir() for entry in entries)
    except OSError as error:
        raise ValueError(f"--imagenet-val {folder} cannot be read ({error.strerror}); is the path right?") from None
    if not found:
        raise ValueError(f"--imagenet-val {folder}: it must hold one subfolder of images per class.")
