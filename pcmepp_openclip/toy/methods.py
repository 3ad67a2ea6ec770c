"""The four losses of the toy. Each is of one batch of points and the classes that they have this time.

The matching loss asks of every pair of points whether they are of one class, by CSD or by the Wasserstein distance. The
triplet loss compares means alone, with every negative (SUM) or with the nearest one (HNM, hardest negative mining):

    sum_k or max_k  max(0, margin + |mu_i - mu_p|^2 - |mu_i - mu_k|^2)

where p is a point of the class of i, another one in every batch, and k runs over the points of other classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..distances import DISTANCES, csd
from ..gaussian import Gaussian
from ..losses import matching_logits, matching_loss

MARGIN = 0.2


class Batch(NamedTuple):
    """What a loss is computed from.

    Arguments:
        points: Gaussians, [n, 2], in random order.
        label_n: their classes this time.
        match_scale, match_shift: a and b of the matching logit -a d + b, 0-d.
    """

    points: Gaussian
    label_n: Tensor
    match_scale: Tensor
    match_shift: Tensor


def matching(batch: Batch, distance: str) -> Tensor:
    """The matching loss of all n x n pairs, a point with itself included, by a distance in `DISTANCES`."""
    distance_nn = DISTANCES[distance].matrix(batch.points, batch.points)
    same_nn = batch.label_n[:, None] == batch.label_n
    return matching_loss(matching_logits(distance_nn, batch.match_scale, batch.match_shift), same_nn.float())


def triplets(batch: Batch, hardest: bool) -> Tensor:
    """The triplet loss, averaged over the points that have a partner of their class in the batch."""
    mean_n2 = batch.points.mean
    as_points = Gaussian(mean_n2, torch.full_like(mean_n2, -torch.inf))  # of variance 0: CSD is the squared distance
    distance_nn = csd(as_points, as_points)
    same_nn = batch.label_n[:, None] == batch.label_n
    positive_n, has_positive_n = positives(same_nn)
    own_n1 = distance_nn.gather(1, positive_n[:, None])
    cost_nn = (MARGIN + own_n1 - distance_nn).relu().masked_fill(same_nn, 0.0)
    cost_n = cost_nn.amax(dim=1) if hardest else cost_nn.sum(dim=1)
    return (cost_n * has_positive_n).sum() / has_positive_n.sum().clamp(min=1)


def positives(same_nn: Tensor) -> tuple[Tensor, Tensor]:
    """The next point of the same class for each point of a batch, [n], and whether there is one, [n] of bool. After the
    last point comes the first; since the batch is in random order, the next one is a random one."""
    n = len(same_nn)
    index_n = torch.arange(n)
    steps_nn = (index_n - index_n[:, None] - 1) % n  # from row to column; n - 1 to itself
    steps_n, positive_n = steps_nn.masked_fill(~same_nn, n).min(dim=1)
    return positive_n, steps_n < n - 1


@dataclass(frozen=True)
class Method:
    """A loss, what the figure calls it, and whether it trains the variances."""

    title: str
    loss: Callable[[Batch], Tensor]
    probabilistic: bool = True


METHODS = {
    "csd": Method("CSD (PCME++)", lambda batch: matching(batch, "csd")),
    "wasserstein": Method("Wasserstein", lambda batch: matching(batch, "wasserstein")),
    "sum": Method("triplet, all negatives", lambda batch: triplets(batch, hardest=False), probabilistic=False),
    "hnm": Method("triplet, hardest negative", lambda batch: triplets(batch, hardest=True), probabilistic=False),
}
