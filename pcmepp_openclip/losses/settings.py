"""The settings of single terms of the loss, with the names and defaults of their keys in `pcmepp_cfg`."""

from dataclasses import dataclass

NEGATIVES = ("hardest", "all")


@dataclass(frozen=True)
class TermSettings:
    """The settings of single terms.

    Arguments:
        triplet_margin: the margin of the triplet loss.
        triplet_negatives: "hardest" for the hardest negative of each sample, or "all" for the sum over all of them.
        triplet_warmup_epochs: the number of epochs at the start of a run with all negatives, before the hardest ones.
        pcme_samples: the number of samples of each Gaussian in PCME's loss.
        label_smoothing: e of the labels e + (1 - 2e) m of the matching and pseudo-positive losses, at least 0 and below
            1/2.
    """

    triplet_margin: float = 0.2
    triplet_negatives: str = "hardest"
    triplet_warmup_epochs: int = 2
    pcme_samples: int = 8
    label_smoothing: float = 0.0
