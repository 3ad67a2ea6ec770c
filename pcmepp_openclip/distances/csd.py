"""The closed-form sampled distance (CSD) between Gaussians, equation 1 of the PCME++ paper."""

from torch import Tensor

from ..gaussian import Gaussian
from ..precision import full_precision


def csd(a: Gaussian, b: Gaussian) -> Tensor:
    """The expected squared distance of samples of every Gaussian of `a` to samples of every one of `b`.

        d(a, b) = E |z_a - z_b|^2 = |mu_a - mu_b|^2 + sum sigma_a^2 + sum sigma_b^2

    It separates into a matrix product and two vectors, so nothing of size N x M x D is formed. A
    Gaussian's distance to itself is twice its uncertainty, not zero.

    Arguments:
        a, b: `Gaussian`s of N and M samples. The means need not be normalised.

    Returns:
        [N, M] in fp32, whatever the input's dtype and under autocast too.

    Reference:
        Chun, "Improved Probabilistic Image-Text Representations", ICLR 2024.
    """
    if a.mean.ndim != 2 or b.mean.ndim != 2 or a.mean.shape[1] != b.mean.shape[1]:
        raise ValueError(
            "csd takes two batches of Gaussians with means [N, D] and [M, D] of one D; "
            f"got {list(a.mean.shape)} and {list(b.mean.shape)}."
        )
    with full_precision(a.mean):
        mean_a_ND, mean_b_MD = a.mean.float(), b.mean.float()
        offset_N = mean_a_ND.square().sum(dim=1) + a.uncertainty
        offset_M = mean_b_MD.square().sum(dim=1) + b.uncertainty
        return offset_N[:, None] + offset_M - 2 * mean_a_ND @ mean_b_MD.T
