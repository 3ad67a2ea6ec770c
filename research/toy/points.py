"""The dataset of the toy: points in the plane of three classes, of which 30 % are of two classes at once.

    centre_k ~ U(0, 1),   mean_i = centre_k + 0.1 N(0, 1),   log sigma^2_i ~ U(-1.5, 1.5)   in each dimension

500 points are drawn for each class k. 150 of them are confusing: in every batch they are either of class k or of the
next class, with equal probability.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from pcmepp_openclip.gaussian import Gaussian

CLASSES, PER_CLASS, CONFUSING_SHARE = 3, 500, 0.3
NOISE, MAX_LOGVAR = 0.1, 1.5


@dataclass(frozen=True)
class Points:
    """The points at the start of a run.

    Arguments:
        gaussian: initial means and log-variances, [N, 2] each; the means are not normalised.
        class_N: the class that a point was drawn from.
        confusing_N: whether it may also be of the next class.
    """

    gaussian: Gaussian
    class_N: Tensor
    confusing_N: Tensor

    def __len__(self) -> int:
        return len(self.class_N)

    @property
    def next_class_N(self) -> Tensor:
        """Return the class after each point's own, [N]: the other class of a confusing point."""
        return (self.class_N + 1) % CLASSES

    def draw_labels(self, generator: Generator) -> Tensor:
        """Draw a class for every point, [N]: its own, or one of the two by a fair coin where it is confusing."""
        coin_N = torch.rand(len(self), generator=generator) < 0.5
        return torch.where(self.confusing_N & coin_N, self.next_class_N, self.class_N)


def draw_points(generator: Generator, per_class: int = PER_CLASS) -> Points:
    """Draw the dataset.

    Arguments:
        generator: the source of the random numbers.
        per_class: points of each class, of which 30 % are confusing.
    """
    class_N = torch.arange(CLASSES).repeat_interleave(per_class)
    centre_C2 = torch.rand(CLASSES, 2, generator=generator)
    mean_N2 = centre_C2[class_N] + NOISE * torch.randn(len(class_N), 2, generator=generator)
    logvar_N2 = MAX_LOGVAR * (2 * torch.rand(len(class_N), 2, generator=generator) - 1)
    confusing = torch.arange(per_class) < round(CONFUSING_SHARE * per_class)
    return Points(Gaussian(mean_N2, logvar_N2), class_N, confusing.repeat(CLASSES))
