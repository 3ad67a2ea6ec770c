"""An image tower from timm."""

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.timm_model import TimmModel
from torch import Tensor, nn

from .base import ImageTower, Tokens


class TimmTower(ImageTower):
    """An image tower from timm. Its tokens are the flattened last feature map, or the tokens that the trunk pools."""

    backbone = ("trunk",)
    pooling = ("visual.head.", *(f"visual.trunk.{part}." for part in ("head", "attn_pool", "fc_norm")))

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(model.visual, TimmModel)

    @property
    def width(self) -> int:
        return self.holder.trunk.num_features

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks of a transformer; other trunks have stages, under many names."""
        blocks = getattr(self.holder.trunk, "blocks", ())
        return list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else ()

    @property
    def size(self) -> None:
        return None  # some trunks take any size, and the others raise their own error

    @property
    def dtype(self) -> torch.dtype:
        return next(self.holder.trunk.parameters()).dtype

    def tokens(self, batch: Tensor) -> Tokens:
        trunk = self.holder.trunk
        features = trunk.forward_features(batch)
        return Tokens(_flatten(features, getattr(trunk, "output_fmt", "NCHW")), features=features)

    def mean(self, tokens: Tokens) -> Tensor:
        visual = self.holder
        return visual.head(visual.trunk.forward_head(tokens.features))

    def drop_pooling(self) -> None:
        visual = self.holder
        if not has_tokens(visual):
            raise ValueError(
                f"pcmepp_cfg.pool 'gpo' needs a tower with tokens, and {type(visual.trunk).__name__} of timm has none: "
                "set it to 'tower'."
            )
        visual.trunk.reset_classifier(0, "")
        visual.head = nn.Sequential()
        if isinstance(getattr(visual.trunk, "fc_norm", None), nn.Module):
            visual.trunk.fc_norm = nn.Identity()


def has_tokens(visual: Any) -> bool:
    """Return whether a trunk is a transformer over tokens, not over maps."""
    return hasattr(visual.trunk, "num_prefix_tokens")


def set_image_size(visual: Any) -> None:
    """Give a trunk that is built for one size of images the size of the model's config.

    open_clip builds it for timm's default, and resizes it only after the weights are loaded and only where the size is
    forced; a model that was trained at another size could not be loaded by its config."""
    size, built = tuple(visual.image_size), _built_size(visual)
    if built is not None and built != size:
        visual.trunk.set_input_size(size)


def take_size_of(visual: Any, state_dict: dict) -> None:
    """Give a trunk timm's default size if a file's tensors fit only that; `set_image_size` then resizes what is loaded.

    Arguments:
        state_dict: the tensors of the whole model.
    """
    size, default = _built_size(visual), tuple(getattr(visual.trunk, "default_cfg", {}).get("input_size", ())[1:])
    if size is None or not default or size == default or _fits(visual, state_dict):
        return
    visual.trunk.set_input_size(default)
    if not _fits(visual, state_dict):
        visual.trunk.set_input_size(size)


def _built_size(visual: Any) -> tuple[int, ...] | None:
    """Return the size that a trunk is built for, or None where it takes any or cannot be resized."""
    size = getattr(getattr(visual.trunk, "patch_embed", None), "img_size", None)
    return tuple(size) if size is not None and hasattr(visual.trunk, "set_input_size") else None


def _fits(visual: Any, state_dict: dict) -> bool:
    saved = {name: state_dict.get(f"visual.trunk.{name}", tensor) for name, tensor in visual.trunk.state_dict().items()}
    return all(saved[name].shape == tensor.shape for name, tensor in visual.trunk.state_dict().items())


def _flatten(features: Tensor, layout: str) -> Tensor:
    """Flatten a trunk's output to tokens [N, L, C], from tokens or from a map whose channels come first or last."""
    if features.ndim == 3:
        return features
    return features.flatten(1, 2) if str(layout).endswith("NHWC") else features.flatten(2).transpose(1, 2)
