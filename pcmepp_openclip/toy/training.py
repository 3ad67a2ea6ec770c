"""The points are the parameters: no encoder, Adam moves means and log-variances themselves.

history = train("csd", seed=0, settings=Settings())
history.final.uncertainty
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .methods import METHODS, Batch
from .points import PER_CLASS, Points, draw_points


@dataclass(frozen=True)
class Settings:
    """How the points are trained. What the paper says leaves much open; the defaults are the reading of it that came
    nearest to its numbers of 180 that were tried, so they are a fit.

    Arguments:
        epochs: number of steps: an epoch is one batch.
        per_class: points of each of the three classes.
        batch_size: points per step, drawn anew from all points for each.
        lr: of Adam.
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
        points: as they were drawn.
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
    """The mean sigma^2, summed over both dimensions, of the certain points and of the confusing ones."""
    sum_N = gaussian.uncertainty
    return sum_N[~confusing_N].mean().item(), sum_N[confusing_N].mean().item()


def separation(gaussian: Gaussian, points: Points) -> float:
    """How far apart the classes are: the mean distance of two class centres over the root mean squared distance of a
    point from its own, over the certain points and by their means."""
    certain_N = ~points.confusing_N
    mean_M2, class_M = gaussian.mean[certain_N], points.class_N[certain_N]
    centre_C2 = torch.stack([mean_M2[class_M == label].mean(dim=0) for label in class_M.unique()])
    within = (mean_M2 - centre_C2[class_M]).square().sum(dim=1).mean().sqrt()
    return (torch.pdist(centre_C2).mean() / within).item()
