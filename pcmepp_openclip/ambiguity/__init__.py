"""How ambiguous an input is, for any open_clip model.

`bank` is the estimator that needs no training: the entropy of what an input would find among reference pairs.
`calibration` turns scores into the probability of a pair. `store` keeps both in files.
"""

from .bank import Bank, BankEntailment, HubnessCorrected, renyi_entropy
from .calibration import Calibration

__all__ = ["Bank", "BankEntailment", "Calibration", "HubnessCorrected", "renyi_entropy"]
