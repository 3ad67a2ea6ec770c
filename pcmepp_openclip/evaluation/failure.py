"""Can it be told beforehand which queries fail? A confidence, such as -uncertainty, against hits and misses.

    miss_AUROC    = how often a hit has the higher confidence than a miss, ties as halves; 0.5 by chance
    FPR95         = the share of misses that are still accepted where 95 % of the hits are, on the ROC curve with
                    straight lines between its points
    AUPR_error    = the average precision of -confidence with the misses as positives; by chance the share of misses
    AURC          = mean over k = 1..N of the share of misses among the k most confident; by chance the share of misses
    E-AURC        = AURC - (r + (1 - r) ln(1 - r)) with r the share of misses: what is above the best possible order

AURC and E-AURC are given times 1000, as papers print them. Of equally confident samples any order counts alike.

How it must not be read: AUPR_error and AURC depend on the share of misses, so they compare confidences on the same
hits, not models of different accuracy; E-AURC corrects that in part, by the limit of large N, and may be slightly off
for few samples. None of them is about calibration. Never read the uncertainty without the confidences that any CLIP
has, which are strong: see `confidences`.

Reference: ViLU and TrustVLM report all of these; Geifman et al., ICLR 2019, for AURC and E-AURC.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .metric import Metric
from .retrieval import CHUNK
from .uncertainty import auroc, rejection


def failure(confidence_N: Tensor, hit_N: Tensor) -> Iterator[Metric]:
    """Yield the five numbers of the file's docstring. Without a hit or without a miss, AUROC and FPR95 are nan; without
    a miss, AUPR_error is too.

    Arguments:
        confidence_N: [N], higher for those that should be hits; only its order matters.
        hit_N: [N] of 0 and 1.
    """
    area = aurc(confidence_N, hit_N)
    best = best_aurc(1 - hit_N.double().mean().item())
    yield Metric("miss_AUROC", auroc(confidence_N, hit_N))
    yield Metric("FPR95", fpr95(confidence_N, hit_N))
    yield Metric("AUPR_error", average_precision(-confidence_N, 1 - hit_N))
    yield Metric("AURC_x1000", 1000 * area)
    yield Metric("E-AURC_x1000", 1000 * (area - best))


def fpr95(confidence_N: Tensor, hit_N: Tensor) -> float:
    """Return the lowest false positive rate at which the ROC curve of hits reaches a true positive rate of 0.95."""
    true_K, false_K = _accepted(confidence_N, hit_N)
    hits, misses = int(true_K[-1]), int(false_K[-1])
    if hits == 0 or misses == 0:
        return math.nan
    after = int((20 * true_K >= 19 * hits).double().argmax())  # It is the first point there, never (0, 0).
    (t0, t1), (f0, f1) = (x[after - 1 : after + 1].tolist() for x in (true_K, false_K))
    return (f0 + (0.95 * hits - t0) / (t1 - t0) * (f1 - f0)) / misses


def average_precision(score_N: Tensor, positive_N: Tensor) -> float:
    """Sum (recall - recall before) * precision over thresholds, as scikit-learn does; nan without a positive."""
    true_K, false_K = _accepted(score_N, positive_N)
    if true_K[-1] == 0:
        return math.nan
    precision_K = true_K[1:] / (true_K[1:] + false_K[1:])
    return (true_K.diff() * precision_K).sum().item() / int(true_K[-1])


def _accepted(score_N: Tensor, positive_N: Tensor) -> tuple[Tensor, Tensor]:
    """Count the positives, and the others, with at least a score, [K + 1] each: none, then for each of the K different
    scores from the highest down."""
    values, place_N = score_N.unique(return_inverse=True)
    place_N = len(values) - 1 - place_N
    counts = (torch.bincount(place_N[mask], minlength=len(values)) for mask in (positive_N > 0.5, positive_N <= 0.5))
    true_K, false_K = (torch.cat([count.new_zeros(1), count.cumsum(0)]) for count in counts)
    return true_K, false_K


def aurc(confidence_N: Tensor, hit_N: Tensor) -> float:
    """Return the area under the risk-coverage curve: the mean over k of the misses' share of the k most confident."""
    return 1 - rejection(-confidence_N, hit_N).mean().item()


def best_aurc(error: float) -> float:
    """Return r + (1 - r) ln(1 - r), the AURC of many samples of which all hits come first."""
    return error + (1 - error) * math.log1p(-error) if error < 1 else 1.0


def confidences(query_ND: Tensor, gallery_MD: Tensor, scale: float, chunk: int = CHUNK) -> dict[str, Tensor]:
    """Return a query's confidences by a model without uncertainties, [N], from the cosines with the gallery and their
    softmax p with CLIP's scale: the largest cosine `max_cosine`, the largest probability `max_softmax` (MCP), the
    negative `entropy`, and `doctor`, -(1 - sum p^2) / sum p^2 (Granese et al., 2021). Higher is more confident."""
    rows = []
    for part in query_ND.split(max(1, chunk // len(gallery_MD))):
        cosine_nM = part @ gallery_MD.T
        log_nM = (scale * cosine_nM).log_softmax(dim=1)
        p_nM = log_nM.exp()
        doctor_n = 1 - 1 / p_nM.square().sum(dim=1)
        rows.append([cosine_nM.amax(dim=1), p_nM.amax(dim=1), (p_nM * log_nM).sum(dim=1), doctor_n])
    names = "max_cosine", "max_softmax", "entropy", "doctor"
    return {name: torch.cat(parts) for name, parts in zip(names, zip(*rows, strict=True), strict=True)}
