"""Images and texts to Gaussians: in chunks, on one or many ranks, kept on disk so that an evaluation can be resumed.

A chunk is a file, named by what was encoded and by which weights. Ranks take chunks in turn, so that the result is the
same on any number of them; they must share the folder. A plain CLIP gives points: Gaussians of variance zero.
"""

import contextlib
import datetime
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import functional
from tqdm import tqdm

from ..ambiguity import Bank, BankEntailment, Calibration, HubnessCorrected
from ..data.batches import cut_texts
from ..data.decode import BadImage, decode_image
from ..distances import Distance, by_name
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from ..system.files import save_tensors
from ..system.tensors import fingerprint
from .columns import columns
from .samples import ImageRef

CHUNK = 512


@dataclass
class Encoder:
    """A model with its preprocessing and tokenizer.

    Arguments:
        probabilistic: whether the model's log-variances mean anything; if not, only its means are used.
        cache: the folder of the chunks.
        precision: "fp32", or "amp_bf16" for autocast.
        upright: turn images as their EXIF orientation says.
        bank: reference pairs of the model, or None.
        calibration: of the probability of a pair, or None.
        also: names of distances to rank by in addition to the default ones.
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
    bank: Bank | None = None
    calibration: Calibration | None = None
    also: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.model.eval()
        facts = [self.probabilistic, self.precision, repr(self.preprocess), type(self.tokenizer).__name__]
        facts += ["upright"] * self.upright
        self.fingerprint = fingerprint(self.model.state_dict(), facts)

    @property
    def scale(self) -> float:
        """What CLIP multiplies a cosine by."""
        return cosine_scale(self.model)

    @property
    def distance(self) -> str:
        """The name of the distance that the model was trained to rank by."""
        return self.model.pcmepp_cfg.ranks_by if isinstance(self.model, ProbabilisticModel) else "cosine"

    @property
    def distances(self) -> dict[str, Distance]:
        """What items are ranked by, by name, see `columns`; the cosine alone where only the means count; and those of
        the bank."""
        found = columns(self.model, self.scale, self.also) if self.probabilistic else by_name(["cosine"])
        if self.bank is not None:
            found |= {"bank": HubnessCorrected(self.bank), "bank_entailment": BankEntailment(self.bank)}
        return found

    def images(
        self, places: Sequence[ImageRef], name: str = "images", crops: Sequence[float] | None = None
    ) -> Gaussian:
        """`crops`: for each image the side of the centre crop that is encoded in its place, as a share of its own."""
        stamps = {file: os.stat(file) for file in {place.file for place in places}}
        facts: list[Any] = [(*place, stamps[place.file].st_size, stamps[place.file].st_mtime_ns) for place in places]
        if crops is not None:
            facts = list(zip(facts, crops, strict=True))

        def encode(indices: range) -> Gaussian:
            loader: DataLoader = DataLoader(
                _Images(
                    [places[i] for i in indices],
                    self.preprocess,
                    self.upright,
                    None if crops is None else [crops[i] for i in indices],
                ),
                self.batch_size,
                num_workers=self.workers,
            )
            try:
                return _cat([self._gaussian(batch, "image") for batch in loader])
            except ValueError as error:  # a worker's comes with its traceback as text
                raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None

        return self._chunked(encode, len(places), facts, name)

    def texts(self, texts: Sequence[str], name: str = "texts") -> Gaussian:
        """Equal texts are encoded once: they get equal Gaussians, and ties stay ties."""
        unique = list(dict.fromkeys(texts))

        def encode(indices: range) -> Gaussian:
            parts = [list(indices)[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]
            return _cat([self._gaussian(self._tokens([unique[i] for i in part]), "text") for part in parts])

        encoded = self._chunked(encode, len(unique), unique, name)
        index = {text: i for i, text in enumerate(unique)}
        rows = torch.tensor([index[text] for text in texts])
        return Gaussian(encoded.mean[rows], encoded.logvar[rows])

    def _tokens(self, texts: list[str]) -> Tensor:
        return tokenize(self.model, self.tokenizer, texts)

    def _gaussian(self, batch: Tensor, kind: str) -> Gaussian:
        autocast = torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.precision == "amp_bf16")
        with autocast:
            mean, logvar = gaussians(self.model, batch.to(self.device), kind, self.probabilistic)
        if not mean.isfinite().all():
            raise ValueError("The model's output is not finite: try --precision fp32, or another checkpoint.")
        return Gaussian(mean.cpu(), logvar.cpu())

    def _chunked(self, encode: Any, count: int, facts: Any, name: str) -> Gaussian:
        folder = self.cache / f"{name}-{hashlib.sha256((self.fingerprint + repr(facts)).encode()).hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        chunks = [(folder / f"{i:06d}.safetensors", range(i, min(i + CHUNK, count))) for i in range(0, count, CHUNK)]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = chunks[rank::world]
        for path, indices in tqdm(mine, desc=name, unit_scale=CHUNK, unit="", disable=None if rank == 0 else True):
            if _load(path, len(indices)) is None:
                if path.exists():
                    print(f"note: {path} is damaged, or of another version: encoded again.", file=sys.stderr)
                _save(path, encode(indices))
        if world > 1:
            dist.barrier()
        parts = []
        for path, indices in chunks:
            part = _load(path, len(indices))
            if part is None:
                raise ValueError(f"{path} is missing or damaged: the ranks must share --out; run the command again.")
            parts.append(part)
        return _cat(parts)


def cosine_scale(model: Any) -> float:
    """What CLIP multiplies a cosine by."""
    return model.logit_scale.detach().exp().item()


def tokenize(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Token ids [N, L]; L is that of the longest text, for models to which the padding makes no difference."""
    tokens = tokenizer(texts)
    if isinstance(model, ProbabilisticModel) and model.texts_may_be_cut:
        return cut_texts(tokens, pad=int(tokenizer([""])[0, -1]))
    return tokens


@torch.inference_mode()
def gaussians(model: Any, batch: Tensor, kind: str, probabilistic: bool) -> Gaussian:
    """One batch of images or tokens to fp32 Gaussians, which are points where only the means are used.

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


def _save(path: Path, gaussian: Gaussian) -> None:
    tensors = {"mean": gaussian.mean.contiguous(), "logvar": gaussian.logvar.contiguous()}
    save_tensors(tensors, path, {"sha256": _digest(path, tensors)})


def _load(path: Path, count: int) -> Gaussian | None:
    """A chunk of so many rows as it was saved, or None: a single wrong bit would change the results."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in ("mean", "logvar")}
            said = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, RuntimeError, TypeError):
        return None  # whatever the damage leads to
    good = said == _digest(path, tensors) and all(tensor.shape[:1] == (count,) for tensor in tensors.values())
    return Gaussian(tensors["mean"], tensors["logvar"]) if good else None


def _digest(path: Path, tensors: dict[str, Tensor]) -> str:
    """Of the content and of its place: a chunk that was moved is not what it seems."""
    return fingerprint(tensors, f"{path.parent.name}/{path.name}")


class _Images(Dataset):
    def __init__(
        self, places: Sequence[ImageRef], preprocess: Any, upright: bool, crops: Sequence[float] | None = None
    ):
        self.places, self.preprocess, self.upright, self.crops = places, preprocess, upright, crops

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Tensor:
        place = self.places[index]
        try:
            pixels = self.preprocess(decode_image(place.read(), upright=self.upright))
        except BadImage as error:
            # Left out, it would change the numbers without a word.
            raise ValueError(f"An image of {place.file} (at byte {place.offset}) cannot be read: {error}.") from None
        return pixels if self.crops is None else centre_crop(pixels, self.crops[index])


def centre_crop(pixels_CHW: Tensor, ratio: float) -> Tensor:
    """The middle of an image, a square of `ratio` times its shorter side, at the size of the whole, [C, H, W]."""
    size = list(pixels_CHW.shape[1:])
    side = max(1, round(min(size) * ratio))
    return functional.resize(functional.center_crop(pixels_CHW, [side, side]), size, antialias=True)


@contextlib.contextmanager
def process_group() -> Any:
    """The process group of a `torchrun`; only barriers need it, so gloo does on any device. Yields the rank."""
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


def _cat(parts: Sequence[Gaussian]) -> Gaussian:
    return Gaussian(torch.cat([part.mean for part in parts]), torch.cat([part.logvar for part in parts]))
