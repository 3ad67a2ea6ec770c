"""A check of the validation data before a model is built, since they are needed after the first epoch only."""

import os
from typing import Any

from .sources import expand, kind, label, local_path, shown


def is_table(dataset_type: str, val_data: str) -> bool:
    """Return whether open_clip reads the validation data as a table."""
    return dataset_type == "csv" or (dataset_type == "auto" and val_data.endswith((".csv", ".tsv")))


def has_shards(dataset_type: str, val_data: str | None) -> bool:
    return bool(val_data) and dataset_type != "synthetic" and not is_table(dataset_type, val_data or "")


def local_shards(dataset_type: str, val_data: str | None) -> list[str] | None:
    """Return the paths of the shards, or None for a table, for other data, or if one shard is not local."""
    parts = (val_data or "").split("::")
    if not has_shards(dataset_type, val_data) or any(kind(part) != "local" for part in parts):
        return None
    return [local_path(shard) for part in parts for shard in expand(part, "--val-data")]


def check_validation(config: Any, val_data: str | None) -> None:
    """Raise ValueError if the validation data are missing or unreadable; only local files are looked at.

    Arguments:
        val_data: --val-data as the user wrote it; `config` has it without credentials.
    """
    if val_data and has_shards(config.dataset_type, val_data):
        _check_shards(val_data)
    elif val_data and config.dataset_type != "synthetic":
        _check_table(val_data, config)


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


def _check_table(path: str, config: Any) -> None:
    import pandas

    if kind(path) != "local":
        return
    try:
        table = pandas.read_csv(local_path(path), sep=config.csv_separator, nrows=1)
    except OSError as error:
        raise ValueError(f"--val-data: {shown(path)} cannot be read ({error.strerror}); is the path right?") from None
    except ValueError as error:  # pandas' own errors, and bytes that are no text
        raise ValueError(f"--val-data: {shown(path)} is not a table ({type(error).__name__}).") from None
    for flag, key in (("--csv-img-key", config.csv_img_key), ("--csv-caption-key", config.csv_caption_key)):
        if key not in table:
            columns = ", ".join(shown(str(column)) for column in list(table)[:5])
            raise ValueError(
                f"--val-data: {shown(path)} has no column {shown(key)}, only {columns}: change {flag} or "
                "--csv-separator."
            )
    if table.empty:
        raise ValueError(f"--val-data: {shown(path)} has no rows.")
    image = str(table[config.csv_img_key][0])
    if not os.path.exists(image):
        raise ValueError(f"--val-data: {shown(image)}, the first image of {shown(path)}, does not exist.")


def check_classes(folder: str | None) -> None:
    """Raise ValueError if --imagenet-val is no folder of classes."""
    if folder is None:
        return
    try:
        with os.scandir(folder) as entries:
            has_folder = any(entry.is_dir() for entry in entries)
    except OSError as error:
        raise ValueError(f"--imagenet-val {folder} cannot be read ({error.strerror}); is the path right?") from None
    if not has_folder:
        raise ValueError(f"--imagenet-val {folder}: it must hold one subfolder of images per class.")
