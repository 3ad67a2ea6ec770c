"""The diagnostics of a step: whether the variance keeps its meaning, by the logits and uncertainties of one batch.

    k           = 2a / s                                         `match_ratio`
    m_i         = sum_j sigmoid(y_ij)                            the matches that image i expects; texts alike
    H_i         = entropy of softmax_j(s cos_ij - h_j)           the ambiguity by the means alone, see `ambiguity.bank`
    h_j         = log mean_i exp(s cos_ij)                       the hubness of text j
    slope       = least-squares slope of a u_i against H_i
    agreement   = correlation of a u_i and H_i

InfoNCE drives `s cos` to log p(v, t) / (p(v) p(t)), and a converged matching loss has m_i = 1 for every sample. From
both follows a slope of 1 - k: the closer k is to 1, the less is left for the variance to say, and beyond 1 its sign
changes. With soft labels (`labels.py`) m is in units of the mean sum of an image's labels, which is more than 1 where
images have several captions. The pair (i, i) is left out of H and h, since a model may have memorised it.

All sums are over the batch of all ranks: columns are completed by all-reduces of one float per text, and the result is
the same on any number of ranks. The matrix is visited twice, in chunks of rows. Nothing waits for the device.
"""

import math

import torch
from torch import Tensor

from .batch import PairBatch
from .collectives import all_reduce
from .fused import chunks

LOWEST = -1e30  # stands for the logarithm of 0: the difference of two infinities would be nan


@torch.no_grad()
def calibration_diagnostics(batch: PairBatch) -> dict[str, Tensor]:
    """Return the diagnostics by name, each a 0-d tensor that is the same on all ranks. Called on every rank.

    `match_ratio`; `expected_matches`, the mean of m, which is the same for images and texts; `image_miscalibration` and
    `text_miscalibration`, the means of |log m|, 0 if every sample is calibrated; `image_slope`, `text_slope`,
    `image_agreement` and `text_agreement`, which are nan if all H or all u are equal, as in a batch of two pairs.
    """
    v_nD, t_ND, s, first = batch.images.mean, batch.all_text_means, batch.clip_scale, batch.first
    n, N = len(v_nD), len(t_ND)
    own = slice(first, first + n)
    row_matches_n, column_matches_N = v_nD.new_empty(n), v_nD.new_zeros(N)
    row_hubness_n, columns = v_nD.new_empty(n), ColumnEntropy(t_ND)
    label_sum = v_nD.new_zeros(())
    for rows in chunks(v_nD, N):
        if batch.labels is not None:
            label_sum += batch.labels.of(rows).sum()
        match_rN = batch.match_logits(rows).sigmoid_()
        row_matches_n[rows] = match_rN.sum(dim=1)
        column_matches_N += match_rN.sum(dim=0)
        z_rN = _without_own(v_nD[rows] @ t_ND.T * s, rows.start + first)
        row_hubness_n[rows] = z_rN.logsumexp(dim=1) - math.log(max(1, N - 1))
        columns.add(z_rN)
    column_hubness_N = columns.logsumexp() - math.log(max(1, N - 1))

    row_entropy_n, columns = torch.empty_like(row_hubness_n), ColumnEntropy(t_ND)
    for rows in chunks(v_nD, N):
        z_rN = _without_own(v_nD[rows] @ t_ND.T * s, rows.start + first)
        row_entropy_n[rows] = torch.special.entr((z_rN - column_hubness_N).log_softmax(dim=1).exp()).sum(dim=1)
        columns.add(z_rN.sub_(row_hubness_n[rows, None]))

    matches_nS = torch.stack([row_matches_n, all_reduce(column_matches_N, "sum")[own]], dim=1)
    if batch.labels is not None:
        matches_nS /= all_reduce(label_sum, "sum") / N
    uncertainty_nS = batch.match_scale * torch.stack([batch.images.uncertainty, batch.texts.uncertainty], dim=1)
    entropy_nS = torch.stack([row_entropy_n, columns.entropy()[own]], dim=1)
    matches_NS, uncertainty_NS, entropy_NS = batch.gather(
        torch.stack([matches_nS, uncertainty_nS, entropy_nS], dim=1)
    ).unbind(dim=1)
    error_S = matches_NS.log().abs().mean(dim=0)
    slope_S, agreement_S = slope_and_correlation(entropy_NS, uncertainty_NS)
    return {
        "match_ratio": 2 * batch.match_scale / s,
        "expected_matches": matches_NS.mean(),
        "image_miscalibration": error_S[0],
        "text_miscalibration": error_S[1],
        "image_slope": slope_S[0],
        "text_slope": slope_S[1],
        "image_agreement": agreement_S[0],
        "text_agreement": agreement_S[1],
    }


def slope_and_correlation(x_NS: Tensor, y_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least-squares slope of y against x and Pearson's correlation, [S] each; nan if undefined."""
    x_NS, y_NS = x_NS - x_NS.mean(dim=0), y_NS - y_NS.mean(dim=0)
    product_S, square_S = (x_NS * y_NS).sum(dim=0), x_NS.square().sum(dim=0)
    return product_S / square_S, product_S / (square_S * y_NS.square().sum(dim=0)).sqrt()


class ColumnEntropy:
    """The log sum exp and the softmax entropy of each column of a matrix, whose rows arrive in chunks on all ranks.

    max = max_i x_i,  total = sum_i exp(x_i - max),  weighted = sum_i exp(x_i - max) x_i
    logsumexp = max + log total,  entropy = logsumexp - weighted / total
    """

    def __init__(self, columns_ND: Tensor):
        self.max_N = columns_ND.new_full((len(columns_ND),), LOWEST)
        self.total_N, self.weighted_N = torch.zeros_like(self.max_N), torch.zeros_like(self.max_N)

    def add(self, x_rN: Tensor) -> None:
        """Add more rows; entries of -inf are left out."""
        new_max_N = torch.maximum(self.max_N, x_rN.amax(dim=0))
        weight_rN = (x_rN - new_max_N).exp_()
        self._rescale(new_max_N)
        self.total_N += weight_rN.sum(dim=0)
        self.weighted_N += weight_rN.mul_(x_rN.clamp(min=LOWEST)).sum(dim=0)  # 0 times -inf would be nan

    def logsumexp(self) -> Tensor:
        """Return the log sum exp of the rows of all ranks, [N]. Called on every rank, once."""
        self._rescale(all_reduce(self.max_N.clone(), "max"))
        self.total_N, self.weighted_N = all_reduce(torch.stack([self.total_N, self.weighted_N]), "sum")
        return self.max_N + self.total_N.log()

    def entropy(self) -> Tensor:
        """Return the entropy of the rows of all ranks, [N]. Called on every rank, once, in place of `logsumexp`."""
        return self.logsumexp() - self.weighted_N / self.total_N

    def _rescale(self, new_max_N: Tensor) -> None:
        factor_N = (self.max_N - new_max_N).exp_()
        self.total_N, self.weighted_N, self.max_N = self.total_N * factor_N, self.weighted_N * factor_N, new_max_N


def _without_own(z_rN: Tensor, first: int) -> Tensor:
    """Set the true pairs of `z_rN` to -inf in place, and return it."""
    z_rN.diagonal(first).fill_(-torch.inf)
    return z_rN
