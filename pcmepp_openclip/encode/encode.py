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
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import functional
from tqdm import tqdm

from ..data.batches import cut_texts
from ..data.captioned import ImageRef
from ..data.decode import BadImage, decode_image
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from ..system.version import __version__
from .load import LoadedModel
from .store import Store

CHUNK = 512  # rows per file


@dataclass
class Encoder:
    """A model that encodes, and the folder of what it has encoded.

    Arguments:
        cache: the folder of the chunks.
        precision: "fp32", or "amp_bf16" for autocast.
        upright: turn images as their EXIF orientation says.
    """

    loaded: LoadedModel
    cache: Path
    precision: str = "fp32"
    batch_size: int = 64
    workers: int = 0
    upright: bool = False

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return a fingerprint of all that embeddings depend on except the images and texts themselves."""
        loaded = self.loaded
        facts: list[Any] = [loaded.model_fingerprint, repr(loaded.model), __version__]
        facts += [loaded.probabilistic, self.precision, repr(loaded.preprocess), self.upright]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

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
        data = ImageDataset(places, self.loaded.preprocess, self.upright, crops)

        def pixels(batches: list[list[int]]) -> Iterator[Tensor]:
            return image_batches(data, batches, self.workers, self.loaded.device)

        return self._stored("image", pixels, len(places), facts, name)

    def texts(self, texts: Sequence[str], name: str = "texts") -> Gaussian:
        """Encode texts. Equal ones are encoded once: they get equal Gaussians, and ties stay ties."""
        unique = list(dict.fromkeys(texts))

        def tokens(batches: list[list[int]]) -> Iterator[Tensor]:
            return (tokenize(self.loaded.model, self.loaded.tokenizer, [unique[i] for i in batch]) for batch in batches)

        encoded = self._stored("text", tokens, len(unique), unique, name)
        index = {text: i for i, text in enumerate(unique)}
        return encoded.select([index[text] for text in texts])

    def _stored(
        self, kind: str, inputs: Callable[[list[list[int]]], Iterator[Tensor]], count: int, facts: Any, name: str
    ) -> Gaussian:
        """Return all rows from the store, in which the missing chunks are written first.

        Arguments:
            kind: "image" or "text".
            inputs: yields the pixels or token ids of batches of rows.
            facts: the images or texts.
        """
        identity = hashlib.sha256((self.fingerprint + repr((CHUNK, facts))).encode()).hexdigest()[:16]
        store = Store(self.cache / f"{name}-{identity}", identity)
        store.folder.mkdir(parents=True, exist_ok=True)
        files = [f"{start:06d}" for start in range(0, count, CHUNK)]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = files[rank::world]
        missing = [file for file in mine if store.read(file) is None]
        for file in missing:
            if store.path(file).exists():
                print(f"note: {store.path(file)} is damaged, or of another version: encoded again.", file=sys.stderr)
        # No batch spans two chunks: a resumed evaluation has the same ones.
        ends = {file: min(int(file) + CHUNK, count) for file in missing}
        starts = {file: range(int(file), ends[file], self.batch_size) for file in missing}
        batches = [list(range(i, min(i + self.batch_size, ends[file]))) for file in missing for i in starts[file]]
        encoded = (self._gaussian(batch, kind) for batch in inputs(batches))
        settings = {"initial": len(mine) - len(missing), "total": len(mine), "disable": None if rank == 0 else True}
        for file in tqdm(missing, desc=name, unit_scale=CHUNK, unit="", **settings):
            store.write(file, _collected([next(encoded) for _ in starts[file]])._asdict())
        if world > 1:
            dist.barrier()
        parts = []
        for file in files:
            part = store.read(file)
            if part is None:
                raise ValueError(
                    f"{store.path(file)} is missing or damaged: the ranks must share --out; run the command again."
                )
            parts.append(Gaussian(**part))
        return joined(parts)

    def _gaussian(self, batch: Tensor, kind: str) -> Gaussian:
        """Encode a batch on the device. No step waits for a GPU: the next batch is sent while this one is computed."""
        device = torch.device(self.loaded.device)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "amp_bf16")
        with autocast, _without_tf32():
            batch = batch.to(device, non_blocking=device.type == "cuda")
            return gaussians(self.loaded.model, batch, kind, self.loaded.probabilistic)


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


def joined(parts: Sequence[Gaussian]) -> Gaussian:
    """Return the samples of several batches together."""
    return Gaussian(torch.cat([part.mean for part in parts]), torch.cat([part.logvar for part in parts]))


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
    mean_ND, logvar_ND = torch.stack(joined(parts)).cpu()
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


class ImageDataset(Dataset):
    """Images as their preprocessing gives them, pixels [C, H, W]. An image that cannot be read is a ValueError.

    Arguments:
        crops: for each image the side of the centre crop in its place, as a share of its own, or None.
    """

    def __init__(
        self, places: Sequence[ImageRef], preprocess: Any, upright: bool = False, crops: Sequence[float] | None = None
    ):
        self.places, self.preprocess, self.upright, self.crops = places, preprocess, upright, crops

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Tensor:
        place = self.places[index]
        try:
            pixels = self.preprocess(decode_image(place.read(), upright=self.upright))
        except BadImage as error:
            # Leaving it out would change the numbers without a word.
            raise ValueError(f"An image of {place.file} (at byte {place.offset}) cannot be read: {error}.") from None
        return pixels if self.crops is None else centre_crop(pixels, self.crops[index])


def centre_crop(pixels_CHW: Tensor, ratio: float) -> Tensor:
    """Return the middle of an image, a square of `ratio` times its shorter side, at the size of the whole."""
    size = list(pixels_CHW.shape[1:])
    side = max(1, round(min(size) * ratio))
    return functional.resize(functional.center_crop(pixels_CHW, [side, side]), size, antialias=True)


def image_batches(data: ImageDataset, batches: Sequence[list[int]], workers: int, device: str) -> Iterator[Tensor]:
    """Yield the pixels of each batch of indices, [N, C, H, W], in the order of `batches`.

    Arguments:
        workers: processes that decode; they work ahead of the caller, over the whole list. 0 for this process.
        device: where the pixels go. For CUDA they come in pinned memory, from which a copy needs no wait.
    """
    loader: DataLoader = DataLoader(
        data,
        batch_sampler=batches,
        num_workers=min(workers, len(batches)),
        pin_memory=torch.device(device).type == "cuda",
    )
    yield from without_traceback(loader)


def without_traceback(loader: DataLoader) -> Iterator[Any]:
    """Yield from a loader. The ValueError of a worker, which comes with its traceback as text, becomes one sentence."""
    try:
        yield from loader
    except ValueError as error:
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None
