"""The distances by which a model's retrieval and classification are evaluated: the columns of the tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..ambiguity import Bank, BankEntailment, Calibration, HubnessCorrected
from ..distances import Distance, Entailment, MatchProbability, by_name
from ..encode.encode import Encoder
from ..models.pcmepp import ProbabilisticModel


@dataclass
class EvaluatedModel(Encoder):
    """A model that encodes, with all that its results are ranked and judged by.

    Arguments:
        bank: reference pairs of the model, or None.
        calibration: of the probability of a pair, or None.
        also: names of distances to rank by in addition to the default ones.
    """

    bank: Bank | None = None
    calibration: Calibration | None = None
    also: Sequence[str] = ()

    @property
    def distance(self) -> str:
        """Return the name of the distance that the model was trained to rank by, "cosine" if it has no variances."""
        return self.loaded.model.pcmepp_cfg.ranks_by if self.loaded.probabilistic else "cosine"

    @property
    def distances(self) -> dict[str, Distance]:
        """Return the distances that items are ranked by: those of `columns`, or the cosine alone where only the means
        count, and those of the bank, if there is one."""
        loaded = self.loaded
        distances = columns(loaded.model, loaded.scale, self.also) if loaded.probabilistic else by_name(["cosine"])
        if self.bank is not None:
            distances |= {"bank": HubnessCorrected(self.bank), "bank_entailment": BankEntailment(self.bank)}
        return distances


def columns(model: ProbabilisticModel, clip_scale: float, also: Sequence[str] = ()) -> dict[str, Distance]:
    """Return the default distances, the one that the model is trained to rank by, and those of `also`.

    The weight of the entailment score follows from the model's scales, so a model whose loss does not train the scale
    of CLIP has no such column. The match probability of a model that was trained with PCME is by its own a and b.

    Arguments:
        clip_scale: what CLIP multiplies a cosine by.
        also: names of registered distances.
    """
    cfg = model.pcmepp_cfg
    distances = by_name() | by_name([cfg.ranks_by, *also])
    if cfg.trains_clip_scale:
        distances["entailment"] = Entailment.of_scales(model.match_scale.item(), clip_scale)
    elif "entailment" not in also:
        del distances["entailment"]
    if cfg.ranks_by == "match_probability" and not cfg.trains_matching:
        distances["match_probability"] = MatchProbability(
            model.match_scale.item(), model.match_shift.item(), cfg.pcme_samples
        )
    return distances
