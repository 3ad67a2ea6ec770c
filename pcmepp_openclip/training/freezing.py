"""A tower that is frozen in the first epochs, and the loss that is warmed up in the first epoch after those.

The gradients of a frozen backbone are computed and dropped before they are clipped and before the optimizer sees them.
That is exact: an optimizer leaves a parameter without a gradient as it is, weight decay and its own state included, and
the norm that gradients are clipped by is that of the others. Parameters that did not ask for gradients would save time,
but DDP decides when it is built which gradients it waits for, and would wait for these.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..host.calls import Backward
from .finetuning import FineTuning
from .param_groups import backbone_parameters


class FrozenEpoch(Backward):
    """An epoch in which some parameters are frozen, or the loss is warmed up.

    Arguments:
        frozen: the parameters that are not trained.
        share: the factor of the loss at the current step, or None for 1.
    """

    def __init__(self, frozen: list[nn.Parameter], share: Callable[[], float] | None):
        self.frozen, self.share = frozen, share

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.share is None else loss * self.share()

    def finish(self) -> None:
        for parameter in self.frozen:
            parameter.grad = None


def frozen_epoch(recipe: FineTuning, model: Any, epoch: int, steps: int, step: Callable[[], int]) -> FrozenEpoch | None:
    """Return what is frozen or warmed up in an epoch, or None for an ordinary epoch.

    Arguments:
        steps: the number of steps of an epoch.
        step: a function that returns the current step of the run. At the i-th step of its epoch, i from 0, the loss is
            multiplied by (i + 1) / steps.
    """
    frozen = [
        parameter
        for tower, epochs in (("image", recipe.freeze_image), ("text", recipe.freeze_text))
        if epoch < epochs
        for parameter in backbone_parameters(model, tower)
    ]
    warms_up = recipe.warm_up == "loss" and epoch == recipe.frozen_epochs
    if not frozen and not warms_up:
        return None
    return FrozenEpoch(frozen, (lambda: (step() - epoch * steps + 1) / steps) if warms_up else None)
