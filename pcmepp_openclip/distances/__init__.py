"""Distances between Gaussians, one per file.

`base` defines what a distance is. Three answer three questions about an image and a caption: `csd`, the distance of
PCME++, which caption was written for it; `cosine`, how related they are, as in CLIP; `entailment`, whether the caption
is true of it. `wasserstein` is a common alternative. A new distance is one file and one line of `DISTANCES`.
`approximate` searches a large gallery by an index over the means.
"""

from collections.abc import Iterable, Mapping

from .base import Distance, Factors
from .cosine import Cosine
from .csd import CSD, csd
from .entailment import Entailment
from .wasserstein import Wasserstein

DISTANCES: dict[str, Distance] = {
    "cosine": Cosine(),
    "csd": CSD(),
    "entailment": Entailment(),
    "wasserstein": Wasserstein(),
}
"""All distances by name: the columns of `pcmepp eval`, and, but for `entailment`, the choices of `pcmepp train
--distance`."""


def get_distance(name: str | Distance) -> Distance:
    """The registered distance of that name, ValueError if there is none; a distance is returned as it is."""
    if isinstance(name, Distance):
        return name
    if name not in DISTANCES:
        raise ValueError(f"Unknown distance '{name}'; known distances: {', '.join(DISTANCES)}.")
    return DISTANCES[name]


def trainable(distances: Mapping[str, Distance]) -> list[str]:
    """The names of those that a model can be trained with."""
    return [name for name, distance in distances.items() if distance.trainable]


def by_name(distances: Iterable[str] | Mapping[str, Distance]) -> dict[str, Distance]:
    """Distances by name, the registered ones of these names, or those that are given."""
    return dict(distances) if isinstance(distances, Mapping) else {name: get_distance(name) for name in distances}


__all__ = [
    "CSD",
    "DISTANCES",
    "Cosine",
    "Distance",
    "Entailment",
    "Factors",
    "Wasserstein",
    "by_name",
    "csd",
    "get_distance",
    "trainable",
]
