"""The learning rate of a step: open_clip's schedule times the drops, the warm-up and the factor of a group."""

from collections.abc import Callable, Sequence

import torch

from .param_groups import SCALE


def scheduled(
    stock: Callable[[int], float],
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    drop_epochs: Sequence[int] = (),
    drop_factor: float = 1.0,
    warm_up_epoch: int | None = None,
) -> Callable[[int], float]:
    """Return a function of the step that sets and returns the learning rate.

        lr(step) = stock(step) * drop_factor^(number of `drop_epochs` that have begun) * factor of the group

    Arguments:
        stock: open_clip's function of the step, which gives all groups the same learning rate and returns it.
        warm_up_epoch: the epoch of n steps in which the learning rate is also multiplied by (i + 1) / n at step i.
    """

    def adjust(step: int) -> float:
        epoch = step // steps_per_epoch
        lr = stock(step) * drop_factor ** sum(epoch >= drop for drop in drop_epochs)
        if epoch == warm_up_epoch:
            lr *= (step % steps_per_epoch + 1) / steps_per_epoch
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        return lr

    return adjust
