"""Tars that were made to stop their reader. Each begins with two good samples."""

import bz2
import gzip
import io
import lzma
import tarfile

from shard_maker import pair

GOOD = ["g0", "g1"]
END = bytes(1024)


def good(keys=GOOD) -> bytes:
    """The members of good samples, without the end of the tar."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key in keys:
            for name, data in pair(key).items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        end = tar.offset
    return file.getvalue()[:end]


def header(name: str = "bad.jpg", type: bytes = b"0", size: int = 0, field: bytes | None = None) -> bytes:
    """One header block; `field` is its size field as it stands."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    if field is None:
        field = b"%011o\0" % size if 0 <= size < 8**11 else (size % 256**12).to_bytes(12, "big")
        field = field if 0 <= size < 8**11 else bytes([0xFF if size < 0 else 0x80]) + field[1:]
    block[124:136], block[156:157] = field, type
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(data: bytes, type: bytes = b"x") -> bytes:
    return header("pax", type, len(data)) + padded(data)


def record(keyword: bytes, value: bytes) -> bytes:
    length = next(n for n in range(4, 100) if n == len(b"%d %s=%s\n" % (n, keyword, value)))
    return b"%d %s=%s\n" % (length, keyword, value)


def late(key: str = "late") -> bytes:
    return good([key])


HOSTILE = {
    "negative size of an unknown type": good() + header(type=b"Z", size=-512) + late() + END,
    "negative size of a file": good() + header(size=-1024) + late() + END,
    "size beyond any file": good() + header(size=2**80) + late() + END,
    "size beyond this file": good() + header(size=2**39) + late() + END,
    "pax header of 400,000 digits": good() + pax(b"1" * 400_000) + late() + END,
    "pax header of 16,000 digits": good() + pax(b"1" * 16_000) + late() + END,
    "pax keys within keys": good() + pax(b"2 " * 8_000 + b"=", b"g") * 40 + late() + END,
    "negative pax size": good() + pax(record(b"size", b"-512")) + header(size=9) + bytes(512) + late() + END,
    "pax size beyond any file": good() + pax(record(b"size", b"9" * 30)) + header(size=9) + bytes(512) + late() + END,
    "pax size of 4,000 digits": good() + pax(b"4010 size=" + b"9" * 3999 + b"\n") + header() + late() + END,
    "long name of 1 TB": good() + header(type=b"L", size=2**40) + late() + END,
    "long link of 1 TB": good() + header(type=b"K", size=2**40) + late() + END,
    "5,000 headers of headers": good() + (header(type=b"L", size=3) + padded(b"a.b")) * 5_000 + late() + END,
    "5,000 global headers": good() + pax(b"", b"g") * 5_000 + late() + END,
    "slashes for a name": good()
    + (header(type=b"L", size=16_000) + padded(b"/" * 16_000) + header()) * 100
    + late()
    + END,
    "endless sparse map": good()
    + pax(record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0"))
    + header(size=512)
    + padded(b"99999999\n1\n"),
    "sparse file of 1 TB": good() + header(type=b"S", size=2**40) + late() + END,
    "size that is no number": good() + header(field=b"what is this") + late() + END,
    "a zeroed block in the middle": good() + bytes(512) + late()[512:] + END,
    "a megabyte of zeros in the middle": good() + bytes(1 << 20) + late() + END,
}


HARMLESS = ("pax keys within keys", "slashes for a name")  # read to the end, but in no time


def compressed(size: int = 240 << 20) -> dict[str, bytes]:
    """Compressed tars, small ones, of many members of zeros that each pass for an image."""
    each = 40 << 20
    out = {}
    for suffix, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        # Concatenated streams unpack one after the other.
        parts = [compress(good())]
        zeros = compress(bytes(each))
        for i in range(size // each):
            text = header(f"z{i}.txt", size=1) + padded(b"x")
            parts += [compress(header(f"z{i}.jpg", size=each)), zeros, compress(text)]
        out[f"bomb.tar.{suffix}"] = b"".join(parts)
    return out
