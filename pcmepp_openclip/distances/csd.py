"""The closed-form sampled distance (CSD), equation 1 of the PCME++ paper."""

from torch import Tensor

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors


class CSD(Distance):
    """The expected squared distance between a sample of one Gaussian and a sample of another.

        d(a, b) = E |z_a - z_b|^2 = |mu_a - mu_b|^2 + sum sigma_a^2 + sum sigma_b^2

    The distance of a Gaussian to itself is twice its uncertainty, not zero. The means need not be normalised.

    Reference: Chun, "Improved Probabilistic Image-Text Representations", ICLR 2024.
    """

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
            row_N = mean_ND.square().sum(dim=1) + query.uncertainty
            column_M = mean_MD.square().sum(dim=1) + gallery.uncertainty
            return Factors(mean_ND, mean_MD, row_N, column_M, scale=2.0)


def csd(a: Gaussian, b: Gaussian) -> Tensor:
    """Return the closed-form sampled distance of every Gaussian of `a` to every one of `b`, see `CSD`.

    Arguments:
        a, b: `Gaussian`s of N and M samples.

    Returns:
        [N, M] in fp32, whatever the dtype of the input and under autocast too.
    """
    return CSD().matrix(a, b)
