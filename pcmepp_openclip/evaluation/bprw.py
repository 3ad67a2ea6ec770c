"""Bayesian prompt re-weighting (BPRW): how much of a class's images each of its prompts explains.

The prompts of a class are the Gaussians of a mixture whose proportions pi are unknown; images of the class (a few that
are labelled, or the nearest ones) are observations of it. With a Dirichlet prior of concentration alpha on pi, EM
alternates

    r_nt = pi_t exp(l_nt) / sum_s pi_s exp(l_ns)              l_nt = E log N(z; mu_t, sigma_t^2 + eps), z ~ image n
    pi_t = (sum_n r_nt + alpha - 1) / (N + T (alpha - 1))

from pi_t proportional to 1 / (mean variance of prompt t). The expectation over the image's own Gaussian N(m, s^2) is

    l_nt = -1/2 sum_d [ ((m - mu_t)^2 + s^2) / v + log(2 pi v) ],  v = sigma_t^2 + eps

where the authors draw samples instead; so this is exact and the same each time. The classifier is the mean of the
prompts weighted by pi. alpha = 2 and eps = 0.02 are the authors'.

Reference: Chun et al., "Probabilistic Language-Image Pre-Training" (ProLIP), ICLR 2025.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..gaussian import Gaussian

ALPHA, EPS = 2.0, 0.02
MOST_STEPS, TOLERANCE = 1000, 1e-9


def log_likelihood(images: Gaussian, prompts: Gaussian, eps: float = EPS) -> Tensor:
    """l_nt of the file's docstring, [N, T], without an N x T x D tensor."""
    m_ND, mu_TD = images.mean.double(), prompts.mean.double()
    s2_ND, v_TD = images.logvar.double().exp(), prompts.logvar.double().exp() + eps
    square = (m_ND**2 + s2_ND) @ (1 / v_TD).T - 2 * m_ND @ (mu_TD / v_TD).T + (mu_TD**2 / v_TD).sum(dim=1)
    return -0.5 * (square + (2 * math.pi * v_TD).log().sum(dim=1))


def mixing_proportions(log_likelihood_NT: Tensor, start_T: Tensor, alpha: float = ALPHA) -> Tensor:
    """pi of the file's docstring, [T]."""
    n, prompts = log_likelihood_NT.shape
    pi_T = start_T / start_T.sum()
    for _ in range(MOST_STEPS if n else 0):
        before_T = pi_T
        responsibility_NT = (log_likelihood_NT + pi_T.log()).softmax(dim=1)
        pi_T = (responsibility_NT.sum(dim=0) + alpha - 1) / (n + prompts * (alpha - 1))
        if (pi_T - before_T).norm() < TOLERANCE:
            break
    return pi_T


def prompt_weights(prompts_CTD: Gaussian, images: Gaussian, of_class: Sequence[Tensor]) -> Tensor:
    """pi of each class, [C, T], from the images that `of_class[c]` picks; a class without any keeps its start."""
    weights = []
    for mean_TD, logvar_TD, chosen in zip(prompts_CTD.mean, prompts_CTD.logvar, of_class, strict=True):
        prompts = Gaussian(mean_TD, logvar_TD)
        own = Gaussian(images.mean[chosen], images.logvar[chosen])
        weights.append(mixing_proportions(log_likelihood(own, prompts), 1 / prompts.uncertainty.double()))
    return torch.stack(weights).float()
