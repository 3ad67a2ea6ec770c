"""What cached tokens depend on. Tokens of other weights, images or texts must never be taken for those of a run."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from ..data.batches import LoaderSpec
from ..data.plan import Shard
from ..data.remaining import shards_digest
from ..data.sizes import write_json
from ..data.sources import kind, local_path
from ..system.digest import digest_of
from ..system.tensors import fingerprint

FILE = "cache.json"
VERSION = 2  # of the files

WORDS = {  # what a fact is called where it differs
    "version": "the format of its files",
    "model": "the config of the model",
    "weights": "the frozen weights",
    "precision": "--precision",
    "images": "the preprocessing of images",
    "tokenizer": "the tokenizer",
    "shards": "the shards of --train-data or their counts",
    "content": "what the shards hold",
}
READ = "read"  # the entry of `cache.json` with what `read_shards` found
SHARDS_AT_A_TIME = 4
SCALES = ("logit_scale", "logit_bias")  # of the loss: no token depends on them, and open_clip's loop clamps the first
PROBES = ["", "a photo of a dog", "Zwölf Boxkämpfer, 1 x 2 = 2!", "dog " * 500]


def read_shards(folder: Path, shards: Sequence[Shard]) -> dict[str, list]:
    """Return [size, time of its last change, digest] of each local shard, by its index. A shard of the size and time
    that the cache in the folder has noted is not read again."""
    found = _noted(folder)
    before = found.get(READ) if isinstance(found, dict) else None

    def read(index: int) -> list | None:
        try:
            with open(local_path(shards[index].place), "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                now = [status.st_size, status.st_mtime_ns]
                noted = before.get(str(index)) if isinstance(before, dict) else None
                if isinstance(noted, list) and len(noted) == 3 and noted[:2] == now:
                    return noted
                return [*now, digest_of(file, status.st_size).decode()]
        except OSError:
            return None

    local = [index for index, shard in enumerate(shards) if kind(shard.place) == "local"]
    with ThreadPoolExecutor(SHARDS_AT_A_TIME) as pool:
        return {str(index): entry for index, entry in zip(local, pool.map(read, local), strict=True) if entry}


def _noted(folder: Path) -> Any:
    """Return the content of `cache.json`; None if it cannot be read."""
    try:
        return json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def facts_of(model: nn.Module, config: dict, precision: str, spec: LoaderSpec, read: dict[str, list]) -> dict[str, Any]:
    """The facts, as JSON has them.

    Arguments:
        model: one whose towers are frozen.
        config: the config that it was built from, without what only the loss depends on.
        spec: how the samples are read.
        read: what `read_shards` found.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name: x for name, x in model.state_dict().items() if name not in trained and name not in SCALES}
    images = [repr(spec.transform), [part.flatten().tolist() for part in spec.normalization or ()]]
    return {
        "version": VERSION,
        "model": config,
        "weights": fingerprint(frozen, None),
        "precision": precision,
        "images": [*images, spec.upright, spec.at_least, spec.max_pixels],
        "tokenizer": [spec.context_length, _digest(spec.tokenizer(PROBES).tolist())],
        "shards": shards_digest(spec.shards),
        "content": _digest({index: (size, digest) for index, (size, _, digest) in read.items()}),
    }


def identity_of(facts: dict[str, Any]) -> str:
    """A short name for these facts."""
    return _digest(facts)[:16]


def exists(folder: Path) -> bool:
    """Whether the folder holds a cache, complete or not."""
    return (folder / FILE).exists()


def check_facts(folder: Path, facts: dict[str, Any], read: dict[str, list]) -> None:
    """Note the facts in a new cache, and what `read_shards` found; ValueError if the folder holds other tokens, or
    something else."""
    path = folder / FILE
    if not exists(folder):
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise ValueError(f"--cache-tokens {folder} is neither empty nor a cache of tokens: name a new folder.")
        return write_json(path, {**facts, READ: read})
    found = _noted(folder)
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: delete the folder, or name a new one by --cache-tokens.")
    now = json.loads(json.dumps(facts))
    differing = [words for name, words in WORDS.items() if found.get(name) != now[name]]
    if differing:
        raise ValueError(
            f"--cache-tokens {folder} holds the tokens of another run, with a difference in {', '.join(differing)}: "
            "name a new folder, or delete this one."
        )
    if found.get(READ) != read:
        write_json(path, {**facts, READ: read})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
