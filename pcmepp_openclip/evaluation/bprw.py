"""Bayesian prompt re-weighting (BPRW) as ProLIP's authors do it: how much of a class's images each prompt explains.

The prompts of a class are the Gaussians of a mixture whose proportions pi are unknown; K samples of each of some images
of the class are observations z of it. With a Dirichlet prior of concentration alpha on pi, EM alternates

    r_st = pi_t exp(l_st) / sum_u pi_u exp(l_su)              l_st = log N(z_s; mu_t, sigma_t^2 + eps)
    pi_t = (sum_s r_st + alpha - 1) / (S + T (alpha - 1))

from pi_t proportional to 1 / (mean variance of prompt t). The classifier is the sum of the prompts' means weighted by
pi, which the authors do not put back on the unit sphere. The samples are drawn with a fixed seed.

Reference: Chun et al., "Probabilistic Language-Image Pre-Training" (ProLIP), ICLR 2025, table 3, and its code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gaussian import Gaussian

EPS = 0.02
MOST_STEPS, TOLERANCE = 1000, 1e-9


@dataclass(frozen=True)
class Setting:
    """Images per class that are used, samples per image, and concentration of the prior."""

    images: int
    samples: int
    alpha: float


FEW_SHOT = Setting(images=5, samples=20, alpha=2.0)  # It uses labelled images of the class.
NEIGHBOURS = Setting(images=10, samples=10, alpha=5.0)  # It uses the images nearest to the class.


def draw(images: Gaussian, samples: int, generator: torch.Generator) -> Tensor:
    """Draw `samples` points of each image, [N * samples, D]."""
    n, dim = images.mean.shape
    noise_NKD = torch.randn(n, samples, dim, generator=generator)
    return (images.mean[:, None] + (0.5 * images.logvar).exp()[:, None] * noise_NKD).reshape(-1, dim)


def log_likelihood(points_SD: Tensor, prompts: Gaussian, eps: float = EPS) -> Tensor:
    """Return l_st of the file's docstring, [S, T], without an S x T x D tensor."""
    z_SD, mu_TD, v_TD = points_SD.double(), prompts.mean.double(), prompts.logvar.double().exp() + eps
    square = z_SD**2 @ (1 / v_TD).T - 2 * z_SD @ (mu_TD / v_TD).T + (mu_TD**2 / v_TD).sum(dim=1)
    return -0.5 * (square + (2 * math.pi * v_TD).log().sum(dim=1))


def mixing_proportions(log_likelihood_ST: Tensor, start_T: Tensor, alpha: float) -> Tensor:
    """Compute pi of the file's docstring, [T]."""
    observations, prompts = log_likelihood_ST.shape
    pi_T = start_T / start_T.sum()
    for _ in range(MOST_STEPS if observations else 0):
        before_T = pi_T
        responsibility_ST = (log_likelihood_ST + pi_T.log()).softmax(dim=1)
        pi_T = (responsibility_ST.sum(dim=0) + alpha - 1) / (observations + prompts * (alpha - 1))
        if (pi_T - before_T).norm() < TOLERANCE:
            break
    return pi_T


def prompt_weights(prompts_CTD: Gaussian, images: Gaussian, of_class: Sequence[Tensor], setting: Setting) -> Tensor:
    """Return pi of each class, [C, T], from its first images at the indices `of_class[c]`, or the start without any."""
    generator, weights = torch.Generator().manual_seed(0), []
    for mean_TD, logvar_TD, indices in zip(prompts_CTD.mean, prompts_CTD.logvar, of_class, strict=True):
        prompts, chosen = Gaussian(mean_TD, logvar_TD), indices[: setting.images]
        points_SD = draw(images.select(chosen), setting.samples, generator)
        start_T = 1 / prompts.uncertainty.double()
        weights.append(mixing_proportions(log_likelihood(points_SD, prompts), start_T, setting.alpha))
    return torch.stack(weights).float()
