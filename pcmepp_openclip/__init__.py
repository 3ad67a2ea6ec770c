"""PCME++ for open_clip: importing this package makes open_clip know the `PCMEpp-*` models.

>>> import open_clip, pcmepp_openclip
>>> model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-ViT-B-16")
>>> tokenizer = open_clip.get_tokenizer("PCMEpp-ViT-B-16")
>>> texts = model.encode_text_gaussian(tokenizer(["a dog", "a small black dog on a red sofa"]))
>>> texts.uncertainty.shape, pcmepp_openclip.csd(texts, texts).shape
(torch.Size([2]), torch.Size([2, 2]))

`ImageTextModel` asks any open_clip model among how many items it confuses an image or a text.
"""

import sys
from typing import TYPE_CHECKING, Any

from .system.version import __version__  # noqa: F401

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

if TYPE_CHECKING:
    from .ambiguity.model import ImageTextModel
    from .plugin import *
elif "pcmepp_cli" not in sys.modules:  # the `pcmepp` command imports `plugin` when it needs the models
    from . import plugin  # noqa: F401


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: those of `plugin` need torch, and `ImageTextModel` needs more."""
    if name == "ImageTextModel":
        from .ambiguity.model import ImageTextModel

        return ImageTextModel
    if name in __all__:
        from . import plugin

        return getattr(plugin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
