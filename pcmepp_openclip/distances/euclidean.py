"""The squared Euclidean distance of the means: the CSD of Gaussians whose variances are zero."""

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors


class Euclidean(Distance):
    """|mu_a - mu_b|^2; the variances do not count.

    When to use it: to train PCME++ with the means only, the ablation of the paper, with the same matching loss,
    pseudo-positives, a and b as with CSD. For l2-normalised means it is twice the cosine distance and ranks alike.
    """

    ranked_by_default = False

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
            row_N, column_M = (mean.square().sum(dim=1) for mean in (mean_ND, mean_MD))
            return Factors(mean_ND, mean_MD, row_N, column_M, scale=2.0)
