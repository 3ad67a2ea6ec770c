"""Encode images and texts to Gaussians in chunks, on one or many ranks, kept on disk so that evaluations resume.

A chunk is a file of a store. Ranks take chunks in turn, so that the result is the same on any number of them; they must
share the folder. A plain CLIP gives points: Gaussians of variance zero.
"""

import contextlib
import datetime
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..data.batches import cut_texts
from ..data.captioned import ImageRef
from ..gaussian import Gaussian
from ..models.fingerprint import model_fingerprint
from ..models.pcmepp import ProbabilisticModel
from ..system.version import __version__
from .images import ImageDataset, image_batches
from .load import cosine_scale
from .store import Store

CHUNK = 512  # rows per file


@dataclass
class Encoder:
    """A model with its preprocessing and tokenizer.

    Arguments:
        probabilistic: whether the model's log-variances mean anything; if not, only its means are used.
        cache: the folder of the chunks.
        precision: "fp32", or "amp_bf16" for autocast.
        upright: turn images as their EXIF orientation says.
    """

    model: Any
    preprocess: Any
    tokenizer: Any
    probabilistic: bool
    cache: Path
    device: str = "cpu"
    precision: str = "fp32"
    batch_size: int = 64
    workers: int = 0
    upright: bool = False

    def __post_init__(self) -> None:
        self.model.eval()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of all that embeddings depend on except the images and texts themselves."""
        facts: list[Any] = [model_fingerprint(self.model, self.tokenizer), repr(self.model), __version__]
        facts += [self.probabilistic, self.precision, repr(self.preprocess), self.upright]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def scale(self) -> float:
        """Return the factor by which CLIP multiplies a cosine."""
        return cosine_scale(self.model)

    def images(
        self, places: Sequence[ImageRef], name: str = "images", crops: Sequence[float] | None = None
    ) -> Gaussian:
        """Encode images.

        Arguments:
            crops: for each image the side of the centre crop that is encoded in its place, as a share of its own.
        """
        stamps = {file: os.stat(file) for file in {place.file for place in places}}
        facts: list[Any] = [(*place, stamps[place.file].st_size, stamps[place.file].st_mtime_ns) for place in places]
        if crops is not None:
            facts = list(zip(facts, crops, strict=True))

        def encode(chunks: Sequence[range]) -> Iterator[Gaussian]:
            data = ImageDataset(places, self.preprocess, self.upright, crops)
            parts = [self._batches(chunk) for chunk in chunks]
            pixels = image_batches(data, [batch for part in parts for batch in part], self.workers, self.device)
            for part in parts:
                yield _collected([self._gaussian(next(pixels), "image") for _ in part])

        return self._chunked(encode, len(places), facts, name)

    def texts(self, texts: Sequence[str], name: str = "texts") -> Gaussian:
        """Encode texts. Equal ones are encoded once: they get equal Gaussians, and ties stay ties."""
        unique = list(dict.fromkeys(texts))

        def encode(chunks: Sequence[range]) -> Iterator[Gaussian]:
            for chunk in chunks:
                tokens = (self._tokens([unique[i] for i in batch]) for batch in self._batches(chunk))
                yield _collected([self._gaussian(batch, "text") for batch in tokens])

        encoded = self._chunked(encode, len(unique), unique, name)
        index = {text: i for i, text in enumerate(unique)}
        rows = torch.tensor([index[text] for text in texts])
        return Gaussian(encoded.mean[rows], encoded.logvar[rows])

    def _tokens(self, texts: list[str]) -> Tensor:
        return tokenize(self.model, self.tokenizer, texts)

    def _batches(self, rows: range) -> list[list[int]]:
        """Return the rows of a chunk in batches. None spans two chunks: a resumed evaluation has the same ones."""
        return [list(rows[i : i + self.batch_size]) for i in range(0, len(rows), self.batch_size)]

    def _gaussian(self, batch: Tensor, kind: str) -> Gaussian:
        """Encode a batch on the device. No step waits for a GPU: the next batch is sent while this one is computed."""
        device = torch.device(self.device)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "amp_bf16")
        with autocast, _without_tf32():
            batch = batch.to(device, non_blocking=device.type == "cuda")
            return gaussians(self.model, batch, kind, self.probabilistic)

    def _chunked(
        self, encode: Callable[[Sequence[range]], Iterator[Gaussian]], count: int, facts: Any, name: str
    ) -> Gaussian:
        """Return all rows from the store, in which the missing chunks are written first.

        Arguments:
            encode: yields one Gaussian on the CPU for each range of rows.
            facts: the images or texts.
        """
        identity = hashlib.sha256((self.fingerprint + repr((CHUNK, facts))).encode()).hexdigest()[:16]
        store = Store(self.cache / f"{name}-{identity}", identity)
        store.folder.mkdir(parents=True, exist_ok=True)
        starts = range(0, count, CHUNK)
        chunks = [(f"{start:06d}", range(start, min(start + CHUNK, count))) for start in starts]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = chunks[rank::world]
        missing = [(file, rows) for file, rows in mine if store.read(file) is None]
        for file, _ in missing:
            if store.path(file).exists():
                print(f"note: {store.path(file)} is damaged, or of another version: encoded again.", file=sys.stderr)
        settings = {"initial": len(mine) - len(missing), "total": len(mine), "disable": None if rank == 0 else True}
        encoded = zip(missing, encode([rows for _, rows in missing]), strict=True)
        for (file, _), gaussian in tqdm(encoded, desc=name, unit_scale=CHUNK, unit="", **settings):
            store.write(file, gaussian._asdict())
        if world > 1:
            dist.barrier()
        parts = []
        for file, _ in chunks:
            part = store.read(file)
            if part is None:
                raise ValueError(
                    f"{store.path(file)} is missing or damaged: the ranks must share --out; run the command again."
                )
            parts.append(Gaussian(**part))
        return _cat(parts)


def tokenize(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Return token ids [N, L]; L is that of the longest text, for models to which the padding makes no difference."""
    tokens = tokenizer(texts)
    if isinstance(model, ProbabilisticModel) and model.texts_may_be_cut:
        return cut_texts(tokens, pad=int(tokenizer([""])[0, -1]))
    return tokens


@torch.inference_mode()
def gaussians(model: Any, batch: Tensor, kind: str, probabilistic: bool) -> Gaussian:
    """Encode one batch of images or tokens to fp32 Gaussians, which are points where only the means are used.

    Arguments:
        batch: pixels [N, 3, height, width] or token ids [N, L], on the model's device.
        kind: "image" or "text".
        probabilistic: whether the model's log-variances mean anything.
    """
    if probabilistic:
        mean, logvar = getattr(model, f"encode_{kind}_gaussian")(batch)
    else:
        mean = F.normalize(getattr(model, f"encode_{kind}")(batch), dim=-1)
        logvar = torch.full_like(mean, float("-inf"))
    return Gaussian(mean.float(), logvar.float())


def is_finite(encoded: Gaussian) -> bool:
    """Return whether all means and variances are finite; a log-variance may be -inf."""
    return bool(encoded.mean.isfinite().all() & encoded.uncertainty.isfinite().all())


@contextlib.contextmanager
def process_group() -> Any:
    """Yield the rank within torchrun's process group; only barriers need the group, so gloo suffices on any device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    from ..system import network

    network.choose_interface()
    dist.init_process_group("gloo", timeout=datetime.timedelta(hours=12))  # while one computes, the others wait
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def _collected(parts: Sequence[Gaussian]) -> Gaussian:
    """Return the batches of a chunk on the CPU: one copy for all of them, which is the only wait for a GPU."""
    mean_ND, logvar_ND = torch.stack(_cat(parts)).cpu()
    encoded = Gaussian(mean_ND, logvar_ND)
    if not is_finite(encoded):
        raise ValueError("The model's output is not finite: try --precision fp32, or another checkpoint.")
    return encoded


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute without TF32, to which cuDNN rounds convolutions by default; open_clip's training and some containers
    allow it for matrix products, too."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _cat(parts: Sequence[Gaussian]) -> Gaussian:
    return Gaussian(torch.cat([part.mean for part in parts]), torch.cat([part.logvar for part in parts]))
