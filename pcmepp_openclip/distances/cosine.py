"""The cosine distance of the means, by which plain CLIP ranks."""

from ..gaussian import Gaussian
from .base import Distance, Factors


class Cosine(Distance):
    """1 - mu_a . mu_b, for the l2-normalised means that the encoders return; the variances do not count."""

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        mean_ND = query.mean.float()
        return Factors(mean_ND, gallery.mean.float(), mean_ND.new_ones(len(mean_ND)))
