"""Samples of the shards to batches for the towers: what runs in a worker of the first pass.

Shards are read and images decoded as in training; what cannot be used is left out and counted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..data.batches import CHARACTERS_PER_TOKEN, Failure, LoaderSpec, cut_texts, nothing_usable
from ..data.decode import BadImage
from ..data.feeds import Guard, NothingUsable, Reader
from ..data.pixels import to_pixels
from ..data.sources import label, shown
from ..data.tally import Tally
from ..system.processes import signals_blocked
from .store import Piece


class PieceBatch(NamedTuple):
    """Some samples of a piece, in order.

    Arguments:
        piece: its index among the pieces that are read.
        images, texts: as in `data.batches.Batch`; None if there is no usable sample left in the piece.
        tally: what became of the samples since the last batch.
        last: whether the piece ends with it.
    """

    piece: int
    images: Tensor | None
    texts: Tensor | None
    tally: Tally
    last: bool


class PieceReader(IterableDataset):
    """The batches of some pieces, one piece after the other."""

    def __init__(self, spec: LoaderSpec, pieces: Sequence[tuple[int, Piece]]):
        self._spec, self._pieces = spec, list(pieces)

    def __iter__(self) -> Iterator[PieceBatch | Failure]:
        guard, tally = Guard(self._spec.max_empty_shards), Tally()
        reader = Reader(tally, guard, self._spec.retries)
        try:
            for index, piece in self._pieces:
                yield from self._batches(index, piece, reader, guard, tally)
        except NothingUsable as error:
            yield Failure(nothing_usable(self._spec.names, error, tally))

    def _batches(self, index: int, piece: Piece, reader: Reader, guard: Guard, tally: Tally) -> Iterator[PieceBatch]:
        spec = self._spec
        images: list[Tensor] = []
        captions: list[str] = []
        for sample in reader.slots(piece.segment):
            if sample is None:
                continue
            try:
                image = to_pixels(sample.image, spec)
            except BadImage as error:
                tally.note(sample.source, error.cause, 1, f"{label(sample.shard)} {shown(sample.key)}")
                guard.decoded(sample, good=False)
                continue
            guard.decoded(sample, good=True)
            if len(images) == spec.batch_size:  # there is at least one more, so this one is not the last
                yield PieceBatch(index, torch.stack(images), self._tokens(captions), tally.take(), last=False)
                images, captions = [], []
            images.append(image)
            captions.append(sample.caption[: CHARACTERS_PER_TOKEN * spec.context_length])
        rest = (torch.stack(images), self._tokens(captions)) if images else (None, None)
        yield PieceBatch(index, rest[0], rest[1], tally.take(), last=True)

    def _tokens(self, captions: list[str]) -> Tensor:
        texts = self._spec.tokenizer(captions)
        return texts if self._spec.pad is None else cut_texts(texts, self._spec.pad)


class PieceBatches:
    """The batches of all pieces, from several workers in turn, each with pieces of its own."""

    def __init__(self, spec: LoaderSpec, pieces: Sequence[Piece], workers: int):
        numbered, count = list(enumerate(pieces)), max(1, min(workers, len(pieces)))
        self._loaders = [
            DataLoader(
                PieceReader(spec, numbered[worker::count]),
                batch_size=None,
                num_workers=min(1, workers),
                generator=torch.Generator(),  # leave the training process's random numbers alone
            )
            for worker in range(count)
        ]

    def __iter__(self) -> Iterator[PieceBatch | Failure]:
        with signals_blocked():  # the workers are started here
            waiting = [iter(loader) for loader in self._loaders]
        while waiting:
            for iterator in list(waiting):
                batch = next(iterator, None)
                if batch is None:
                    waiting.remove(iterator)
                else:
                    yield batch
