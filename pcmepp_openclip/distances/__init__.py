"""Distances between Gaussians, one per file.

`base` defines what a distance is; `cosine` ranks by the means alone, as CLIP does; `csd` is the distance of PCME++;
`wasserstein` is a common alternative. A new distance is one file and one line of `DISTANCES`.
"""

from .base import Distance, Factors
from .cosine import Cosine
from .csd import CSD, csd
from .wasserstein import Wasserstein

DISTANCES: dict[str, Distance] = {
    "cosine": Cosine(),
    "csd": CSD(),
    "wasserstein": Wasserstein(),
}
"""All distances by name: the choices of `pcmepp train --distance`, and the columns of `pcmepp eval`."""


def get_distance(name: str) -> Distance:
    """The registered distance of that name; ValueError if there is none."""
    if name not in DISTANCES:
        raise ValueError(f"Unknown distance '{name}'; known distances: {', '.join(DISTANCES)}.")
    return DISTANCES[name]


__all__ = ["CSD", "DISTANCES", "Cosine", "Distance", "Factors", "Wasserstein", "csd", "get_distance"]
