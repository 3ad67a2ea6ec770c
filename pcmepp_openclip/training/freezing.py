"""A tower that is frozen in the first epochs, and the loss that is warmed up in the first epoch after those.

The gradients of a frozen backbone are computed and dropped before they are clipped and before the optimizer sees them.
That is exact: an optimizer leaves a parameter without a gradient as it is, weight decay and its own state included, and
the norm that gradients are clipped by is that of the others. Parameters that did not ask for gradients would save time,
but DDP decides when it is built which gradients it waits for, and would wait for these.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from .finetuning import frozen_epochs
from .param_groups import backbone_parameters


class FrozenEpoch:
    """An epoch in which some parameters are frozen, or the loss is warmed up; by default neither.

    Arguments:
        frozen: the parameters that are not trained.
        factor: returns the factor of the loss at a step of the run.
    """

    def __init__(self, frozen: list[nn.Parameter], factor: Callable[[int], float] | None = None):
        self.frozen, self.warms_up = frozen, factor is not None
        self.factor = factor or (lambda _step: 1.0)

    def drop_gradients(self) -> None:
        """Drop the gradients of what is frozen, before the others are clipped."""
        for parameter in self.frozen:
            parameter.grad = None


def frozen_epoch(config: Any, model: Any, epoch: int, steps: int) -> FrozenEpoch:
    """Return what is frozen or warmed up in an epoch of so many steps.

    At step i of the epoch that warms up, i from 0, the loss is multiplied by (i + 1) / steps.
    """
    frozen = [
        parameter
        for tower, epochs in (("image", config.freeze_image_epochs), ("text", config.freeze_text_epochs))
        if epoch < (epochs or 0)
        for parameter in backbone_parameters(model, tower)
    ]
    if config.warm_up_after_freeze != "loss" or epoch != frozen_epochs(config):
        return FrozenEpoch(frozen)
    return FrozenEpoch(frozen, lambda step: (step - epoch * steps + 1) / steps)
