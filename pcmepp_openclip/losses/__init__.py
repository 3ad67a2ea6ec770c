"""The training loss, one idea per file.

`matching`, `pseudo_positives` and `vib` are the readable forms of PCME++'s terms; `difficulty` is another objective of
the variances; `triplet` and `pcme` are the losses of the paper's baselines, VSE-infinity and PCME; `fused` is what
training runs in place of the first two, exact on any number of ranks, with `infonce` and `csd_matching` for a chunk of
the matrix; `chunked_clip` is the same for plain CLIP; `labels` are the soft labels of mixed images and several
captions; `batch` is the input of a term, with the settings of single terms; `terms` has the registry `LOSSES`, where a
new term is one line; `pcmepp` is the weighted sum; `diagnostics` computes the numbers of the log; `collectives`
exchanges tensors between ranks.
"""

from .batch import PairBatch, TermSettings
from .chunked_clip import ChunkedClipLoss
from .difficulty import cross_fit, pair_difficulty
from .matching import matching_logits, matching_loss
from .pcme import pcme
from .pcmepp import PCMEppLoss
from .pseudo_positives import pseudo_positive_targets
from .terms import LOSSES, LossTerm
from .triplet import triplet_loss
from .vib import vib

__all__ = [
    "LOSSES",
    "ChunkedClipLoss",
    "LossTerm",
    "PCMEppLoss",
    "PairBatch",
    "TermSettings",
    "cross_fit",
    "matching_logits",
    "matching_loss",
    "pair_difficulty",
    "pcme",
    "pseudo_positive_targets",
    "triplet_loss",
    "vib",
]
