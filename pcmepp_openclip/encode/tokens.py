"""The output of frozen towers, computed once and then read: `pcmepp train --head-only --cache-tokens DIR`.

A file holds the usable samples of a part of a shard, in order:

    image_mean [n, D], text_mean [n, D]     features of the towers, fp32
    image_x [n, L, C]                       input of the log-variance branch of images, fp16
    text_x [X, C], text_ids [T]             input of the branch of texts, fp16, and token ids, int32, unpadded

`cache.json` records all that they depend on: tokens of other weights, images or texts must never be taken for those of
a run.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..data.batches import LoaderSpec
from ..data.build import make_loader_spec
from ..data.crops import as_pixels
from ..data.pixels import Normalization, normalize
from ..data.plan import Segment, Shard
from ..data.remaining import shards_digest
from ..data.sizes import write_json
from ..data.sources import kind, local_path
from ..data.spec import DataSpec
from ..data.tally import Tally
from ..models.batches import CachedTokens
from ..models.fingerprint import PROBES
from ..system.digest import digest_of
from ..system.tensors import fingerprint
from .store import Row, Rows, Store, identity_of
from .token_loader import CacheLoader, EpochPlan
from .token_pass import Ranks, fill

FILE = "cache.json"
VERSION = 3  # version of the files' format
FILE_BYTES = 64_000_000  # limit by the footprint, since each worker of the first pass collects a file in memory
FP16_MAX = torch.finfo(torch.float16).max
SHARDS_AT_A_TIME = 4
SCALES = ("logit_scale", "logit_bias")  # no token depends on them, and the training loop clamps the first
READ = "read"  # the entry of `cache.json` with the digests of `read_shards`
WORDS = {  # the words for a fact that differs
    "version": "the format of its files",
    "model": "the config of the model",
    "weights": "the frozen weights",
    "precision": "--precision",
    "images": "the preprocessing of images",
    "tokenizer": "the tokenizer",
    "shards": "the shards of --train-data or their counts",
    "content": "what the shards hold",
}


class Footprint(NamedTuple):
    """Bytes per sample on disk: those of an image exactly, those of a text at most."""

    image: int
    text: int

    @property
    def total(self) -> int:
        return self.image + self.text


def footprint_of(image: CachedTokens, text: CachedTokens) -> Footprint:
    """Return the footprint of some images and of texts of the full length; they may be on the device "meta"."""
    dim, tokens = image.mean_ND.shape[1], image.x_NLC[0].numel()
    assert text.text_NL is not None
    numbers = 3 * torch.int64.itemsize  # the ends of two tensors, and the digest
    return Footprint(4 * dim + 2 * tokens, 4 * dim + 2 * text.x_NLC[0].numel() + 4 * text.text_NL.shape[1] + numbers)


def rows_of(image: CachedTokens, text: CachedTokens, length_N: Tensor) -> Row:
    """Return the rows of a batch, with the length of each row of a text.

    Arguments:
        length_N: how many leading tokens of each text count.
    """
    assert text.text_NL is not None
    more = text.x_NLC.shape[1] - text.text_NL.shape[1]  # some towers append a token of their own
    rows = {
        "image_mean": image.mean_ND.float(),
        "image_x": _half(image.x_NLC),
        "text_mean": text.mean_ND.float(),
        "text_x": _half(_leading(text.x_NLC, length_N + more)),
        "text_ids": _leading(text.text_NL, length_N).int(),
        "text_x_ends": length_N.long() + more,
        "text_ids_ends": length_N.long(),
    }
    return {name: x.cpu() for name, x in rows.items()}


def _leading(x_NL: Tensor, length_N: Tensor) -> Tensor:
    """Return the first entries of each row, one row after the other."""
    return x_NL[torch.arange(x_NL.shape[1], device=x_NL.device) < length_N[:, None]]


def _half(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise ValueError("The towers' output is not finite: try --precision fp32, or other weights.")
    return x.clamp(-FP16_MAX, FP16_MAX).half()


@dataclass(frozen=True)
class Towers:
    """Frozen towers, as a run computes them.

    Arguments:
        model: a PCME++ model after `freeze_towers`.
        config: the config that it was built from, without the settings that only the loss uses.
        precision: the run's --precision.
        autocast: makes a context in which a run with that precision computes.
        dtype: the dtype of images; None to keep their own.
        normalization: that of pixels, see `data.pixels`; None for images that come as the model takes them.
    """

    model: Any
    config: dict
    precision: str
    device: torch.device | str = "cpu"
    autocast: Callable[[], AbstractContextManager] = contextlib.nullcontext
    dtype: torch.dtype | None = None
    normalization: Normalization | None = None

    def encode(self, images: Tensor, texts: Tensor) -> tuple[CachedTokens, CachedTokens, Tensor]:
        """Return the tokens of images and of token ids [N, L] as a batch of the loader has them, and how many tokens
        of each text count, [N]."""
        image_NCHW = normalize(images.to(self.device), self.normalization).to(self.dtype)
        texts = texts.to(self.device)
        with self.autocast():
            return self.model.cache_image(image_NCHW), self.model.cache_text(texts), self.model.text_lengths(texts)


def train_data(
    folder: Path, spec: DataSpec, towers: Towers, transform: Any, epoch: int, tokenizer: Any, ranks: Ranks
) -> Any:
    """Return the training data of a run, from the towers' output in `folder`, which is computed first if need be.

    Arguments:
        transform: the preprocessing of images without augmentation.
    """
    from ..host import data as host_data

    reading = make_loader_spec(spec, transform, tokenizer, rank=ranks.rank, ranks=ranks.world_size)
    towers = replace(towers, normalization=reading.normalization)
    image = reading.transform(Image.new("RGB", (256, 256)))
    pixels = image if reading.normalization is None else as_pixels(image)
    footprint = footprint_of(*towers.encode(pixels[None], reading.tokenizer([""]))[:2])
    files = files_of(reading.shards, footprint)
    prepared: tuple[str, list[str]] | str = ("", [])
    if ranks.rank == 0:
        try:
            prepared = _prepare(folder, files, footprint, reading, towers)
        except ValueError as error:
            prepared = str(error)
    prepared = ranks.gather(prepared)[0]
    if isinstance(prepared, str):
        raise ValueError(prepared)
    identity, missing = prepared
    store, max_bad = Store(folder, identity), spec.config.train_data_max_bad_fraction
    if missing:
        some = {name: files[name] for name in missing}
        fill(store, some, reading, lambda *batch: rows_of(*towers.encode(*batch)), spec.config.workers, ranks, max_bad)

    counts, total = [], Tally()
    for name in files:
        content = store.content(name)
        if content is None:
            raise ValueError(f"{store.path(name)} is missing or damaged: all ranks must see --cache-tokens.")
        counts.append(content.rows)
        total.add(Tally.from_plain(content.facts["tally"]))
    if ranks.rank == 0:
        for line in total.lines(list(reading.names)):
            logging.info("Cache: %s", line)
    total.judge(list(reading.names), max_bad, 1)
    if not sum(counts):
        raise ValueError(f"--cache-tokens {folder} has no usable sample: run `pcmepp data check` on --train-data.")
    config, position = spec.config, host_data.Position(epoch)
    per_epoch = spec.filled(config.train_num_samples or sum(counts))
    plan = EpochPlan(
        sum(counts), per_epoch, config.batch_size, ranks.rank, ranks.world_size, seed=config.seed, position=position
    )
    rows, contents_digest = Rows(store, list(files), counts), identity_of([identity, counts])
    loader = CacheLoader(rows, contents_digest, plan, config.workers, reading.context_length, towers.model.text_pad_id)
    return host_data.TrainData(dataloader=loader, shared_epoch=position.epoch, position=position)


def files_of(shards: Sequence[Shard], footprint: Footprint) -> dict[str, Segment]:
    """Return the files for all samples of counted shards, by name, each of `FILE_BYTES` at most."""
    files, most = {}, max(1, FILE_BYTES // footprint.total)
    for number, shard in enumerate(shards):
        assert shard.size is not None
        samples, count = shard.size.samples, -(-shard.size.samples // most)
        for i in range(count):
            start, stop = samples * i // count, samples * (i + 1) // count
            files[f"{number:06d}-{start:08d}"] = Segment(shard, start, stop)
    return files


def _prepare(
    folder: Path, files: dict[str, Segment], footprint: Footprint, reading: LoaderSpec, towers: Towers
) -> tuple[str, list[str]]:
    """Return the identity of the store and the files that it lacks; ValueError if it cannot be used or filled."""
    logging.info("Cache: local shards are read for their digests, unless these are known.")
    read = read_shards(folder, reading.shards)
    facts = facts_of(towers, reading, read)
    check_facts(folder, facts, read)
    store = Store(folder, identity_of(facts))
    missing = [name for name in files if store.content(name) is None]
    samples, lacking = (sum(files[name].stop - files[name].start for name in some) for some in (files, missing))
    logging.info(
        "Cache: augmentations are off: the tokens are computed once, with the preprocessing of the validation."
    )
    if not missing:
        logging.info("Using the cache %s, which holds the tokens of %d samples.", folder, samples)
        return store.identity, missing
    free = check_room(folder, lacking * footprint.total)
    logging.info(
        "Cache: the tokens of %d samples will be written to %s: %s for images and at most %s for texts; %s are free.%s",
        *(lacking, folder, readable_size(lacking * footprint.image), readable_size(lacking * footprint.text)),
        *(readable_size(free), f" {samples - lacking} samples are there already." if samples > lacking else ""),
    )
    return store.identity, missing


def check_room(folder: Path, needed: int) -> int:
    """Return the bytes that are free where the folder is or will be; ValueError if they are fewer than needed."""
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


def exists(folder: Path) -> bool:
    """Return whether the folder holds cached tokens, complete or not."""
    return (folder / FILE).exists()


def facts_of(towers: Towers, reading: LoaderSpec, read: dict[str, list]) -> dict[str, Any]:
    """Return all that the tokens depend on, in types of JSON.

    Arguments:
        reading: how the samples are read.
        read: the result of `read_shards`.
    """
    trained = {name for name, parameter in towers.model.named_parameters() if parameter.requires_grad}
    state = towers.model.state_dict()
    images = [repr(reading.transform), [part.flatten().tolist() for part in reading.normalization or ()]]
    return {
        "version": [VERSION, FILE_BYTES],
        "model": towers.config,
        "weights": fingerprint({name: x for name, x in state.items() if name not in {*trained, *SCALES}}, None),
        "precision": towers.precision,
        "images": [*images, reading.upright, reading.at_least, reading.max_pixels],
        "tokenizer": [reading.context_length, identity_of(reading.tokenizer(PROBES).tolist())],
        "shards": shards_digest(reading.shards),
        "content": identity_of({index: (size, digest) for index, (size, _, digest) in read.items()}),
    }


def read_shards(folder: Path, shards: Sequence[Shard]) -> dict[str, list]:
    """Return [size, time of its last change, digest] of each local shard, by its index. A shard of the size and time
    that the cache in the folder has noted is not read again."""
    before = _read_facts(folder).get(READ)

    def read(index: int) -> list | None:
        try:
            with open(local_path(shards[index].place), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                now = [status.st_size, status.st_mtime_ns]
                entry = before.get(str(index)) if isinstance(before, dict) else None
                if isinstance(entry, list) and len(entry) == 3 and entry[:2] == now:
                    return entry
                return [*now, digest_of(file, status.st_size).decode()]
        except OSError:
            return None

    local = [index for index, shard in enumerate(shards) if kind(shard.place) == "local"]
    with ThreadPoolExecutor(SHARDS_AT_A_TIME) as pool:
        return {str(index): entry for index, entry in zip(local, pool.map(read, local), strict=True) if entry}


def check_facts(folder: Path, facts: dict[str, Any], read: dict[str, list]) -> None:
    """Note the facts and the digests of the shards in a new cache; ValueError if the folder holds other tokens, or
    something else."""
    path = folder / FILE
    if not exists(folder):
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise ValueError(f"--cache-tokens {folder} is neither empty nor a cache of tokens: name a new folder.")
        return write_json(path, {**facts, READ: read})
    noted = _read_facts(folder)
    if not noted:
        raise ValueError(f"{path} cannot be read: delete the folder, or name a new one by --cache-tokens.")
    now = json.loads(json.dumps(facts))
    differing = [words for name, words in WORDS.items() if noted.get(name) != now[name]]
    if differing:
        raise ValueError(
            f"--cache-tokens {folder} holds the tokens of another run, with a difference in {', '.join(differing)}: "
            "name a new folder, or delete this one."
        )
    if noted.get(READ) != read:
        write_json(path, {**facts, READ: read})


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return the content of `cache.json`; {} if it cannot be read."""
    try:
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
