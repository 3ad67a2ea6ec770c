"""The blocks of open_clip's own transformers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower, _build_vision_tower
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

PARTS = ("attn", "ln_1", "ls_1", "ln_2", "ls_2", "mlp")  # these attributes of a block are used


@dataclass(frozen=True)
class Stack:
    """Consecutive blocks; with `recompute`, their activations are recomputed in the backward pass."""

    blocks: Sequence[nn.Module]
    recompute: bool

    @classmethod
    def of(cls, transformer: Any, start: int | None = None, stop: int | None = None) -> "Stack":
        """Return the blocks `start` to `stop` of a transformer."""
        return cls(transformer.resblocks[start:stop], transformer.grad_checkpointing)


def set_recompute(transformer: Any, enable: bool) -> None:
    transformer.grad_checkpointing = enable


@dataclass(frozen=True)
class BlockParts:
    """The parts of a residual attention block: x + scale_1(attention(norm_1(x))), then x + scale_2(mlp(norm_2(x)))."""

    norm_1: nn.Module
    attention: nn.MultiheadAttention
    scale_1: nn.Module
    norm_2: nn.Module
    mlp: nn.Module
    scale_2: nn.Module


def parts_of(block: Any) -> BlockParts | None:
    """Return the parts of a block, or None for open_clip's custom blocks (qk_norm, ...), which stay whole."""
    if type_before_parametrizations(block.attn) is not nn.MultiheadAttention:  # LoRA makes a subclass
        return None
    return BlockParts(block.ln_1, block.attn, block.ls_1, block.ln_2, block.mlp, block.ls_2)


def image_blocks(
    vision_cfg: Any,
    layers: int,
    quick_gelu: bool,
    cast_dtype: torch.dtype | None,
    size: tuple[int, int] | None = None,
) -> Any:
    """Return an untrained transformer of `layers` blocks of the kind that the image tower of the config has.

    Arguments:
        size: width and number of heads of plain blocks, for a tower whose blocks are not open_clip's.
    """
    if size is not None:
        return _plain_blocks(size, layers, quick_gelu, cast_dtype)
    cfg = copy.copy(as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg"))
    cfg.layers, cfg.attentional_pool = layers, False  # only the blocks are kept
    return _build_vision_tower(1, cfg, quick_gelu, cast_dtype).transformer


def text_blocks(
    text_cfg: Any,
    layers: int,
    quick_gelu: bool,
    cast_dtype: torch.dtype | None,
    size: tuple[int, int] | None = None,
) -> Any:
    """Return an untrained transformer like that of `image_blocks`, of the kind that the text tower has."""
    if size is not None:
        return _plain_blocks(size, layers, quick_gelu, cast_dtype)
    cfg = copy.copy(as_cfg(CLIPTextCfg, text_cfg, "text_cfg"))
    cfg.layers, cfg.vocab_size, cfg.context_length = layers, 1, 1
    return _build_text_tower(1, cfg, quick_gelu, cast_dtype).transformer


def _plain_blocks(size: tuple[int, int], layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    return text_blocks(CLIPTextCfg(width=size[0], heads=size[1]), layers, quick_gelu, cast_dtype)


def pair(size: Any) -> list:
    """Return height and width of a size that is one number for both, or two."""
    return list(size) if isinstance(size, (list, tuple)) else [size, size]


def as_cfg(kind: type, cfg: Any, block: str) -> Any:
    """Return the block of a tower in a model config as open_clip's own dataclass."""
    try:
        return kind(**cfg) if isinstance(cfg, dict) else cfg
    except TypeError as error:
        raise ValueError(f"{block} of the model config: {error}") from None
