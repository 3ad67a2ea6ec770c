"""The 2-Wasserstein distance between diagonal Gaussians."""

import torch

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors


class Wasserstein(Distance):
    """The squared 2-Wasserstein distance; unlike the CSD it is zero between equal Gaussians.

        d(a, b) = |mu_a - mu_b|^2 + |sigma_a - sigma_b|^2

    The product is computed in fp64: where variances are large, little is left of their squares in the difference.
    """

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            point_NE, point_ME = (
                torch.cat([x.mean.double(), (0.5 * x.logvar.double()).exp()], dim=1) for x in (query, gallery)
            )
            row_N, column_M = (point.square().sum(dim=1) for point in (point_NE, point_ME))
            return Factors(point_NE, point_ME, row_N, column_M, scale=2.0)
