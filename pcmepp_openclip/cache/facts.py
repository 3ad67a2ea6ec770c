"""What cached tokens depend on. Tokens of other weights, images or texts must never be taken for those of a run."""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..data.batches import LoaderSpec
from ..data.remaining import content_probes, shards_digest
from ..data.sizes import write_json
from ..system.tensors import fingerprint

FILE = "cache.json"
VERSION = 1  # of the files

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
SCALES = ("logit_scale", "logit_bias")  # of the loss: no token depends on them, and open_clip's loop clamps the first
PROBES = ["", "a photo of a dog", "Zwölf Boxkämpfer, 1 x 2 = 2!", "dog " * 500]


def facts_of(model: nn.Module, config: dict, precision: str, spec: LoaderSpec) -> dict[str, Any]:
    """The facts, as JSON has them.

    Arguments:
        model: one whose towers are frozen.
        config: the config that it was built from, without what only the loss depends on.
        spec: how the samples are read.
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
        "content": _digest(sorted(content_probes(spec.shards).items())),
    }


def identity_of(facts: dict[str, Any]) -> str:
    """A short name for these facts."""
    return _digest(facts)[:16]


def exists(folder: Path) -> bool:
    """Whether the folder holds a cache, complete or not."""
    return (folder / FILE).exists()


def check_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Note the facts in a new cache; ValueError if the folder holds other tokens, or something else."""
    path = folder / FILE
    if not exists(folder):
        if any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise ValueError(f"--cache-tokens {folder} is neither empty nor a cache of tokens: name a new folder.")
        return write_json(path, facts)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: delete the folder, or name a new one by --cache-tokens.")
    now = json.loads(json.dumps(facts))
    differing = [words for name, words in WORDS.items() if found.get(name) != now[name]]
    if differing:
        raise ValueError(
            f"--cache-tokens {folder} holds the tokens of another run, with a difference in {', '.join(differing)}: "
            "name a new folder, or delete this one."
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
