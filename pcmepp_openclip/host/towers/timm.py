"""An image tower from timm."""

from typing import Any

import torch
from open_clip.timm_model import TimmModel
from torch import Tensor

from .base import Tokens, Tower, check_image


class TimmTower(Tower):
    """Its tokens are the last feature map, flattened, or the tokens that the trunk pools."""

    kind = "a timm image tower"
    parts = (
        *("visual.trunk.forward_features", "visual.trunk.forward_head", "visual.trunk.num_features"),
        *("visual.head", "visual.image_size"),
    )

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(model.visual, TimmModel)

    @property
    def holder(self) -> Any:
        return self.model.visual

    @property
    def width(self) -> int:
        return self.model.visual.trunk.num_features

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.visual.trunk.parameters()).dtype

    def check(self, batch: Any) -> None:
        check_image(batch, None, self.dtype)  # some trunks take any size, and the others tell

    def tokens(self, batch: Tensor) -> Tokens:
        trunk = self.model.visual.trunk
        features = trunk.forward_features(batch)
        return Tokens(_flatten(features, getattr(trunk, "output_fmt", "NCHW")), features=features)

    def mean(self, tokens: Tokens) -> Tensor:
        visual = self.model.visual
        return visual.head(visual.trunk.forward_head(tokens.features))


def _flatten(features: Tensor, layout: str) -> Tensor:
    """Tokens [N, L, C] of what a trunk returns: tokens already, or a map whose channels come first or last."""
    if features.ndim == 3:
        return features
    return features.flatten(1, 2) if str(layout).endswith("NHWC") else features.flatten(2).transpose(1, 2)
