"""The Jensen-Shannon divergence between diagonal Gaussians, in the closed form that stands for it."""

import torch

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors


class JS(Distance):
    """The mean of the KL divergences in both directions.

        d(a, b) = 1/2 KL(a || b) + 1/2 KL(b || a)
                = 1/4 sum [(sigma_a^2 + (mu_a - mu_b)^2) / sigma_b^2 + (sigma_b^2 + (mu_a - mu_b)^2) / sigma_a^2 - 2]

    The Jensen-Shannon divergence itself compares each Gaussian with the mixture of both and has no closed form. This is
    the symmetric form that is used in its place for Gaussian embeddings, half of Jeffreys' divergence; it is an
    upper bound, of at least twice the Jensen-Shannon divergence. One matrix product in fp64, see `KL`.
    """

    ranked_by_default = False

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            square_ND, mean_ND, precision_ND, ratio_ND = _parts(query)
            square_MD, mean_MD, precision_MD, ratio_MD = _parts(gallery)
            query_NE = torch.cat([square_ND, mean_ND, precision_ND, ratio_ND], dim=1)
            gallery_ME = torch.cat([-precision_MD, 2 * ratio_MD, -square_MD, 2 * mean_MD], dim=1)
            row_N, column_M = (
                0.25 * (mean * ratio - 1).sum(dim=1) for mean, ratio in ((mean_ND, ratio_ND), (mean_MD, ratio_MD))
            )
            return Factors(query_NE, gallery_ME, row_N, column_M, scale=0.25)


def _parts(x: Gaussian) -> tuple[torch.Tensor, ...]:
    """Return sigma^2 + mu^2, mu, 1 / sigma^2 and mu / sigma^2, each [N, D] in fp64."""
    mean, logvar = x.mean.double(), x.logvar.double()
    precision = (-logvar).exp()
    return logvar.exp() + mean.square(), mean, precision, mean * precision
