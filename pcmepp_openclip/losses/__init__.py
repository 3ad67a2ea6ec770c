"""The training loss, one idea per file.

`matching`, `pseudo_positives` and `vib` are the readable forms of PCME++'s terms; `difficulty` is another objective of
the variances; `fused` is what training runs in place of the first two, exact on any number of ranks; `labels` are the
soft labels of mixed images and several captions; `batch` is what a term is computed from; `terms` has the registry
`LOSSES`, where a new term is one line; `pcmepp` is the weighted sum; `diagnostics` is what the log says of a batch;
`collectives` is what travels between ranks.
"""

from .batch import PairBatch
from .matching import matching_logits, matching_loss
from .pcmepp import PCMEppLoss
from .pseudo_positives import pseudo_positive_targets
from .terms import LOSSES, LossTerm
from .vib import vib

__all__ = [
    "LOSSES",
    "LossTerm",
    "PCMEppLoss",
    "PairBatch",
    "matching_logits",
    "matching_loss",
    "pseudo_positive_targets",
    "vib",
]
