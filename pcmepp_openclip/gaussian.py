"""A batch of diagonal Gaussians, what a PCME++ encoder returns.

Shape suffixes used in this package: N, M samples; D embedding dimensions; L tokens; C tower width; H heads.
"""

from typing import NamedTuple

from torch import Tensor


class Gaussian(NamedTuple):
    """N(mean, diag(exp(logvar))) for each sample of a batch.

    Arguments:
        mean: l2-normalised means, [N, D], in the dtype of the tower.
        logvar: log sigma^2, [N, D], always fp32.

    Example:
        >>> image = model.encode_image_gaussian(pixels)
        >>> image.uncertainty.argsort(descending=True)  # the most ambiguous image first
    """

    mean: Tensor
    logvar: Tensor

    @property
    def uncertainty(self) -> Tensor:
        """How ambiguous each sample is: the sum of its variances, sum_d sigma_d^2, [N], fp32."""
        return self.logvar.float().exp().sum(dim=-1)
