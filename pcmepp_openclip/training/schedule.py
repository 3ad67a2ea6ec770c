"""The learning rate of a step: open_clip's schedule, times the drops, times the factor of a group."""

from collections.abc import Callable, Sequence

import torch

from .param_groups import SCALE


def scheduled(
    stock: Callable[[int], float],
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    drop_epochs: Sequence[int] = (),
    drop_factor: float = 1.0,
) -> Callable[[int], float]:
    """lr(step) = stock(step) * drop_factor^(number of `drop_epochs` that have begun), times the factor of each group.

    Arguments:
        stock: open_clip's function of the step, which gives all groups the same learning rate and returns it.
    """

    def adjust(step: int) -> float:
        epoch = step // steps_per_epoch
        lr = stock(step) * drop_factor ** sum(epoch >= drop for drop in drop_epochs)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get(SCALE, 1.0)
        return lr

    return adjust
