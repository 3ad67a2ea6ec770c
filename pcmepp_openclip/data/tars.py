"""Tars that may be damaged or hostile. Headers are believed within bounds, and the end mark must be at the end.

`tarfile` follows every header: it reads a name of a terabyte into memory, a negative size sends it back to where it
was, and one block of zeros in the middle is the end. The methods of TarInfo are the place to do better.
"""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 1 << 14  # the limit for a long name or a pax header; a path in Linux has at most 4096
MAX_MEMBER_BYTES = 1 << 40
MAX_PADDING_BYTES = 1 << 30  # the limit for zeros after the end mark
MAX_EXPANSION = 30  # the limit for a compressed tar: images do not compress, headers and captions do
UNCHECKED_BYTES = 1 << 26  # up to this size the expansion is not checked
_CHUNK = 1 << 18
_HEADERS_OF_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
# Reading a tar may raise any of these.
ERRORS = (
    *(tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError),
    *(OverflowError, RecursionError, MemoryError),
)


class Expands(tarfile.TarError):
    """Raised for a compressed tar that expands to much more than the size of its file."""


class Header(tarfile.TarInfo):
    """A tar header with bounded sizes. Anything that is not a header is an error, except for the end mark."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "Header":
        try:
            info = super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(str(error)) from None
        return info

    def _proc_member(self, tar: tarfile.TarFile) -> "Header":
        """Check the size of a header of any type. tarfile calls this before it uses the header."""
        limit = MAX_HEADER_BYTES if self.type in _HEADERS_OF_HEADERS else MAX_MEMBER_BYTES
        if not 0 <= self.size <= limit:
            raise tarfile.ReadError(f"a header says {_short(self.size)} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("sparse files are not read")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _proc_pax(self, tar: tarfile.TarFile) -> "Header":
        """Read path and size from a pax header. tarfile's own parser takes quadratic time and memory."""
        assert tar.fileobj is not None
        data = tar.fileobj.read(self._block(self.size))[: self.size]  # type: ignore[attr-defined]
        fields = {} if self.type == tarfile.XGLTYPE else _pax_fields(data)
        try:
            info = self.fromtarfile(tar)
        except tarfile.HeaderError:
            if self.type == tarfile.XGLTYPE:
                raise
            raise tarfile.ReadError("a header of nothing") from None
        info.offset = self.offset  # tarfile, too, lets a member begin with the headers of its header
        if "path" in fields:
            info.name = fields["path"].rstrip("/")
        if "size" in fields:
            info.size = int(fields["size"])
            if info.size > MAX_MEMBER_BYTES:
                raise tarfile.ReadError(f"a header says {_short(info.size)} bytes")
            tar.offset = info.offset_data
            if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:
                tar.offset += info._block(info.size)  # type: ignore[attr-defined]
        return info


def _pax_fields(data: bytes) -> dict[str, str]:
    """Return the path and size of a pax header: one line "LENGTH KEYWORD=VALUE" per record."""
    fields, at = {}, 0
    while at < len(data):
        blank = data.find(b" ", at, at + 8)
        length = data[at:blank] if blank > 0 else b""
        end = at + int(length) if length.isdigit() else -1
        if not blank < end <= len(data) or data[end - 1] != ord("\n"):
            raise tarfile.ReadError("a broken pax header")
        keyword, _, value = data[blank + 1 : end - 1].partition(b"=")
        if keyword.startswith(b"GNU.sparse."):
            raise tarfile.ReadError("sparse files are not read")
        if keyword == b"path" or (keyword == b"size" and value.isdigit() and len(value) < 32):
            fields[keyword.decode()] = value.decode("utf-8", "surrogateescape")
        elif keyword == b"size":
            raise tarfile.ReadError("a header says no number of bytes")
        at = end
    return fields


def _short(size: int) -> str:
    return str(size) if abs(size) < 10**24 else f"about {'-' * (size < 0)}2^{size.bit_length()}"


def open_tar(file: BinaryIO, position: int = 0) -> tarfile.TarFile:
    """Return the tar in a buffered file, compressed or not. In a seekable file, unwanted members are skipped.

    Arguments:
        position: the position at which the file is opened, if that is not its beginning but the header of a member.
            ReadError if there is no header.
    """
    start = file.peek(10)[:10] if not position else b""  # type: ignore[attr-defined]
    unpack: Any = None
    if start[:3] == b"\x1f\x8b\x08":
        unpack = gzip.GzipFile
    elif start[:3] == b"BZh" and start[4:10] == b"1AY&SY":
        unpack = bz2.BZ2File
    elif start[:4] == b"\x5d\x00\x00\x80" or start[:5] == b"\xfd7zXZ":
        unpack = lzma.LZMAFile
    if unpack is not None:
        packed = _CountingReader(file)
        how = {"fileobj": packed, "mode": "rb"} if unpack is gzip.GzipFile else {"filename": packed}
        unpacked: Any = _ForwardReader(unpack(**how), packed)
    else:
        unpacked = file if file.seekable() else _ForwardReader(file, position=position)
    tar = tarfile.TarFile(fileobj=unpacked, tarinfo=Header)
    if position and tar.firstmember is None:  # type: ignore[attr-defined]
        raise tarfile.ReadError("no header")
    return tar


def can_seek(tar: tarfile.TarFile) -> bool:
    """Return whether the file of a tar can be entered at the offset of a member."""
    return not isinstance(tar.fileobj, _ForwardReader)


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of all members, in order; ReadError if anything follows the end mark."""
    while (info := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every header otherwise
        yield info
    assert tar.fileobj is not None
    left = MAX_PADDING_BYTES
    while left > 0 and (padding := tar.fileobj.read(_CHUNK)):
        if padding.strip(b"\0"):
            raise tarfile.ReadError("blocks of zeros in its middle")
        left -= len(padding)
    if left <= 0:
        raise tarfile.ReadError("nothing but zeros at its end")


def content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    """Return the content of a member, which must be the last one that `members` returned."""
    assert tar.fileobj is not None
    tar.fileobj.seek(info.offset_data)
    data = tar.fileobj.read(info.size)
    if len(data) != info.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def is_link(info: tarfile.TarInfo) -> bool:
    """Return whether a member is a hard or symbolic link, whose content is elsewhere.

    Links are not followed: a stream cannot go back to their target.
    """
    return info.islnk() or info.issym()


def split_name(path: str) -> tuple[str, str] | None:
    """Return the key and suffix of a member, split as webdataset does.

    webdataset's regular expression takes quadratic time.
    """
    slash = path.rfind("/")
    dot = path.find(".", slash + 1)
    if dot < 0:
        return None
    if dot == slash + 1 and (slash < 0 or "." in path[path.rfind("/", 0, slash) + 1 : slash]):
        return None
    return path[:dot], path[dot + 1 :]


class _CountingReader:
    """A file that counts the bytes that were read."""

    def __init__(self, file: BinaryIO):
        self._file, self.count = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data


class _ForwardReader:
    """A file that only reads forward: seeking is reading. `packed` is the compressed file that it comes from."""

    def __init__(self, file: Any, packed: _CountingReader | None = None, position: int = 0):
        self._file, self._packed, self._position = file, packed, position

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._position += len(data)
        if self._packed is not None and self._position > max(UNCHECKED_BYTES, MAX_EXPANSION * self._packed.count):
            raise Expands(f"{self._position >> 20} MB from {self._packed.count >> 10} kB")
        return data

    def seek(self, position: int) -> int:
        if position < self._position:
            raise tarfile.StreamError("seeking backwards is not allowed")
        while self._position < position and self.read(min(_CHUNK, position - self._position)):
            pass
        return self._position

    def tell(self) -> int:
        return self._position
