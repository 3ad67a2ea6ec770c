"""The training task of a PCME++ model in the loop of open_clip 4; imported where there is one."""

from typing import Any

from open_clip.task import CLIPTask
from torch import Tensor, nn


class PCMEppTask(CLIPTask):
    """open_clip's task of a CLIP with the loss of PCME++, whose diagnostics it reports.

    Arguments:
        model: a PCME++ model.
        loss: its loss, a `PCMEppLoss`.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, **kwargs: Any):
        super().__init__(model, loss=loss, **kwargs)

    @staticmethod
    def _report(source: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = ("logit_scale", "logit_bias", "match_scale", "match_shift")
        return {name: source[name].float().mean().detach() for name in scales if name in source}
