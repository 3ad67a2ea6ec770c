"""The matching loss by CSD of a matrix of cosines that is visited in chunks of rows: its logits and its gradient.

y_ij     = 2a c_ij - a (o_i + o_j) + b          o = |mu|^2 + u of the images and of the texts
dL/dy_ij = k (sigmoid(y_ij) - e - (1 - 2e) m_ij)    m: the targets, e: their smoothing
dL/dc    = 2a dL/dy,    dL/do_i = -a sum_j dL/dy_ij,    dL/do_j = -a sum_i dL/dy_ij
dL/da    = sum_ij dL/dy_ij (2 c_ij - o_i - o_j),    dL/db = sum_ij dL/dy_ij
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .labels import LabelledPairs, Labels
from .pseudo_positives import TruePairs, raised_labels


@dataclass(frozen=True)
class PairSettings:
    """The terms of all pairs that are computed, and their settings.

    Arguments:
        first: the column of this rank's first true pair.
        reduction: the reduction of the matching loss, see `matching_loss`.
        with_contrastive, with_matching: whether InfoNCE, and whether the matching loss are wanted. A term that is not
            wanted is 0, and nothing of it is computed.
        true_pairs: the true pairs, which determine the pseudo-positives, or None if these are not wanted.
        labels: the soft labels, or None if only the pairs (i, first + i) match.
        smoothing: e of the labels e + (1 - 2e) m, which take the place of m in the matching loss and in the labels that
            pseudo-positives raise.
        constant_means: whether the matching loss sees the means as constants, so that InfoNCE alone trains them.
        share_of_means: a factor on the gradient of the means.
    """

    first: int = 0
    reduction: str = "mean"
    with_contrastive: bool = True
    with_matching: bool = True
    true_pairs: TruePairs | LabelledPairs | None = None
    labels: Labels | None = None
    smoothing: float = 0.0
    constant_means: bool = False
    share_of_means: float = 1.0


class MatchLogits:
    """The matching logits of a chunk.

    Arguments:
        o_n, o_N: the offsets of this rank's images and of all texts.
        a, b: the scale and shift of the matching logit, 0-d.
        s: the scale of the cosines, 0-d, if `of` takes s c; None if it takes the cosines c.
    """

    def __init__(self, o_n: Tensor, o_N: Tensor, a: Tensor, b: Tensor, s: Tensor | None = None):
        self.two_a, self.s = 2 * a, s
        self.dy_by_dz = self.two_a if s is None else self.two_a / s
        self.row_n, self.column_N = torch.addcmul(b, o_n, a, value=-1), a * o_N

    def of(self, z: Tensor, rows: slice) -> Tensor:
        """Return y of some rows with all columns, from their cosines or from s c."""
        return torch.addcmul(self.row_n[rows, None], z, self.dy_by_dz).sub_(self.column_N)


class MatchGradients:
    """The gradients of the matching and the pseudo-positive loss, summed over the chunks that were added.

    Arguments:
        logits: the logits of the forward pass.
        o_n, o_N: the offsets, see `MatchLogits`.
        g_match, g_pp: the gradients of both losses; None for a loss that has none, and not both.
        scale: the factor of the sum over all pairs in both losses.
    """

    def __init__(
        self,
        logits: MatchLogits,
        o_n: Tensor,
        o_N: Tensor,
        g_match: Tensor | None,
        g_pp: Tensor | None,
        scale: float,
        settings: PairSettings,
    ):
        self.logits, self.o_n, self.o_N, self.settings = logits, o_n, o_N, settings
        self.kept = 1 - 2 * settings.smoothing
        # The pseudo-positive loss is twice the matching loss minus the part by which it raises the labels.
        self.g_raised = None if g_pp is None or settings.true_pairs is None else g_pp * scale * self.kept
        parts = [g * factor for g, factor in ((g_match, scale), (g_pp, 2 * scale)) if g is not None]
        k = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        # dy is in units of k if k is its only factor, which saves one pass over the chunk.
        self.unit: Tensor | float = k if self.g_raised is None else 1.0
        self.own: Tensor | float = 1.0 if self.g_raised is None else k
        self.dc_by_dy = logits.two_a * self.unit
        self.row_sum_n = torch.empty_like(o_n)
        self.column_sum_N: Tensor | None = None
        self.dot: Tensor | None = None

    def add(self, z: Tensor, rows: slice) -> Tensor:
        """Return dL/dy of some rows in units of `unit`, from their cosines or s c, and add to the sums.

        dL/dc is `dc_by_dy` times the result.
        """
        settings, y = self.settings, self.logits.of(z, rows)
        label = None if settings.labels is None else settings.labels.of(rows)
        if self.g_raised is None:
            dy = y.sigmoid_()
        else:
            dy = torch.sigmoid(y).mul_(self.own)
            for raised in raised_labels(y, label, settings.true_pairs, rows, settings.first):
                dy -= raised * self.g_raised
        if label is None:
            dy.diagonal(rows.start + settings.first).sub_(self.own * self.kept)
        else:
            dy -= label.mul_(self.own * self.kept)
        if settings.smoothing:
            dy -= self.own * settings.smoothing
        torch.sum(dy, dim=1, out=self.row_sum_n[rows])
        self.column_sum_N = plus(self.column_sum_N, dy.sum(dim=0))
        self.dot = plus(self.dot, torch.dot(dy.flatten(), z.flatten()))
        return dy

    def gradients(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of o_n, o_N, a and b, once all chunks were added."""
        assert self.column_sum_N is not None and self.dot is not None
        do_by_dy = self.dc_by_dy * -0.5
        dot = self.dot if self.logits.s is None else self.dot / self.logits.s
        da = (2 * dot).sub_(torch.dot(self.row_sum_n, self.o_n)).sub_(torch.dot(self.column_sum_N, self.o_N))
        db = self.row_sum_n.sum()
        return self.row_sum_n * do_by_dy, self.column_sum_N * do_by_dy, da * self.unit, db * self.unit


def plus(total: Tensor | None, part: Tensor) -> Tensor:
    """Return the sum of two parts. If there is only one, it is returned as it is, without a kernel."""
    return part if total is None else total + part
