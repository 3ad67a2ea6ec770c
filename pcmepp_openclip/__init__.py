"""PCME++ for open_clip: importing this package makes open_clip know the `PCMEpp-*` models.

>>> import open_clip, pcmepp_openclip
>>> model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-ViT-B-16")
>>> tokenizer = open_clip.get_tokenizer("PCMEpp-ViT-B-16")
>>> texts = model.encode_text_gaussian(tokenizer(["a dog", "a small black dog on a red sofa"]))
>>> texts.uncertainty, pcmepp_openclip.csd(images, texts)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .system import launcher
from .system.version import __version__  # noqa: F401

launcher.hand_over()  # `python -m pcmepp_openclip PROGRAM` does not come back from here
launcher.expect_ctrl_c()

from .config import PCMEppCfg  # noqa: E402
from .distances import DISTANCES, Distance, csd  # noqa: E402
from .gaussian import Gaussian  # noqa: E402
from .host.loss import create_loss  # noqa: E402
from .host.registration import register  # noqa: E402
from .losses import (  # noqa: E402
    LOSSES,
    ChunkedClipLoss,
    LossTerm,
    PCMEppLoss,
    matching_logits,
    matching_loss,
    pseudo_positive_targets,
    vib,
)
from .models.pcmepp import PCMEppCLIP, PCMEppCustomTextCLIP, ProbabilisticModel  # noqa: E402
from .models.state_dict import reconcile_state_dict  # noqa: E402

_installed = Path(__file__).parent / "model_configs"
MODEL_CONFIGS = _installed if _installed.is_dir() else Path(__file__).parent.parent / "model_configs"
register({"CLIP": PCMEppCLIP, "CustomTextCLIP": PCMEppCustomTextCLIP}, create_loss, reconcile_state_dict, MODEL_CONFIGS)

if TYPE_CHECKING:
    from .ambiguity.model import ImageTextModel


def __getattr__(name: str) -> Any:
    """`ImageTextModel` is imported when it is asked for: the import of this package stays as fast as it is."""
    if name == "ImageTextModel":
        from .ambiguity.model import ImageTextModel

        return ImageTextModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DISTANCES",
    "LOSSES",
    "MODEL_CONFIGS",
    "ChunkedClipLoss",
    "Distance",
    "Gaussian",
    "ImageTextModel",
    "LossTerm",
    "PCMEppCLIP",
    "PCMEppCfg",
    "PCMEppCustomTextCLIP",
    "PCMEppLoss",
    "ProbabilisticModel",
    "csd",
    "matching_logits",
    "matching_loss",
    "pseudo_positive_targets",
    "vib",
]
