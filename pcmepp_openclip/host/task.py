"""The training task of a PCME++ model in the loop of open_clip 4; imported where there is one."""

from open_clip.task import CLIPTask
from torch import Tensor


class PCMEppTask(CLIPTask):
    """open_clip's task of a CLIP, given a `PCMEppLoss`; it also reports the scale and shift of the matching logit."""

    @staticmethod
    def _report(source: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = ("logit_scale", "logit_bias", "match_scale", "match_shift")
        return {name: source[name].float().mean().detach() for name in scales if name in source}
