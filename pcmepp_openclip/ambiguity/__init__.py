"""Confusion, multiplicity and calibrated pairs: three answers about an input by any open_clip model.

`bank` needs no training: it compares an input with reference pairs. `calibration` turns scores into the probability of
a pair. `store` keeps both in files, and finds those of a model. `model` has `ImageTextModel`, which encodes images and
texts and answers three questions about them. `commands` are `pcmepp bank` and `pcmepp calibrate`.
"""

from .bank import Bank, BankEntailment, HubnessCorrected, renyi_entropy
from .calibration import Calibration

__all__ = ["Bank", "BankEntailment", "Calibration", "HubnessCorrected", "renyi_entropy"]
