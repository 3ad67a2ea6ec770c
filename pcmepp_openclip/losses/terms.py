"""The registry of loss terms. The training loss is their weighted sum."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .batch import PairBatch
from .difficulty import difficulty
from .pcme import pcme
from .triplet import triplet


class LossTerm(NamedTuple):
    """A term of the training loss.

    Arguments:
        compute: a function of a `PairBatch` that returns a 0-d tensor, see `PairBatch`.
        weight: the default weight; with 0 the term is left out unless a config or a flag sets its weight.
        help: a description in a few words, for `pcmepp train --help`.
        takes_labels: whether it is defined for the soft labels of a batch, `PairBatch.labels`. A term that is not
            cannot be trained with mixed images or several positives.
    """

    compute: Callable[[PairBatch], Tensor]
    weight: float
    help: str
    takes_labels: bool = False


LOSSES: dict[str, LossTerm] = {
    "contrastive": LossTerm(lambda batch: batch.pairs.contrastive, 1.0, "InfoNCE, the loss of CLIP"),
    "match": LossTerm(lambda batch: batch.pairs.match, 1.0, "the matching loss", True),
    "pp": LossTerm(
        lambda batch: batch.pairs.pp, 0.0, "the pseudo-positive loss, alpha in the paper", takes_labels=True
    ),
    "difficulty": LossTerm(difficulty, 0.0, "the regression of the uncertainty on the InfoNCE of the own pair"),
    "triplet": LossTerm(triplet, 0.0, "the triplet loss, VSE-infinity's"),
    "pcme": LossTerm(pcme, 0.0, "PCME's soft contrastive loss, by Monte-Carlo match probabilities"),
    "vib": LossTerm(lambda batch: batch.vib, 1e-6, "the VIB loss, beta in the paper", takes_labels=True),
}
"""All terms of the loss by name. Each has a key `NAME_weight` in `pcmepp_cfg` and a flag `--NAME-weight`."""

WEIGHT = "_weight"  # suffix of a term's key in a config; in a flag it is "-weight"


def loss_weights(weights: dict[str, float]) -> dict[str, float]:
    """Return the weight of every term in the order of `LOSSES`, by the name of the term.

    Arguments:
        weights: weights by key, such as {"match_weight": 2.0}; other terms have their default.
    """
    known = {name + WEIGHT: name for name in LOSSES}
    for key in weights:
        if key not in known:
            raise ValueError(f"There is no loss term with the weight '{key}'; known weights: {', '.join(known)}.")
    return {name: float(weights.get(key, LOSSES[name].weight)) for key, name in known.items()}


def without_labels(weights: dict[str, float]) -> list[str]:
    """Return the names of the terms that are switched on and take no soft labels. `weights` are by name."""
    return [name for name, weight in weights.items() if weight > 0 and not LOSSES[name].takes_labels]
