"""The Kullback-Leibler divergence between diagonal Gaussians."""

import torch

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors, Transposed


class KL(Distance):
    """KL(a || b), plain, with the image first; its mean over both directions is `JS`.

        d(a, b) = 1/2 sum [log sigma_b^2 - log sigma_a^2 + (sigma_a^2 + (mu_a - mu_b)^2) / sigma_b^2 - 1]

    It is 0 between equal Gaussians, however uncertain: like all measures of whether two distributions are the same, it
    gives no reason to lower a variance where a match is certain. The square is multiplied out, which makes it one
    matrix product, in fp64, since its terms nearly cancel where a variance is small.
    """

    ranked_by_default = False

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            mean_ND, logvar_ND, mean_MD, logvar_MD = (x.double() for x in (*query, *gallery))
            precision_MD = (-logvar_MD).exp()
            query_NE = torch.cat([logvar_ND.exp() + mean_ND.square(), mean_ND], dim=1)
            gallery_ME = torch.cat([-precision_MD, 2 * mean_MD * precision_MD], dim=1)
            row_N = -0.5 * (logvar_ND + 1).sum(dim=1)
            column_M = 0.5 * (logvar_MD + mean_MD.square() * precision_MD).sum(dim=1)
            return Factors(query_NE, gallery_ME, row_N, column_M, scale=0.5)

    @property
    def transposed(self) -> Distance:
        return Transposed(self)
