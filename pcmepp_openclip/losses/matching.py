"""The matching loss of PCME++: is this caption a match of that image? Equation 2 of the paper.

These are the readable forms and the public API; training runs the same computation fused with InfoNCE, see `fused.py`.
"""

import torch.nn.functional as F
from torch import Tensor


def matching_logits(distance_NM: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return the log-odds of a match, -a d + b, for distances d."""
    return -a * distance_NM + b


def matching_loss(logits_NM: Tensor, targets_NM: Tensor, reduction: str = "mean") -> Tensor:
    """Return the binary cross-entropy over all pairs, stable for logits of any size.

        - m log sigmoid(y) - (1 - m) log sigmoid(-y)   =   softplus(y) - m y

    Arguments:
        logits_NM: y = -a d + b, see `matching_logits`.
        targets_NM: m in [0, 1]; soft if images are mixed or pairs are uncertain.
        reduction: "mean" over all N M pairs, as in the paper, or "sum", over all pairs divided by N, as SigLIP
            does: then the pull on a sample does not fade as the batch grows.

    Relations: with unit means, y = 2a cos - a (u_v + u_t) + (b - 2a) is SigLIP's logit with an offset per sample. The
    authors' code counts the loss once per direction, which is this one with a weight of 2.
    """
    total = (F.softplus(logits_NM) - targets_NM * logits_NM).sum()
    rows, columns = logits_NM.shape
    return total / pairs_divisor(rows, columns, reduction)


def pairs_divisor(rows: int, columns: int, reduction: str) -> int:
    """Return the number that a sum over all pairs is divided by."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"The reduction of the matching loss must be 'mean' or 'sum', not {reduction!r}.")
    return rows * columns if reduction == "mean" else rows
