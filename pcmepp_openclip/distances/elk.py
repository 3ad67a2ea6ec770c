"""The expected likelihood kernel of diagonal Gaussians as a distance."""

import math

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .tiles import SumOverDimensions


class ExpectedLikelihood(SumOverDimensions):
    """The negative logarithm of the expected likelihood kernel, which is the integral of the product of two densities.

        d(a, b) = -log int N(z; a) N(z; b) dz = -log N(mu_a - mu_b; 0, sigma_a^2 + sigma_b^2)
                = 1/2 sum [(mu_a - mu_b)^2 / (sigma_a^2 + sigma_b^2) + log(sigma_a^2 + sigma_b^2) + log 2 pi]

    It is negative where variances are small. Its constant is D / 2 log 2 pi, 470 for D = 512, so that a model
    that is trained with it needs an `init_match_shift` to suit. Its negative is the mutual likelihood score of
    probabilistic face embeddings.

    Reference: Jebara et al., "Probability Product Kernels", JMLR 2004.
    """

    ranked_by_default = False

    def summands(self, a: Gaussian, b: Gaussian) -> Tensor:
        logvar = torch.logaddexp(a.logvar, b.logvar)  # the log-variance of the difference of a sample of each
        return 0.5 * ((a.mean - b.mean).square() * (-logvar).exp() + logvar + math.log(2 * math.pi))
