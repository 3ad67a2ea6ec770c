"""The distances by which a model's retrieval and classification are evaluated: the columns of the tables."""

from collections.abc import Sequence

from ..distances import Distance, Entailment, MatchProbability, by_name
from ..models.pcmepp import ProbabilisticModel


def columns(model: ProbabilisticModel, clip_scale: float, also: Sequence[str] = ()) -> dict[str, Distance]:
    """The distances that are ranked by default, the one that the model is trained to rank by, and those of `also`.

    The weight of the entailment score follows from the model's scales, so a model whose loss does not train the scale
    of CLIP has no such column. The match probability of a model that was trained with PCME is by its own a and b.

    Arguments:
        clip_scale: what CLIP multiplies a cosine by.
        also: names of registered distances.
    """
    cfg = model.pcmepp_cfg
    found = by_name() | by_name([cfg.ranks_by, *also])
    if cfg.trains_clip_scale:
        found["entailment"] = Entailment.of_scales(model.match_scale.item(), clip_scale)
    elif "entailment" not in also:
        del found["entailment"]
    if cfg.ranks_by == "match_probability" and not cfg.trains_matching:
        found["match_probability"] = MatchProbability(
            model.match_scale.item(), model.match_shift.item(), cfg.pcme_samples
        )
    return found
