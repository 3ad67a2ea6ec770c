"""open_clip's own ResNet, which OpenAI's CLIP has."""

from typing import Any

from open_clip.modified_resnet import ModifiedResNet
from torch import Tensor

from .base import ImageTower, Tokens

RESNET_HAS_NO_TOKENS = "pcmepp_cfg.pool 'gpo' needs a tower with tokens, and a ResNet has none: set it to 'tower'."


class ResNetTower(ImageTower):
    """open_clip's ResNet. Its tokens are the flattened last feature map, which the tower itself pools by attention."""

    backbone = (
        *("conv1", "bn1", "conv2", "bn2", "conv3", "bn3"),
        *("layer1", "layer2", "layer3", "layer4"),
    )

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(model.visual, ModifiedResNet)

    @property
    def width(self) -> int:
        return self.holder.attnpool.c_proj.in_features

    def tokens(self, batch: Tensor) -> Tokens:
        visual = self.holder
        features = visual.stem(batch)
        for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
            features = layer(features)
        return Tokens(features.flatten(2).transpose(1, 2), features=features)

    def drop_pooling(self) -> None:
        raise ValueError(RESNET_HAS_NO_TOKENS)

    def mean(self, tokens: Tokens) -> Tensor:
        return self.holder.attnpool(tokens.features)
