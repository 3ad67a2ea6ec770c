"""A check of the validation data before a model is built, since they are needed after the first epoch only."""

import argparse
import os
from dataclasses import dataclass, field, fields

from .sources import expand, kind, label, local_path, shown


@dataclass(frozen=True)
class ValidationFlags:
    """The flags of open_clip about validation.

    Arguments:
        val_data: shards or a table, which may hold credentials, so that `repr` leaves it out; None for none.
        imagenet_val: a folder with one subfolder of images per class; None for none.
        csv_img_key, csv_caption_key, csv_separator: the columns and the separator of a table.
    """

    val_data: str | None = field(repr=False)
    imagenet_val: str | None
    dataset_type: str
    csv_img_key: str
    csv_caption_key: str
    csv_separator: str

    @classmethod
    def from_args(cls, args: argparse.Namespace, val_data: str | None) -> "ValidationFlags":
        """Take the flags from all arguments.

        Arguments:
            val_data: the value of --val-data as the user wrote it; `args` has it without credentials.
        """
        names = [each.name for each in fields(cls) if each.name != "val_data"]
        return cls(val_data, **{name: getattr(args, name) for name in names})

    @property
    def is_table(self) -> bool:
        named_so = (self.val_data or "").endswith((".csv", ".tsv"))
        return self.dataset_type == "csv" or (self.dataset_type == "auto" and named_so)

    @property
    def has_shards(self) -> bool:
        return bool(self.val_data) and self.dataset_type != "synthetic" and not self.is_table

    @property
    def local_shards(self) -> list[str] | None:
        """Return the paths of the shards, or None for a table, for other data, or if one shard is not local."""
        parts = (self.val_data or "").split("::")
        if not self.has_shards or any(kind(part) != "local" for part in parts):
            return None
        return [local_path(shard) for part in parts for shard in expand(part, "--val-data")]


def check_validation(flags: ValidationFlags) -> None:
    """Raise ValueError if --val-data or --imagenet-val is missing or unreadable; only local files are looked at."""
    if flags.val_data and flags.has_shards:
        _check_shards(flags.val_data)
    elif flags.val_data and flags.is_table and flags.dataset_type != "synthetic":
        _check_table(flags.val_data, flags)
    if flags.imagenet_val is not None:
        _check_classes(flags.imagenet_val)


def _check_shards(val_data: str) -> None:
    """Raise ValueError if a local shard of --val-data cannot be read."""
    parts = val_data.split("::")
    local = [part for part in parts if kind(part) == "local"]
    if len(local) < len(parts) and any("*" in part for part in local):
        raise ValueError("--val-data: beside remote shards * is not expanded: use braces, as in {00..09}.tar.")
    for shard in (shard for part in local for shard in expand(part, "--val-data")):
        try:
            with open(local_path(shard), "rb"):
                pass
        except OSError as error:
            raise ValueError(
                f"--val-data: {label(shard)} cannot be read ({error.strerror}); is the path right?"
            ) from None


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
            has_folder = any(entry.is_dir() for entry in entries)
    except OSError as error:
        raise ValueError(f"--imagenet-val {folder} cannot be read ({error.strerror}); is the path right?") from None
    if not has_folder:
        raise ValueError(f"--imagenet-val {folder}: it must hold one subfolder of images per class.")
