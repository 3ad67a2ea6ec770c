"""InfoNCE of a matrix of logits that is visited in chunks of rows: its value and its gradient.

    z_ij           = s c_ij
    image_loss_i   = log sum_j exp(z_ij) - z_ii           complete within a chunk
    text_loss_j    = log sum_i exp(z_ij) - z_jj           complete after the last chunk of the last rank
    dL/dz_ij       = (p_ij + q_ij - 2 [i=j]) / 2N         p: softmax of the row, q: softmax of the column

A log-softmax is one kernel on every device, where a log-sum-exp is four or more. So the log-sum-exp of a column is read
off it, at the largest logit of the column:

    log sum_i exp(z_ij) = max_j - log_q_j,    max_j = max_i z_ij,    log_q_j = max_i log_softmax(z)_ij

It is kept in these two parts, and that of a row in its true pair and its loss: at a scale of 100 the sum itself would
be rounded to 4e-6, and so would every gradient of its row or column.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .collectives import all_reduce


class Softmaxes(NamedTuple):
    """The values from which p and q of a chunk follow.

        log p_ij = z_ij - true_i + log_p_i,    log q_ij = z_ij - max_j + log_q_j

    Arguments:
        true_n, log_p_n: the logits and log p of the true pairs of this rank.
        max_N, log_q_N: the maximum and log q at the maximum of all columns, see above.
    """

    true_n: Tensor
    log_p_n: Tensor
    max_N: Tensor
    log_q_N: Tensor


class InfoNCE:
    """InfoNCE of the chunks that were added.

    Arguments:
        n: the number of rows of this rank.
        like: a tensor of the device and dtype of the logits.
    """

    def __init__(self, n: int, like: Tensor):
        self.true_n, self.log_p_n = like.new_empty(n), like.new_empty(n)
        self.columns: tuple[Tensor, Tensor] | None = None  # max_N and log_q_N of the chunks so far

    def add(self, z: Tensor, rows: slice, first: int) -> None:
        """Add the logits of some rows of this rank, whose first true pair is in column `first`."""
        self.true_n[rows] = z.diagonal(rows.start + first)
        self.log_p_n[rows] = z.log_softmax(dim=1).diagonal(rows.start + first)
        columns = z.amax(dim=0), z.log_softmax(dim=0).amax(dim=0)
        self.columns = columns if self.columns is None else _merged(self.columns, columns)

    def finish(self, first: int) -> tuple[Tensor, Softmaxes]:
        """Return the loss of each image and each text of this rank, [2, n], and the softmaxes for the gradient.

        Called on every rank, once all chunks were added.
        """
        assert self.columns is not None
        max_N, log_q_N = self.columns
        n = len(self.true_n)
        if n < len(max_N):
            own_max_N, max_N = max_N, all_reduce(max_N.clone(), "max")
            log_q_N = all_reduce((own_max_N - max_N).sub_(log_q_N).exp_(), "sum").log_().neg_()
        own, loss_2n = slice(first, first + n), self.true_n.new_empty(2, n)
        torch.neg(self.log_p_n, out=loss_2n[0])
        torch.sub(max_N[own] - self.true_n, log_q_N[own], out=loss_2n[1])
        return loss_2n, Softmaxes(self.true_n, self.log_p_n, max_N, log_q_N)


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return max_N and log_q_N of the rows of both."""
    max_N = torch.maximum(a[0], b[0])
    parts = ((its_max_N - max_N).sub_(log_q_N) for its_max_N, log_q_N in (a, b))
    return max_N, torch.logaddexp(*parts).neg_()


def infonce_gradient(z: Tensor, softmaxes: Softmaxes, rows: slice, first: int) -> Tensor:
    """Return 2N dL/dz of the chunk with the logits z, see above."""
    dz = z.sub(softmaxes.true_n[rows, None]).add_(softmaxes.log_p_n[rows, None]).exp_()
    dz += z.sub(softmaxes.max_N).add_(softmaxes.log_q_N).exp_()
    dz.diagonal(rows.start + first).sub_(2)
    return dz
