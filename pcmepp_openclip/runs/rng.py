"""The state of all random number generators of a process, as tensors and plain types."""

import random
from typing import Any

import numpy
import torch


def state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    out = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys, dtype="int64")), place, has_gauss, cached],
    }
    if torch.cuda.is_available():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def restore(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, place, has_gauss, cached = saved["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), place, has_gauss, cached))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
