"""Encoded samples on disk, which are computed once and then read; an interrupted computation continues.

A store is a folder of .safetensors files with a row per sample. A tensor whose rows differ in length, such as token
ids, holds them one after the other, and `NAME_ends` says where each of them ends. Besides its tensors, each file has

    digest [n]    the CRC-32 of each row, with the name of the file and the name, type and shape of every tensor
    header        the identity of the store, which is a fingerprint of all that the rows depend on, the name of the
                  file and facts about it, with a CRC-32 of these

Every row is checked when it is read, because a single wrong bit would change the results. A file is written at once or
not at all, and has the same content whoever writes it: ranks share a folder, each with files of its own.
"""

import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..system.files import save_tensors

DIGEST, ENDS = "digest", "_ends"
DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
UNREADABLE = (OSError, SafetensorError, *DAMAGED)  # torch raises different kinds for different damage
OLD_S = 3600.0  # age in seconds of a temporary file that nobody writes to any more
MAX_OPEN = 128  # files per process: systems limit them, often to 1024

Row = dict[str, Tensor]
"""The tensors of one sample, or of several, by name."""


def identity_of(facts: Any) -> str:
    """Return a short name for these facts, which JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Content(NamedTuple):
    """The number of rows of a file, and the facts about it."""

    rows: int
    facts: dict[str, Any]


class Store:
    """A folder of files of rows.

    Arguments:
        identity: a name for all that the rows depend on; files of another identity count as missing.
    """

    def __init__(self, folder: Path, identity: str):
        self.folder, self.identity = folder, identity

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def write(self, name: str, tensors: Row, **facts: Any) -> None:
        """Write a file; ValueError if it cannot be written.

        Arguments:
            tensors: tensors by name, all with one number of rows, and `NAME_ends` where rows differ in length.
        """
        count = next((len(x) for key, x in tensors.items() if f"{key}{ENDS}" not in tensors), 0)
        digests = [_row_digest(name, _row(tensors, row)) for row in range(count)]
        header = json.dumps({"store": self.identity, "file": name, "facts": facts})
        tensors = {**tensors, DIGEST: torch.tensor(digests, dtype=torch.int64)}
        save_tensors(tensors, self.path(name), {"about": f"{zlib.crc32(header.encode()):08x} {header}"})

    def content(self, name: str) -> Content | None:
        """Return the content that a file's header states; None if it is missing, cut off, or of another store."""
        try:
            with safe_open(self.path(name), "pt") as file:
                return self._content(name, file)
        except UNREADABLE:
            return None

    def read(self, name: str) -> Row | None:
        """Return all rows of a file; None if it is missing, damaged, or of another store."""
        try:
            with safe_open(self.path(name), "pt") as file:
                content = self._content(name, file)
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
            digests = tensors.pop(DIGEST).tolist()
            rows = range(content.rows) if content else ()
            good = content and all(_row_digest(name, _row(tensors, row)) == digests[row] for row in rows)
        except UNREADABLE:
            return None
        return tensors if good else None

    def remove_leftovers(self) -> None:
        """Remove the temporary files of processes that were killed while they wrote."""
        for path in self.folder.glob(".*.safetensors.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > OLD_S:
                    path.unlink()

    def _content(self, name: str, file: Any) -> Content | None:
        digest, _, header = file.metadata()["about"].partition(" ")
        parsed = json.loads(header)
        if digest != f"{zlib.crc32(header.encode()):08x}" or [parsed["store"], parsed["file"]] != [self.identity, name]:
            return None
        return Content(file.get_slice(DIGEST).get_shape()[0], parsed["facts"])


class Rows:
    """The rows of some files of a store by number, from 0 on, in any order. Each process opens the files for itself.

    Arguments:
        names, counts: the files, and how many rows each of them has.
    """

    def __init__(self, store: Store, names: Sequence[str], counts: Sequence[int]):
        self.store, self.names = store, list(names)
        self._ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        self._open: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: Sequence[int]) -> list[Row]:
        """Return the rows of these numbers; ValueError for one that is damaged."""
        number_N = torch.as_tensor(rows)
        file_N = torch.searchsorted(self._ends, number_N, right=True)
        samples: list[Row] = [{}] * len(number_N)
        for i in number_N.argsort().tolist():  # a disk is fastest in this order, and each file is opened once
            file = int(file_N[i])
            samples[i] = self._read(self.names[file], int(number_N[i]) - (int(self._ends[file - 1]) if file else 0))
        return samples

    def _read(self, name: str, row: int) -> Row:
        parts = self._parts(name)
        try:
            sample = _row(parts, row)
            good = _row_digest(name, sample) == int(parts[DIGEST][row])
        except UNREADABLE:
            good = False
        if not good:
            raise ValueError(f"{self.store.path(name)} is damaged: delete it, and start again to compute it anew.")
        return sample

    def _parts(self, name: str) -> dict[str, Any]:
        """Return slices that read the tensors of a file, and its ends and digests as they are."""
        if name in self._open:
            return self._open[name]
        try:
            file = safe_open(self.store.path(name), "pt")
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  it is no dict
            parts |= {key: file.get_tensor(key).clone() for key in parts if key == DIGEST or key.endswith(ENDS)}
        except UNREADABLE:
            raise ValueError(
                f"{self.store.path(name)} is missing or damaged: start again to compute it anew; all ranks must see "
                "the folder."
            ) from None
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]  # the one that was opened first
        self._open[name] = parts
        return parts


def join_rows(parts: Sequence[Row]) -> Row:
    """Return the rows of several batches together, whose `NAME_ends` are the lengths of the rows."""
    joined = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    return {name: x.cumsum(0) if name.endswith(ENDS) else x for name, x in joined.items()}


def _row(parts: Mapping[str, Any], row: int) -> Row:
    """Return one row of tensors, or of slices that read them."""
    sample = {}
    for name in sorted(parts):
        if name == DIGEST or name.endswith(ENDS):
            continue
        ends = parts.get(f"{name}{ENDS}")
        if ends is None:
            sample[name] = parts[name][row : row + 1]
        else:
            sample[name] = parts[name][int(ends[row - 1]) if row else 0 : int(ends[row])]
    return sample


def _row_digest(file: str, sample: Row) -> int:
    crc = zlib.crc32(file.encode())
    for name, x in sample.items():
        crc = zlib.crc32(repr((name, x.dtype, x.shape)).encode(), crc)
        crc = zlib.crc32(x.contiguous().numpy().data, crc)
    return crc
