"""A digest at the end of a file that `torch.save` wrote, by which every flipped bit is found.

It is the comment of the zip archive: readers that do not know of it, such as stock open_clip's, ignore a comment.
"""

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

SEAL = b"pcmepp-openclip digest "  # stands in front of the digest
SEAL_BYTES = len(SEAL) + 64  # the length of both together
PIECE_BYTES = 1 << 18  # a piece stays in the processor's cache between reading and summing
ZIP, ZIP_END = b"PK\3\4", b"PK\5\6"  # how a zip file and its last record begin
ZIP_END_SIZE = 22  # the length of that record without a comment
ZIP_FOLDER = 0x10  # marks a folder: torch reads nothing for such a part, and returns what is in memory


class Damaged(ValueError):
    """A file is not as it was saved."""

    def __init__(self, path: Path, problem: str):
        super().__init__(f"{path} is not a good checkpoint: {problem}.")


def seal(path: Path) -> None:
    """Add the digest to a file that `torch.save` has just written. Raise OSError if the file does not fit its
    checksums, which were made in memory."""
    problem = _damage_of_zip(path)
    if problem:
        raise OSError(f"it was not written well: {problem}")
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)  # the last two bytes hold the length of the comment
        file.write(SEAL_BYTES.to_bytes(2, "little") + SEAL)
        file.write(digest_of(file, file.tell()))


def digest_of(file: BinaryIO, length: int) -> bytes:
    """Return the digest of the first `length` bytes: the SHA-256 of the CRC-32 of each piece. A CRC-32 finds every
    flipped bit, and is faster than a disk also on processors that have no instructions for SHA-256. The file's
    position is then `length`."""
    digest, piece = hashlib.sha256(length.to_bytes(8, "big")), memoryview(bytearray(PIECE_BYTES))
    file.seek(0)
    for start in range(0, length, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, length - start)]
        if file.readinto(part) < len(part):  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
            raise OSError("it became shorter while it was read")
        digest.update(zlib.crc32(part).to_bytes(4, "big"))
    return digest.hexdigest().encode()


def _digest_at_end(file: BinaryIO) -> bytes | None:
    """Return the digest that a file ends with, or None if there is none."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - SEAL_BYTES))
    end = file.read()
    return end[len(SEAL) :] if len(end) == SEAL_BYTES and end.startswith(SEAL) else None


def is_sealed(path: Path) -> bool:
    """Return whether the file ends with a digest."""
    with path.open("rb") as file:
        return _digest_at_end(file) is not None


def damage(path: Path) -> str | None:
    """Say what is wrong with a file of weights by the digest that it ends with, or, without one, by the checksums of a
    zip file. Return None if it is good, or if it is of another kind, which has neither."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(ZIP)) == ZIP
            digest = _digest_at_end(file)
            if digest is not None:
                good = digest_of(file, file.tell() - len(digest)) == digest
                return None if good else "it is damaged, by its digest"
        return _damage_of_zip(path) if is_zip else None
    except OSError as error:
        return str(error)


def _damage_of_zip(path: Path) -> str | None:
    """Say what is wrong with a zip file without a digest. torch writes no comment: where the last record is not the end
    of the file, bytes are missing."""
    try:
        with path.open("rb") as file:
            file.seek(-ZIP_END_SIZE, os.SEEK_END)
            end = file.read()
        if not end.startswith(ZIP_END) or not end.endswith(b"\0\0"):
            return "its end is damaged or missing"
        with zipfile.ZipFile(path) as archive:
            folders = [part.filename for part in archive.infolist() if part.external_attr & ZIP_FOLDER]
            if folders:
                return f"its part {folders[0]} is damaged"
            summed = any(part.CRC for part in archive.infolist())  # torch can be told to leave checksums out
            broken = archive.testzip() if summed else None
    except Exception as error:  # zipfile raises different ones depending on which part of the directory is damaged
        return f"it is damaged ({' '.join(str(error).split()) or type(error).__name__})"
    return f"its part {broken} is damaged" if broken else None


@contextlib.contextmanager
def verified(path: Path) -> Iterator[None]:
    """Verify a file in a thread while it is read. Raise `Damaged` if it is damaged, whatever the reader raises."""
    if not path.is_file():  # the reader raises its own error
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(damage, path)
        try:
            yield
        finally:
            problem = verdict.result()
            if problem:
                raise Damaged(path, problem) from None
