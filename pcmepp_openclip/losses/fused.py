"""InfoNCE, matching and pseudo-positive losses of all pairs from one cosine matrix that is never held as a whole.

This is the fast form that training runs. On one rank its values and gradients equal those of the readable forms:

    contrastive         open_clip's ClipLoss
    matching            matching_loss(matching_logits(csd(images, texts), a, b), identity)
    pseudo-positive     the sum of matching_loss over both results of pseudo_positive_targets

and without InfoNCE also with soft labels (`labels.py`) in place of the identity. All three are functions of the cosines
c and one offset per sample, o = |mu|^2 + u:

    z_ij = s c_ij                                  logits of InfoNCE, see `infonce.py`
    y_ij = 2a c_ij - a (o_i + o_j) + b             logits of matching, since d = o_i + o_j - 2c, see `csd_matching.py`

The matrix is visited in chunks of rows, once forward for the values and once backward for the gradients, which
takes two matrix products fewer than CLIP's own loss, in memory that grows with N and not with N^2. The cosines of the
last chunk are kept for the backward pass, which starts with them; where there is only one chunk, that is one more
product fewer.

With several ranks, a rank has the rows of its own images and the columns of all texts. The column sums of the softmax
are completed by an all-reduce of two floats per column; image means are never sent. The forward value is the rank's
share, scaled so that the mean over ranks is the loss of the whole batch; gradients follow the convention of DDP, whose
mean over ranks is then the gradient of the whole batch.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distances.tiles import elements_at_a_time
from ..gaussian import full_precision_backward
from .csd_matching import MatchGradients, MatchLogits, PairSettings, plus
from .infonce import InfoNCE, infonce_gradient
from .matching import pairs_divisor
from .pseudo_positives import raised_labels


class PairLosses(torch.autograd.Function):
    """The (contrastive, matching, pseudo-positive) losses and the number of pseudo-positives, each a 0-d tensor.

    They are followed by InfoNCE of each of this rank's pairs, by its image and by its text, [n] without a gradient.

    Arguments of `apply`, all fp32:
        v_nD, t_ND: the means of this rank's images and of all texts. Pair i is (v_i, t_{first + i}).
        s: the scale of InfoNCE's logits, 0-d.
        o_n, o_N: |mu|^2 + u of both, see above.
        a, b: the scale and shift of the matching logit, 0-d. These four may be None without matching.
        settings: see `PairSettings`.

    Means that need no gradient, as those of frozen towers, spare both products of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        v_nD: Tensor,
        t_ND: Tensor,
        s: Tensor,
        o_n: Tensor,
        o_N: Tensor,
        a: Tensor,
        b: Tensor,
        settings: PairSettings,
    ) -> tuple[Tensor, ...]:
        n, N, first, labels = len(v_nD), len(t_ND), settings.first, settings.labels
        kept = 1 - 2 * settings.smoothing
        assert labels is None or not settings.with_contrastive
        infonce = InfoNCE(n, s) if settings.with_contrastive else None
        logits = None
        if settings.with_matching:
            logits = MatchLogits(o_n, o_N, a, b, None if infonce is None else s)
        match: Tensor | None = None
        extra: Tensor | None = None
        pseudo: Tensor | None = None
        for rows in chunks(v_nD, N):
            z = scaled_cosines(v_nD, t_ND, s, rows, settings)
            if logits is not None:
                y = logits.of(z, rows)
                label = None if labels is None else labels.of(rows)
                for raised in raised_labels(y, label, settings.true_pairs, rows, first):
                    extra = plus(extra, (raised * y).sum())
                    pseudo = plus(pseudo, (raised if label is None else raised > 0).sum(dtype=y.dtype))
                positive = y.diagonal(rows.start + first) if label is None else label.mul_(y)
                match = plus(match, F.softplus(y).sum() - kept * positive.sum())
                if settings.smoothing:
                    match = match - settings.smoothing * y.sum()
            if infonce is not None:
                infonce.add(z, rows, first)

        loss_2n, softmaxes = (s.new_zeros(2, n), None) if infonce is None else infonce.finish(first)
        scale = N / n / pairs_divisor(N, N, settings.reduction)
        match = s.new_zeros(()) if match is None else match * scale
        pp = 2 * match if extra is None else 2 * match - kept * extra * scale
        pseudo = s.new_zeros(()) if pseudo is None else pseudo
        ctx.save_for_backward(v_nD, t_ND, s, o_n, o_N, a, b, z)
        ctx.settings, ctx.logits, ctx.softmaxes, ctx.scale = settings, logits, softmaxes, scale
        ctx.set_materialize_grads(False)
        each = loss_2n.unbind()
        ctx.mark_non_differentiable(pseudo, *each)
        return loss_2n.mean(), match, pp, pseudo, *each

    @staticmethod
    @torch.autograd.function.once_differentiable
    @full_precision_backward
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        v_nD, t_ND, s, o_n, o_N, a, b, kept_z = ctx.saved_tensors
        settings, (g_contrastive, g_match, g_pp) = ctx.settings, g[:3]
        matching: MatchGradients | None = None
        if settings.with_matching and not (g_match is None and g_pp is None):
            matching = MatchGradients(ctx.logits, o_n, o_N, g_match, g_pp, ctx.scale, settings)
        k_z, dc_by_dz, ds = s, None, None
        if settings.with_contrastive and g_contrastive is not None:
            k_z = g_contrastive / (2 * len(v_nD))
            dc_by_dz = s * k_z if settings.share_of_means == 1 else s * k_z * settings.share_of_means
        means = MeanGradients(v_nD, t_ND, *ctx.needs_input_grad[:2])
        for rows in reversed(list(chunks(v_nD, len(t_ND)))):
            z = scaled_cosines(v_nD, t_ND, s, rows, settings) if kept_z is None else kept_z
            kept_z, dc = None, None
            if matching is not None:
                dy = matching.add(z, rows)
                dc = None if settings.constant_means else dy.mul_(matching.dc_by_dy)
            if dc_by_dz is not None:
                dz = infonce_gradient(z, ctx.softmaxes, rows, settings.first)
                ds = plus(ds, torch.dot(dz.flatten(), z.flatten()))
                dc = dz.mul_(dc_by_dz) if dc is None else dc.addcmul_(dz, dc_by_dz)
            if dc is not None:
                means.add(dc, rows)
        of_matching = [None] * 4 if matching is None else matching.gradients()
        gradients = *means.gradients, None if ds is None else ds * (k_z / s), *of_matching
        # An input without a gradient gets one of 0, since DDP expects one for every parameter.
        inputs = zip((v_nD, t_ND, s, o_n, o_N, a, b), gradients, ctx.needs_input_grad[:-1], strict=True)
        return *(torch.zeros_like(x) if wanted and dx is None else dx for x, dx, wanted in inputs), None


def scaled_cosines(v_nD: Tensor, t_ND: Tensor, s: Tensor, rows: slice, settings: PairSettings) -> Tensor:
    """Return z of some rows: s c, or c without InfoNCE. The features are scaled: they are fewer than the pairs."""
    return (v_nD[rows] * s if settings.with_contrastive else v_nD[rows]) @ t_ND.T


class MeanGradients:
    """The gradients of the means, summed over chunks of rows.

    Arguments:
        wants_dv, wants_dt: whether the gradient of each is wanted.
    """

    def __init__(self, v_nD: Tensor, t_ND: Tensor, wants_dv: bool, wants_dt: bool):
        self.v_nD, self.t_ND, self.wants_dv, self.wants_dt = v_nD, t_ND, wants_dv, wants_dt
        self.dv_nD: Tensor | None = None
        self.dt_ND: Tensor | None = None

    def add(self, dc: Tensor, rows: slice) -> None:
        """Add the gradient of the cosines of some rows."""
        if self.wants_dv:
            if self.dv_nD is None:
                self.dv_nD = torch.empty_like(self.v_nD)
            torch.mm(dc, self.t_ND, out=self.dv_nD[rows])
        if self.wants_dt:
            v_rD = self.v_nD[rows]
            self.dt_ND = dc.T @ v_rD if self.dt_ND is None else self.dt_ND.addmm_(dc.T, v_rD)

    @property
    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        return self.dv_nD, self.dt_ND


def chunks(v_nD: Tensor, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix with this many columns in as few chunks as possible, of about equal size."""
    most = max(1, elements_at_a_time(v_nD) // columns)
    step = math.ceil(len(v_nD) / math.ceil(len(v_nD) / most))
    for start in range(0, len(v_nD), step):
        yield slice(start, min(start + step, len(v_nD)))
