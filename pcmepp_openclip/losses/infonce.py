"""InfoNCE of a matrix of logits that is visited in chunks of rows: what a chunk adds to its value, and its gradient.

    z_ij           = s c_ij
    image_loss_i   = log sum_j exp(z_ij) - z_ii           whole within a chunk
    text_loss_j    = log sum_i exp(z_ij) - z_jj           whole after the last chunk of the last rank
    dL/dz_ij       = (p_ij + q_ij - 2 [i=j]) / 2N         p: softmax of the row, q: softmax of the column

A log-softmax is one kernel on every device, where a log-sum-exp is four or more, and it has its maxima subtracted. So
the log-sum-exp of a column is read off it: z_0j - log_softmax(z)_0j.
"""

import torch
from torch import Tensor

from .collectives import all_reduce


class InfoNCE:
    """The loss of the chunks that were added.

    Arguments:
        n: rows of this rank.
        s: the scale of the logits, 0-d.
    """

    def __init__(self, n: int, s: Tensor):
        self.s = s
        self.cosine_n, self.loss_2n = s.new_empty(n), s.new_empty(2, n)
        self.column_lse_N: Tensor | None = None

    def add(self, c: Tensor, rows: slice, first: int, scratch: Tensor | None = None) -> None:
        """The cosines of some rows, the first of whose true pairs is in column `first`; `scratch` is overwritten."""
        z = torch.mul(c, self.s, out=scratch)
        self.cosine_n[rows] = c.diagonal(first)
        torch.neg(z.log_softmax(dim=1).diagonal(first), out=self.loss_2n[0, rows])
        lse_N = z[0] - z.log_softmax(dim=0)[0]
        self.column_lse_N = lse_N if self.column_lse_N is None else torch.logaddexp(self.column_lse_N, lse_N)

    def finish(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each image and of each text of this rank, [2, n], and the log-sum-exp of the rows, [n], and of
        the columns, [N], each with its sign changed. Called on every rank, once.

        Arguments:
            first: the column of this rank's first true pair.
        """
        n, lse_N = len(self.cosine_n), self.column_lse_N
        assert lse_N is not None
        if n < len(lse_N):
            max_N = all_reduce(lse_N.clone(), "max")
            lse_N = max_N + all_reduce((lse_N - max_N).exp_(), "sum").log_()
        torch.addcmul(lse_N[first : first + n], self.cosine_n, self.s, value=-1, out=self.loss_2n[1])
        row_lse_n = torch.addcmul(self.loss_2n[0], self.cosine_n, self.s)
        return self.loss_2n, row_lse_n.neg_(), -lse_N


def infonce_gradient(c: Tensor, s: Tensor, row_shift_r: Tensor, column_shift_N: Tensor, first: int) -> Tensor:
    """2N dL/dz of a chunk with the cosines c, see above. The shifts are from `InfoNCE.finish`."""
    dz = torch.addcmul(row_shift_r[:, None], c, s).exp_()
    dz.add_(torch.addcmul(column_shift_N, c, s).exp_())
    dz.diagonal(first).sub_(2)
    return dz
