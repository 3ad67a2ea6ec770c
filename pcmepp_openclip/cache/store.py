"""The files of a cache: which samples each of them holds, how large they become, and how they are read.

A file holds the usable ones among some neighbouring samples of a shard, in order:

    image_mean [n, D], text_mean [n, D]     features of the towers, fp32
    image_x [n, L, C]                       what the log-variance branch of images reads, fp16
    text_x [T, C], text_ids [T]             of texts, fp16 and int32: one after the other, each without its padding
    text_ends [n]                           where each text ends in these

Its header also holds which samples of the shard were read, and what was wrong with the others. A file is written at
once or not at all, and has the same content whoever writes it: so a cache that was interrupted is continued.
"""

import collections
import itertools
import json
import shutil
from collections.abc import Sequence
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
MAX_OPEN = 128  # files per worker: systems limit them, often to 1024 per process
TEXT_MULTIPLE = 8  # batches of texts have a multiple of it as their length, for few different shapes
FP16_MAX = torch.finfo(torch.float16).max
NAMES = ("image_mean", "image_x", "text_mean", "text_x", "text_ids", "text_ends")
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
    end = torch.int64.itemsize
    return Footprint(4 * dim + 2 * tokens, 4 * dim + 2 * text.x_NLC[0].numel() + 4 * text.text_NL.shape[1] + end)


def check_room(folder: Path, needed: int) -> int:
    """The bytes that are free where the folder is or will be; ValueError if they are fewer than needed."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"--cache-tokens {folder}: the tokens take up to {readable_size(needed)}, but {readable_size(free)} are free: "
            "make room, name a folder on another disk, or train without --cache-tokens."
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
                said = json.loads(file.metadata()["about"])
                samples = file.get_slice("image_x").get_shape()[0]
        except UNREADABLE:
            return None
        if not isinstance(said, dict) or [said.get("cache"), said.get("stop")] != [self.identity, piece.stop]:
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
        about = {"cache": self.identity, "stop": piece.stop, "met": tally.met, "lost": lost}
        save_tensors(tensors, self.path(piece), {"about": json.dumps(about)})


class Collected:
    """The tokens of a piece, while they are computed."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._parts: dict[str, list[Tensor]] = collections.defaultdict(list)

    def add(self, image: CachedTokens, text: CachedTokens, length_N: Tensor) -> None:
        """Arguments:
        length_N: how many leading tokens of each text count.
        """
        assert text.text_NL is not None and text.x_NLC.shape[1] == text.text_NL.shape[1]
        length = text.x_NLC.shape[1]
        kept_NL = torch.arange(length, device=text.x_NLC.device) < length_N.to(text.x_NLC.device)[:, None]
        of_images = image.mean_ND.float(), _half(image.x_NLC)
        of_texts = text.mean_ND.float(), _half(text.x_NLC[kept_NL]), text.text_NL[kept_NL].int(), length_N.long()
        for name, part in zip(NAMES, (*of_images, *of_texts), strict=True):
            self._parts[name].append(part.cpu())

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds; without a usable sample, no rows."""
        if not self._parts:
            return dict.fromkeys(NAMES, torch.empty(0, 1))
        found = {name: torch.cat(parts) for name, parts in self._parts.items()}
        return {**found, "text_ends": found["text_ends"].cumsum(0)}


def _half(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise ValueError("The towers' output is not finite: try --precision fp32, or other weights.")
    return x.clamp(-FP16_MAX, FP16_MAX).half()


class Rows:
    """The samples of all files of a cache by number, from 0 on. Each process opens the files for itself.

    Arguments:
        paths, counts: the files, and how many samples each of them has.
        context_length, pad: of texts.
    """

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], context_length: int, pad: int):
        self._paths, self._ends = list(paths), torch.tensor(counts, dtype=torch.int64).cumsum(0)
        self._context_length, self._pad = context_length, pad
        self._open: collections.OrderedDict[int, dict[str, Any]] = collections.OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, rows: Sequence[int]) -> tuple[CachedTokens, CachedTokens]:
        """The samples of these numbers as a batch: images and texts."""
        number_N = torch.as_tensor(rows)
        file_N = torch.searchsorted(self._ends, number_N, right=True)
        found: list[dict[str, Tensor]] = [{}] * len(number_N)
        for i in number_N.argsort().tolist():  # a disk is fastest in this order, and each file is opened once
            file = int(file_N[i])
            found[i] = self._read(file, int(number_N[i]) - (int(self._ends[file - 1]) if file else 0))
        return self._images(found), self._texts(found)

    def _read(self, file: int, row: int) -> dict[str, Tensor]:
        slices = self._slices(file)
        here = slice(row, row + 1)
        sample = {name: slices[name][here] for name in ("image_mean", "image_x", "text_mean")}
        ends = slices["text_ends"]
        text = slice(int(ends[row - 1]) if row else 0, int(ends[row]))
        return {**sample, **{name: slices[name][text] for name in ("text_x", "text_ids")}}

    def _slices(self, file: int) -> dict[str, Any]:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)
        path = self._paths[file]
        try:
            opened = safe_open(path, "pt")
            slices = {name: opened.get_slice(name) for name in NAMES[:-1]}
            self._open[file] = {**slices, "text_ends": opened.get_tensor("text_ends").clone()}
        except UNREADABLE:
            raise ValueError(
                f"{path} is missing or damaged: start again to compute it anew; all ranks must see --cache-tokens."
            ) from None
        return self._open[file]

    def _images(self, samples: list[dict[str, Tensor]]) -> CachedTokens:
        return CachedTokens(*(torch.cat([sample[name] for sample in samples]) for name in ("image_mean", "image_x")))

    def _texts(self, samples: list[dict[str, Tensor]]) -> CachedTokens:
        longest = max(len(sample["text_ids"]) for sample in samples)
        length = min(self._context_length, -(-longest // TEXT_MULTIPLE) * TEXT_MULTIPLE)
        width = samples[0]["text_x"].shape[1]
        x_NLC = torch.zeros(len(samples), length, width, dtype=torch.float16)
        text_NL = torch.full((len(samples), length), self._pad, dtype=torch.int64)
        for i, sample in enumerate(samples):
            x_NLC[i, : len(sample["text_x"])] = sample["text_x"]
            text_NL[i, : len(sample["text_ids"])] = sample["text_ids"]
        return CachedTokens(torch.cat([sample["text_mean"] for sample in samples]), x_NLC, text_NL)
