"""The losses of the toy, and the training of its points, which are the parameters: no encoder, Adam moves means and
log-variances themselves.

history = train("csd", seed=0, settings=Settings())
history.final.uncertainty

The matching loss asks of every pair of points whether they are of one class, by CSD or by the Wasserstein distance. The
triplet loss compares means alone, with every negative (SUM) or with the nearest one (HNM, hardest negative mining):

    sum_k or max_k  max(0, margin + |mu_i - mu_p|^2 - |mu_i - mu_k|^2)

where p is a point of the class of i, another one in every batch, and k runs over the points of other classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pcmepp_openclip.distances import DISTANCES, csd
from pcmepp_openclip.gaussian import Gaussian
from pcmepp_openclip.losses import matching_logits, matching_loss

from .points import PER_CLASS, Points, draw_points

MARGIN = 0.2


class Batch(NamedTuple):
    """The input of a loss.

    Arguments:
        points: Gaussians, [n, 2], in random order.
        label_n: their classes in this batch.
        match_scale, match_shift: a and b of the matching logit -a d + b, 0-d.
    """

    points: Gaussian
    label_n: Tensor
    match_scale: Tensor
    match_shift: Tensor


def matching(batch: Batch, distance: str) -> Tensor:
    """Return the matching loss of all n x n pairs, a point with itself included, by a distance in `DISTANCES`."""
    distance_nn = DISTANCES[distance].matrix(batch.points, batch.points)
    same_nn = batch.label_n[:, None] == batch.label_n
    return matching_loss(matching_logits(distance_nn, batch.match_scale, batch.match_shift), same_nn.float())


def triplets(batch: Batch, hardest: bool) -> Tensor:
    """Return the triplet loss, averaged over the points that have a partner of their class in the batch."""
    mean_n2 = batch.points.mean
    as_points = Gaussian(mean_n2, torch.full_like(mean_n2, -torch.inf))  # with variance 0, CSD is the squared distance
    distance_nn = csd(as_points, as_points)
    same_nn = batch.label_n[:, None] == batch.label_n
    positive_n, has_positive_n = positives(same_nn)
    own_n1 = distance_nn.gather(1, positive_n[:, None])
    cost_nn = (MARGIN + own_n1 - distance_nn).relu().masked_fill(same_nn, 0.0)
    cost_n = cost_nn.amax(dim=1) if hardest else cost_nn.sum(dim=1)
    return (cost_n * has_positive_n).sum() / has_positive_n.sum().clamp(min=1)


def positives(same_nn: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next point of the same class for each point of a batch, [n], and whether there is one, [n] of bool.
    After the last point comes the first; since the batch is in random order, the next one is a random one."""
    n = len(same_nn)
    index_n = torch.arange(n)
    steps_nn = (index_n - index_n[:, None] - 1) % n  # steps from row to column: n - 1 to itself
    steps_n, positive_n = steps_nn.masked_fill(~same_nn, n).min(dim=1)
    return positive_n, steps_n < n - 1


@dataclass(frozen=True)
class Method:
    """A loss, its title in the figure, and whether it trains the variances."""

    title: str
    loss: Callable[[Batch], Tensor]
    probabilistic: bool = True


METHODS = {
    "csd": Method("CSD (PCME++)", lambda batch: matching(batch, "csd")),
    "wasserstein": Method("Wasserstein", lambda batch: matching(batch, "wasserstein")),
    "sum": Method("triplet, all negatives", lambda batch: triplets(batch, hardest=False), probabilistic=False),
    "hnm": Method("triplet, hardest negative", lambda batch: triplets(batch, hardest=True), probabilistic=False),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a training. The paper leaves much open; the defaults are the reading of it that came nearest to
    its numbers of 180 that were tried, so they are a fit.

    Arguments:
        epochs: number of steps: an epoch is one batch.
        per_class: points of each of the three classes.
        batch_size: points per step, drawn anew from all points for each.
        lr: the learning rate of Adam.
        match_scale, match_shift: initial a and b of the matching logit -a d + b.
        learn_scale: whether a and b are trained too.
        redraw_labels: whether confusing points get a new class in every batch, or keep that of the first.
    """

    epochs: int = 500
    per_class: int = PER_CLASS
    batch_size: int = 128
    lr: float = 0.02
    match_scale: float = 1.0
    match_shift: float = 1.0
    learn_scale: bool = True
    redraw_labels: bool = True


@dataclass(frozen=True)
class History:
    """The points of a run.

    Arguments:
        points: the points as they were drawn.
        snapshots: the trained Gaussians after these epochs, in order; 0 is the start.
        match_scale, match_shift: a and b at the end.
    """

    points: Points
    snapshots: dict[int, Gaussian]
    match_scale: float
    match_shift: float

    @property
    def final(self) -> Gaussian:
        return self.snapshots[max(self.snapshots)]


def train(
    method: str,
    seed: int,
    settings: Settings,
    keep: Sequence[int] = (),
    after_epoch: Callable[[], object] = lambda: None,
) -> History:
    """Draw the points of a seed and train them. All methods begin with the same points.

    Arguments:
        method: a name in `METHODS`.
        keep: epochs after which the points are kept, besides the last one.
        after_epoch: called after each, for a progress bar.
    """
    generator = torch.Generator().manual_seed(seed)
    points = draw_points(generator, settings.per_class)
    mean_N2, logvar_N2 = (tensor.clone().requires_grad_() for tensor in points.gaussian)
    scale, shift = (
        torch.tensor(value, requires_grad=settings.learn_scale)
        for value in (settings.match_scale, settings.match_shift)
    )
    trained = [mean_N2, logvar_N2, *([scale, shift] if settings.learn_scale else [])]
    optimizer = torch.optim.Adam(trained, lr=settings.lr, fused=True)
    loss_of = METHODS[method].loss
    label_N = points.draw_labels(generator)
    snapshots = {0: points.gaussian} if 0 in keep else {}
    for epoch in range(1, settings.epochs + 1):
        if settings.redraw_labels:
            label_N = points.draw_labels(generator)
        index_n = torch.randperm(len(points), generator=generator)[: settings.batch_size]
        batch = Gaussian(mean_N2[index_n], logvar_N2[index_n])
        loss = loss_of(Batch(batch, label_N[index_n], scale, shift))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch in keep or epoch == settings.epochs:
            snapshots[epoch] = Gaussian(mean_N2.detach().clone(), logvar_N2.detach().clone())
        after_epoch()
    return History(points, snapshots, scale.item(), shift.item())


def variances(gaussian: Gaussian, confusing_N: Tensor) -> tuple[float, float]:
    """Return the mean sigma^2, summed over both dimensions, of the certain points and of the confusing ones."""
    sum_N = gaussian.uncertainty
    return sum_N[~confusing_N].mean().item(), sum_N[confusing_N].mean().item()


def separation(gaussian: Gaussian, points: Points) -> float:
    """Return how far apart the classes are: the mean distance of two class centres over the root mean squared distance
    of a point from its own, over the certain points and by their means."""
    certain_N = ~points.confusing_N
    mean_M2, class_M = gaussian.mean[certain_N], points.class_N[certain_N]
    centre_C2 = torch.stack([mean_M2[class_M == label].mean(dim=0) for label in class_M.unique()])
    within = (mean_M2 - centre_C2[class_M]).square().sum(dim=1).mean().sqrt()
    return (torch.pdist(centre_C2).mean() / within).item()
