"""The samples of a cache by number, read from its files in any order."""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..data.batches import TEXT_MULTIPLE
from ..models.cached import CachedTokens
from .store import DIGEST, ENDS, ROWS, TEXT, UNREADABLE, digest_of, sample_of

MAX_OPEN = 128  # files per worker: systems limit them, often to 1024 per process


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
        slices, path = self._slices(file), self._paths[file]
        try:
            sample = sample_of(slices, row)
            good = digest_of(path.name, sample) == int(slices[DIGEST][row])
        except (*UNREADABLE, IndexError, OverflowError):  # by what of it is damaged
            good = False
        if not good:
            raise ValueError(f"{path} is damaged: delete it, and start again to compute it anew.")
        return sample

    def _slices(self, file: int) -> dict[str, Any]:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        while len(self._open) >= MAX_OPEN:
            self._open.popitem(last=False)
        path = self._paths[file]
        try:
            opened = safe_open(path, "pt")
            slices = {name: opened.get_slice(name) for name in (*ROWS, *TEXT)}
            self._open[file] = {**slices, **{name: opened.get_tensor(name).clone() for name in (*ENDS, DIGEST)}}
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
        more, width = len(samples[0]["text_x"]) - len(samples[0]["text_ids"]), samples[0]["text_x"].shape[1]
        x_NLC = torch.zeros(len(samples), length + more, width, dtype=torch.float16)
        text_NL = torch.full((len(samples), length), self._pad, dtype=torch.int64)
        for i, sample in enumerate(samples):
            x_NLC[i, : len(sample["text_x"])] = sample["text_x"]
            text_NL[i, : len(sample["text_ids"])] = sample["text_ids"]
        return CachedTokens(torch.cat([sample["text_mean"] for sample in samples]), x_NLC, text_NL)
