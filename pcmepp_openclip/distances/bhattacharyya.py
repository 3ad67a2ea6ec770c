"""The Bhattacharyya distance between diagonal Gaussians."""

import math

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .tiles import SumOverDimensions


class Bhattacharyya(SumOverDimensions):
    """The negative logarithm of the overlap, int sqrt(p q), of two Gaussians; zero between equal ones.

        d(a, b) = 1/4 sum (mu_a - mu_b)^2 / (sigma_a^2 + sigma_b^2)
                + 1/2 sum log((sigma_a^2 + sigma_b^2) / (2 sigma_a sigma_b))

    The logarithm is log cosh((s_a - s_b) / 2) with s = log sigma^2, which neither overflows nor cancels.
    """

    ranked_by_default = False

    def summands(self, a: Gaussian, b: Gaussian) -> Tensor:
        half = (a.logvar - b.logvar) / 2
        log_cosh = torch.logaddexp(half, -half) - math.log(2)
        return 0.25 * (a.mean - b.mean).square() * (-torch.logaddexp(a.logvar, b.logvar)).exp() + 0.5 * log_cosh
