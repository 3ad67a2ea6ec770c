"""The state of all random number generators that a run draws from, as tensors and plain types.

Of a machine's GPUs, only the one that the run computes on has a part: the state of another one says nothing about the
run, and reading it would take memory there.
"""

import random
from typing import Any

import numpy
import torch


def state(device: str) -> dict[str, Any]:
    """Return the current state of all generators.

    Arguments:
        device: the device that the run computes on, such as "cpu" or "cuda:1".
    """
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    out = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys, dtype="int64")), place, has_gauss, cached],
    }
    if torch.device(device).type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device)
    return out


def restore(saved: dict[str, Any], device: str) -> None:
    """Set all generators to what `state` has returned, on any device; a GPU's is set if both devices are GPUs."""
    torch.set_rng_state(saved["torch"])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, place, has_gauss, cached = saved["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), place, has_gauss, cached))
    if "cuda" in saved and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)
