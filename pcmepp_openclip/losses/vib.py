"""The variational information bottleneck of PCME++, which keeps the variances from collapsing to zero.

`vib` is the readable form. Training computes it by `Offsets`, in one pass with the offsets of CSD.
"""

from typing import Any

import torch
from torch import Tensor

from ..gaussian import Gaussian, full_precision


def vib(gaussians: Gaussian) -> Tensor:
    """Return KL(N(mu, sigma^2) || N(0, I)), the mean over samples and dimensions, in fp32.

        -1/2 (1 + s - mu^2 - exp(s)),   s = log sigma^2

    The authors' code drops the term where it is above 1e4, at the price of a wait for the device in every step;
    here it is always counted: in fp32 it stays finite for s up to 88.
    """
    with full_precision(gaussians.mean):
        mean, logvar = gaussians.mean.float(), gaussians.logvar.float()
        return -0.5 * (1 + logvar - mean.square() - logvar.exp()).mean()


class Offsets(torch.autograd.Function):
    """The offset of each sample, o = |mu|^2 + sum_d sigma_d^2, [n], and the VIB of all, a 0-d tensor.

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
