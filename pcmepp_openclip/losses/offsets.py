"""The variances' part of a loss, from one pass over them: the offsets of CSD and the VIB."""

from typing import Any

import torch
from torch import Tensor


class Offsets(torch.autograd.Function):
    """The offset of each sample, o = |mu|^2 + sum_d sigma_d^2, [n], and the VIB (`vib.py`) of all, a 0-d tensor.

        KL = -1/2 mean(1 + s - mu^2 - exp(s)) = (mean_n(o) / D - mean(s) - 1) / 2,   s = log sigma^2

    The variances are computed again in the backward pass, so that nothing of their size is kept for it.

    Arguments of `apply`, both fp32:
        mean_nD, logvar_nD: the means and log-variances of the samples.
    """

    @staticmethod
    def forward(ctx: Any, mean_nD: Tensor, logvar_nD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mean_nD, logvar_nD)
        ctx.set_materialize_grads(False)
        offset_n = logvar_nD.exp().addcmul_(mean_nD, mean_nD).sum(dim=1)
        kl = (offset_n.sum() - logvar_nD.sum()).div_(2 * logvar_nD.numel()).sub_(0.5)
        return offset_n, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_n: Tensor | None, g_kl: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        mean_nD, logvar_nD = ctx.saved_tensors
        wants_mean, wants_logvar = ctx.needs_input_grad
        g_kl = None if g_kl is None else g_kl / (2 * logvar_nD.numel())
        if g_kl is not None:
            g_n = g_kl.expand(len(mean_nD)) if g_n is None else g_n + g_kl
        if g_n is None:
            return None, None
        dlogvar_nD = logvar_nD.exp().mul_(g_n[:, None]) if wants_logvar else None
        if dlogvar_nD is not None and g_kl is not None:
            dlogvar_nD -= g_kl
        return mean_nD * (2 * g_n)[:, None] if wants_mean else None, dlogvar_nD
