"""The variational information bottleneck of PCME++, which keeps the variances from collapsing to zero."""

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
