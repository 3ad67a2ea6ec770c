"""Distances between Gaussians, one per file.

`base` defines a distance. Three of them answer three questions about an image and a caption: `csd`, the distance of
PCME++, which caption was written for it; `cosine`, how related they are, as in CLIP; `entailment`, whether the caption
is true of it. The others are those that the paper compares CSD with: `wasserstein`, `kl`, `js`, `elk`, `bhattacharyya`
and PCME's `match_probability`; and `euclidean`, which is CSD without variances. `tiles` is for distances that are no
matrix product, and `approximate` searches a large gallery by an index over the means. A new distance is one file and
one line of `DISTANCES`.
"""

from collections.abc import Iterable, Mapping

from .base import Distance, Factors, Transposed
from .bhattacharyya import Bhattacharyya
from .cosine import Cosine
from .csd import CSD, csd
from .elk import ExpectedLikelihood
from .entailment import Entailment
from .euclidean import Euclidean
from .js import JS
from .kl import KL
from .match_probability import MatchProbability
from .tiles import SumOverDimensions
from .wasserstein import Wasserstein

DISTANCES: dict[str, Distance] = {
    "cosine": Cosine(),
    "csd": CSD(),
    "entailment": Entailment(),
    "wasserstein": Wasserstein(),
    "euclidean": Euclidean(),
    "kl": KL(),
    "js": JS(),
    "elk": ExpectedLikelihood(),
    "bhattacharyya": Bhattacharyya(),
    "match_probability": MatchProbability(),
}
"""All distances by name. `pcmepp eval` can rank by each of them, and all but `entailment` are choices of `pcmepp train
--distance`."""


def get_distance(name: str | Distance) -> Distance:
    """Return the registered distance of that name, ValueError if there is none; a distance is returned as it is."""
    if isinstance(name, Distance):
        return name
    if name not in DISTANCES:
        raise ValueError(f"Unknown distance '{name}'; known distances: {', '.join(DISTANCES)}.")
    return DISTANCES[name]


def trainable(distances: Mapping[str, Distance]) -> list[str]:
    """Return the names of the distances that a model can be trained with."""
    return [name for name, distance in distances.items() if distance.trainable]


def by_name(distances: Iterable[str] | Mapping[str, Distance] | None = None) -> dict[str, Distance]:
    """Return distances by name.

    Arguments:
        distances: names of registered distances, distances by name, which are returned as they are, or None for the
            registered ones that every evaluation ranks by.
    """
    if distances is None:
        return {name: distance for name, distance in DISTANCES.items() if distance.ranked_by_default}
    return dict(distances) if isinstance(distances, Mapping) else {name: get_distance(name) for name in distances}


__all__ = [
    "CSD",
    "DISTANCES",
    "JS",
    "KL",
    "Bhattacharyya",
    "Cosine",
    "Distance",
    "Entailment",
    "Euclidean",
    "ExpectedLikelihood",
    "Factors",
    "MatchProbability",
    "SumOverDimensions",
    "Transposed",
    "Wasserstein",
    "by_name",
    "csd",
    "get_distance",
    "trainable",
]
