"""InfoNCE, matching and pseudo-positive losses of all pairs from one cosine matrix that is never held as a whole.

This is the fast form that training runs. On one rank its values and gradients equal those of the readable forms:

    contrastive         open_clip's ClipLoss
    matching            matching_loss(matching_logits(csd(images, texts), a, b), identity)
    pseudo-positive     the sum of matching_loss over both results of pseudo_positive_targets

and without InfoNCE also with soft labels (`labels.py`) in place of the identity. All three are functions of the cosines
c and one offset per sample, o = |mu|^2 + u:

    z_ij = s c_ij                                  logits of InfoNCE
    y_ij = 2a c_ij - a (o_i + o_j) + b             logits of matching, since d = o_i + o_j - 2c
    dL/dz_ij = (p_ij + q_ij - 2 [i=j]) / 2N        p: softmax of the row, q: softmax of the column
    dL/dy_ij = (sigmoid(y_ij) - m_ij) / divisor    m: the targets

The matrix is visited in chunks of rows, once forward for the values and once backward for the gradients, which
takes two matrix products fewer than CLIP's own loss, in memory that grows with N and not with N^2.

With several ranks, a rank has the rows of its own images and the columns of all texts. The column sums of the softmax
are completed by an all-reduce of two floats per column; image means are never sent. The forward value is the rank's
share, scaled so that the mean over ranks is the loss of the whole batch; gradients follow the convention of DDP, whose
mean over ranks is then the gradient of the whole batch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gaussian import full_precision_backward
from .collectives import all_reduce
from .labels import LabelledPairs, Labels
from .matching import pairs_divisor

CHUNK = {"cpu": 2**20, "cuda": 2**25}  # elements of the matrix held at a time: what fits a CPU's cache, fills a GPU


class TruePairs(NamedTuple):
    """What determines the pseudo-positives: one value for each of the N pairs of all ranks.

    Arguments:
        logit_N: the matching logits of the true pairs.
        image_key_N, text_key_N: `Gaussian.keys`. Equal captions are equally close to an image, and count as ties
            however their logits are rounded; so do equal images.
    """

    logit_N: Tensor
    image_key_N: Tensor
    text_key_N: Tensor


class PairLosses(torch.autograd.Function):
    """(contrastive, matching, pseudo-positive) losses and the number of pseudo-positives, each a 0-d tensor; and
    InfoNCE of each of this rank's pairs, by its image and by its text, [n] without a gradient.

    Arguments of `apply`, all fp32:
        v_nD, t_ND: means of this rank's images and of all texts. Pair i is (v_i, t_{first + i}).
        o_n, o_N: |mu|^2 + u of both.
        s, a, b: scalars, see above.
        true_pairs: see above, or None where pseudo-positives are not wanted; `LabelledPairs` where there are labels.
        first: the column of this rank's first true pair.
        reduction: of the matching loss, see `matching_loss`.
        with_contrastive: whether InfoNCE is wanted; without it the term and that of each pair are 0, and no softmax is
            computed.
        constant_means: whether the other terms see the means as constants, so that InfoNCE alone trains them.
        labels: soft labels, or None for those of the pairs (i, first + i).

    Means that need no gradient, as those of frozen towers, spare both products of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v_nD: Tensor,
        t_ND: Tensor,
        o_n: Tensor,
        o_N: Tensor,
        s: Tensor,
        a: Tensor,
        b: Tensor,
        true_pairs: TruePairs | LabelledPairs | None,
        first: int,
        reduction: str,
        with_contrastive: bool = True,
        constant_means: bool = False,
        labels: Labels | None = None,
    ) -> tuple[Tensor, ...]:
        n, N = len(v_nD), len(t_ND)
        assert labels is None or not with_contrastive
        row_lse_n = v_nD.new_empty(n)
        column_max_N = v_nD.new_full((N,), -torch.inf)
        column_sum_N = v_nD.new_zeros(N)
        match, extra, pseudo = v_nD.new_zeros(()), v_nD.new_zeros(()), v_nD.new_zeros(())
        positive = v_nD.new_zeros(())
        for rows in chunks(v_nD, N):
            c = v_nD[rows] @ t_ND.T
            y = csd_logits(c, o_n[rows], o_N, a, b)
            label = None if labels is None else labels.of(rows)
            for raised in raised_labels(y, label, true_pairs, rows, first):
                extra += (raised * y).sum()
                pseudo += (raised if label is None else raised > 0).sum()
            match += F.softplus(y).sum()
            if label is not None:
                positive += label.mul_(y).sum()
            if not with_contrastive:
                continue
            z = c.mul_(s)
            new_max_N = torch.maximum(column_max_N, z.amax(dim=0))
            row_max = z.amax(dim=1, keepdim=True)
            row_lse_n[rows] = torch.sub(z, row_max, out=y).exp_().sum(dim=1).log_() + row_max[:, 0]
            column_sum_N = column_sum_N * (column_max_N - new_max_N).exp_() + z.sub_(new_max_N).exp_().sum(dim=0)
            column_max_N = new_max_N
        if n != N and with_contrastive:
            local_max_N, column_max_N = column_max_N, all_reduce(column_max_N.clone(), "max")
            column_sum_N = all_reduce(column_sum_N * (local_max_N - column_max_N).exp_(), "sum")
        column_lse_N = column_max_N + column_sum_N.log()

        own = slice(first, first + n)
        cosine_n = (v_nD * t_ND[own]).sum(dim=1)
        contrastive = ((row_lse_n + column_lse_N[own]) / 2 - s * cosine_n).mean() if with_contrastive else s * 0
        lse_n = row_lse_n, column_lse_N[own]
        each = [x - s * cosine_n if with_contrastive else torch.zeros_like(o_n) for x in lse_n]
        scale = N / n / pairs_divisor(N, N, reduction)
        if labels is None:
            positive = csd_logits(cosine_n, o_n, o_N[own], a, b, outer=False).sum()
        ctx.save_for_backward(v_nD, t_ND, o_n, o_N, s, a, b, row_lse_n, column_lse_N)
        ctx.first, ctx.scale, ctx.true_pairs, ctx.labels = first, scale, true_pairs, labels
        ctx.with_contrastive, ctx.constant_means = with_contrastive, constant_means
        ctx.mark_non_differentiable(pseudo, *each)
        return contrastive, scale * (match - positive), scale * (2 * (match - positive) - extra), pseudo, *each

    @staticmethod
    @torch.autograd.function.once_differentiable
    @full_precision_backward
    def backward(ctx: Any, g_contrastive: Tensor, g_match: Tensor, g_pp: Tensor, *_: Tensor) -> Any:
        v_nD, t_ND, o_n, o_N, s, a, b, row_lse_n, column_lse_N = ctx.saved_tensors
        n, N, first, labels = len(v_nD), len(t_ND), ctx.first, ctx.labels
        g_contrastive = g_contrastive / (2 * n)
        g_match, g_pp = g_match * ctx.scale, g_pp * ctx.scale
        g_sigmoid = g_match + 2 * g_pp
        wants_dv, wants_dt = ctx.needs_input_grad[:2]
        dv_nD, dt_ND = torch.empty_like(v_nD) if wants_dv else None, torch.zeros_like(t_ND) if wants_dt else None
        row_sum_n, column_sum_N = torch.empty_like(o_n), torch.zeros_like(o_N)
        ds, dc_match = torch.zeros_like(s), torch.zeros_like(s)
        for rows in chunks(v_nD, N):
            c = v_nD[rows] @ t_ND.T
            y = csd_logits(c, o_n[rows], o_N, a, b)
            dy = torch.sigmoid(y).mul_(g_sigmoid)
            label = None if labels is None else labels.of(rows)
            for raised in raised_labels(y, label, ctx.true_pairs, rows, first):
                dy -= raised * g_pp
            if label is None:
                _diagonal(dy, rows.start + first).sub_(g_sigmoid)
            else:
                dy -= label.mul_(g_sigmoid)
            row_sum_n[rows] = dy.sum(dim=1)
            column_sum_N += dy.sum(dim=0)
            dc_match += torch.dot(dy.flatten(), c.flatten())
            dc = dy.zero_() if ctx.constant_means else dy.mul_(2 * a)
            if ctx.with_contrastive:
                z = torch.mul(c, s, out=y)
                dz = (z - row_lse_n[rows, None]).exp_().add_(z.sub_(column_lse_N).exp_())
                _diagonal(dz, rows.start + first).sub_(2)
                ds += torch.dot(dz.flatten(), c.flatten())
                dc.add_(dz.mul_(s * g_contrastive))
            if dv_nD is not None:
                torch.mm(dc, t_ND, out=dv_nD[rows])
            if dt_ND is not None:
                dt_ND.addmm_(dc.T, v_nD[rows])
        da = 2 * dc_match - (row_sum_n * o_n).sum() - (column_sum_N * o_N).sum()
        db = row_sum_n.sum()
        return dv_nD, dt_ND, -a * row_sum_n, -a * column_sum_N, ds * g_contrastive, da, db, *[None] * 6


def chunks(v_nD: Tensor, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK.get(v_nD.device.type, CHUNK["cuda"]) // columns)
    for start in range(0, len(v_nD), step):
        yield slice(start, min(start + step, len(v_nD)))


def csd_logits(c: Tensor, o_rows: Tensor, o_columns: Tensor, a: Tensor, b: Tensor, outer: bool = True) -> Tensor:
    """y of the file's docstring, of all pairs or of the pairs (i, i)."""
    return (c * (2 * a)).sub_((a * o_rows - b)[:, None] if outer else a * o_rows - b).sub_(a * o_columns)


def _diagonal(x: Tensor, first: int) -> Tensor:
    """The entries of the true pairs in a chunk of rows whose first true pair is in column `first`, as a view."""
    return x.diagonal(first)


def raised_labels(
    y: Tensor, label: Tensor | None, true_pairs: TruePairs | LabelledPairs | None, rows: slice, first: int
) -> Iterator[Tensor]:
    """By how much the pseudo-positives of a chunk raise the labels, by the rows and by the columns: masks where there
    are no soft labels; nothing at all without `true_pairs`."""
    if isinstance(true_pairs, LabelledPairs):
        assert label is not None
        yield from true_pairs.raised(y, label, rows)
    elif true_pairs is not None:
        yield from pseudo_positives(y, true_pairs, rows.start + first)


def pseudo_positives(y: Tensor, true_pairs: TruePairs, first: int) -> Iterator[Tensor]:
    """Masks of the pairs of a chunk, without true pairs, that are at least as close as the true pair of their row, and
    of their column."""
    rows = slice(first, first + len(y))
    logit_N, image_key_N, text_key_N = true_pairs
    for threshold, tie in (
        (logit_N[rows, None], text_key_N[rows, None] == text_key_N),
        (logit_N, image_key_N[rows, None] == image_key_N),
    ):
        is_pseudo = tie.logical_or_(y >= threshold)
        _diagonal(is_pseudo, first).fill_(False)
        yield is_pseudo
