"""The files of a cache: which samples each of them holds, and how large they become.

A file holds the usable ones among some neighbouring samples of a shard, in order:

    image_mean [n, D], text_mean [n, D]     features of the towers, fp32
    image_x [n, L, C]                       what the log-variance branch of images reads, fp16
    text_x [X, C], text_ids [T]             of texts, fp16 and int32: one after the other, each without its padding
    text_x_ends [n], text_ids_ends [n]      where each text ends in these
    digest [n]                              of all that belongs to a sample

Its header also holds its name, which samples of the shard were read, and what was wrong with the others, with a digest.
A file is written at once or not at all, and has the same content whoever writes it: so a cache that was interrupted is
continued.
"""

import collections
import itertools
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..data.plan import Segment, Shard
from ..data.tally import Tally
from ..models.cached import CachedTokens
from ..system.files import save_tensors

FILE_BYTES = 64_000_000  # about: each worker of the first pass collects one file in memory
FP16_MAX = torch.finfo(torch.float16).max
TEXT = ("text_x", "text_ids")
ROWS = ("image_mean", "image_x", "text_mean")
ENDS = tuple(f"{name}_ends" for name in TEXT)
DIGEST = "digest"
NAMES = (*ROWS, *TEXT, *ENDS)
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


class Footprint(NamedTuple):
    """Bytes per sample on disk: those of an image exactly, those of a text at most."""

    image: int
    text: int

    @property
    def total(self) -> int:
        return self.image + self.text


def footprint_of(image: CachedTokens, text: CachedTokens) -> Footprint:
    """Of the tokens of some images and of texts of the full length; they may be on the device "meta"."""
    dim, tokens = image.mean_ND.shape[1], image.x_NLC[0].numel()
    assert text.text_NL is not None
    numbers = (len(ENDS) + 1) * torch.int64.itemsize
    return Footprint(4 * dim + 2 * tokens, 4 * dim + 2 * text.x_NLC[0].numel() + 4 * text.text_NL.shape[1] + numbers)


def check_room(folder: Path, needed: int) -> int:
    """The bytes that are free where the folder is or will be; ValueError if they are fewer than needed."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"--cache-tokens {folder}: the tokens take up to {readable_size(needed)}, and {readable_size(free)} are "
            "free: make room, name a folder on another disk, or train without --cache-tokens."
        )
    return free


def readable_size(count: int) -> str:
    size, unit = (count / 1e6, "MB") if count < 1e9 else (count / 1e9, "GB")
    return f"{size:.1f} {unit}" if size < 1000 else f"{size:,.0f} {unit}"


class Piece(NamedTuple):
    """The samples of one file: positions [start, stop) of a shard.

    Arguments:
        number: of the shard, among all of them.
    """

    number: int
    shard: Shard
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.number:06d}-{self.start:08d}.safetensors"

    @property
    def segment(self) -> Segment:
        return Segment(self.shard, self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


def pieces_of(shards: Sequence[Shard], footprint: Footprint) -> list[Piece]:
    """All samples of counted shards, in files of about `FILE_BYTES` at most."""
    found, most = [], max(1, FILE_BYTES // footprint.total)
    for number, shard in enumerate(shards):
        assert shard.size is not None
        count = -(-shard.size.samples // most)
        bounds = [shard.size.samples * i // count for i in range(count + 1)] if count else []
        found += [Piece(number, shard, *bound) for bound in itertools.pairwise(bounds)]
    return found


@dataclass(frozen=True)
class Content:
    """What a file says of itself: how many usable samples it has, and what became of the others."""

    samples: int
    tally: Tally


class Store:
    """A folder of such files.

    Arguments:
        identity: of the facts that the tokens depend on; files of another identity count as missing.
    """

    def __init__(self, folder: Path, identity: str, pieces: Sequence[Piece]):
        self.folder, self.identity, self.pieces = folder, identity, list(pieces)

    def path(self, piece: Piece) -> Path:
        return self.folder / piece.name

    def content(self, piece: Piece) -> Content | None:
        """What the file of a piece holds by its header; None if it is missing, cut off, or of something else."""
        try:
            with safe_open(self.path(piece), "pt") as file:
                digest, _, about = file.metadata()["about"].partition(" ")
                said = json.loads(about)
                of = [said["cache"], said["file"], said["stop"]]
                samples = file.get_slice("image_x").get_shape()[0]
        except UNREADABLE:
            return None
        if digest != _digest_of_header(about) or of != [self.identity, piece.name, piece.stop]:
            return None
        tally = Tally(met=said["met"])
        tally.used[piece.shard.source] = samples
        for cause, count, where in said["lost"]:
            tally.note(piece.shard.source, cause, count, where)
        return Content(samples, tally)

    def missing(self) -> list[Piece]:
        return [piece for piece in self.pieces if self.content(piece) is None]

    def write(self, piece: Piece, tensors: dict[str, Tensor], tally: Tally) -> None:
        """ValueError if it cannot be written."""
        lost = [[cause, count, tally.first[source, cause]] for (source, cause), count in tally.lost.items()]
        kept = {"cache": self.identity, "file": piece.name, "stop": piece.stop, "met": tally.met, "lost": lost}
        about = json.dumps(kept)
        digests = [digest_of(piece.name, sample_of(tensors, row)) for row in range(len(tensors["image_x"]))]
        tensors = {**tensors, DIGEST: torch.tensor(digests, dtype=torch.int64)}
        save_tensors(tensors, self.path(piece), {"about": f"{_digest_of_header(about)} {about}"})


def sample_of(parts: Mapping[str, Any], row: int) -> dict[str, Tensor]:
    """Return the sample of that row, from the tensors of a file or from slices that read them."""
    sample = {name: parts[name][row : row + 1] for name in ROWS}
    for name, ends in zip(TEXT, ENDS, strict=True):
        sample[name] = parts[name][int(parts[ends][row - 1]) if row else 0 : int(parts[ends][row])]
    return sample


def digest_of(file: str, sample: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of a sample with its types, its shapes and the name of its file."""
    crc = zlib.crc32(file.encode())
    for name in (*ROWS, *TEXT):
        x = sample[name]
        crc = zlib.crc32(x.contiguous().numpy().data, zlib.crc32(repr((x.dtype, x.shape)).encode(), crc))
    return crc


def _digest_of_header(about: str) -> str:
    return f"{zlib.crc32(about.encode()):08x}"


class Collected:
    """The tokens of a piece, while they are computed."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._parts: dict[str, list[Tensor]] = collections.defaultdict(list)

    def add(self, image: CachedTokens, text: CachedTokens, length_N: Tensor) -> None:
        """Arguments:
        length_N: how many leading tokens of each text count.
        """
        assert text.text_NL is not None
        more = text.x_NLC.shape[1] - text.text_NL.shape[1]  # some towers append a token of their own
        x_XC, ids_T = _leading(text.x_NLC, length_N + more), _leading(text.text_NL, length_N)
        of_texts = text.mean_ND.float(), _half(x_XC), ids_T.int(), length_N.long() + more, length_N.long()
        for name, part in zip(NAMES, (image.mean_ND.float(), _half(image.x_NLC), *of_texts), strict=True):
            self._parts[name].append(part.cpu())

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds, without the digests; without a usable sample, no rows."""
        if not self._parts:
            return dict.fromkeys(NAMES, torch.empty(0, 1))
        found = {name: torch.cat(parts) for name, parts in self._parts.items()}
        return {**found, **{f"{name}_ends": found[f"{name}_ends"].cumsum(0) for name in TEXT}}


def _leading(x_NL: Tensor, length_N: Tensor) -> Tensor:
    """The first entries of each row, one row after the other."""
    return x_NL[torch.arange(x_NL.shape[1], device=x_NL.device) < length_N[:, None]]


def _half(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise ValueError("The towers' output is not finite: try --precision fp32, or other weights.")
    return x.clamp(-FP16_MAX, FP16_MAX).half()
