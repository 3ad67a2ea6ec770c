"""What the embeddings of any open_clip model say of an input: confusion, multiplicity, and calibrated pairs.

`bank` needs no training: it compares an input with reference pairs.
`calibration` turns scores into the probability of a pair. `store` keeps both in files.
"""

from .bank import Bank, BankEntailment, HubnessCorrected, renyi_entropy
from .calibration import Calibration

__all__ = ["Bank", "BankEntailment", "Calibration", "HubnessCorrected", "renyi_entropy"]
