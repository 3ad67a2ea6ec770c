"""The entailment score: is this caption true of that image?"""

from ..gaussian import Gaussian, full_precision
from .base import Distance, Factors, Transposed

WEIGHT = 0.5  # the weight of a caption's uncertainty for a match scale that is tied at k = 2a / s = 0.5


class Entailment(Distance):
    """The cosine distance minus a caption's uncertainty: vague captions, which are true of many images, come closer.

        d(v, t) = 1 - mu_v . mu_t - weight u_t

    InfoNCE drives `s cos` towards log p(v, t) / (p(v) p(t)), which is largest for the most exact of the true captions.
    The probability that a caption is true has `log p_t` in addition, the log of the share of images that it is true of,
    and a calibrated uncertainty is `a u_t = (1 - k) log p_t + const` with k = 2a / s. Hence the weight k / (2 (1 - k)),
    which is 1/2 at k = 1/2: CSD ranks by `cos - u_t / 2`, the entailment score by `cos + u_t / 2`.

    Images come first, texts second; the uncertainty of an image does not count. For one caption the order of images is
    that of the cosine.

    Arguments:
        weight: the weight of a caption's uncertainty.
    """

    trainable = False

    def __init__(self, weight: float = WEIGHT):
        self.weight = weight

    @classmethod
    def of_scales(cls, match_scale: float, clip_scale: float) -> "Entailment":
        """Return the score of a model with these scales: a of the matching logit and s of InfoNCE.

        From k = 0.9 on, the variance says next to nothing, and the weight stays the same.
        """
        k = min(2 * match_scale / clip_scale, 0.9)
        return cls(k / (2 * (1 - k)))

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        with full_precision(query.mean):
            mean_ND = query.mean.float()
            column_M = -self.weight * gallery.uncertainty
            return Factors(mean_ND, gallery.mean.float(), mean_ND.new_ones(len(mean_ND)), column_M)

    @property
    def transposed(self) -> Distance:
        return Transposed(self)
