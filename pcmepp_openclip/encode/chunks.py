"""Gaussians on disk, in files of so many rows: an evaluation that was interrupted encodes only what is missing.

A chunk carries a digest of its content and of its place, because a single wrong bit would change the results.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..gaussian import Gaussian
from ..system.files import save_tensors
from ..system.tensors import fingerprint

CHUNK = 512


def chunk_files(folder: Path, count: int) -> list[tuple[Path, range]]:
    """The files of `count` rows in their order, and the rows of each."""
    starts = range(0, count, CHUNK)
    return [(folder / f"{start:06d}.safetensors", range(start, min(start + CHUNK, count))) for start in starts]


def save_chunk(path: Path, gaussian: Gaussian) -> None:
    tensors = {"mean": gaussian.mean.contiguous(), "logvar": gaussian.logvar.contiguous()}
    save_tensors(tensors, path, {"sha256": _digest(path, tensors)})


def load_chunk(path: Path, count: int) -> Gaussian | None:
    """A chunk of `count` rows as it was saved, [count, D] on the CPU, or None if it is missing or damaged."""
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
