"""open_clip's own image transformer."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from .base import AVERAGE, Average, ImageTower, SplitTower, Tokens
from .blocks import PARTS


class VisionTransformerTower(ImageTower, SplitTower):
    """open_clip's image transformer. It pools the class token, the average of the others, or all by attention."""

    projection, bias = "uncertainty_proj", "uncertainty_bias"
    backbone = (
        *("conv1", "class_embedding", "positional_embedding", "ln_pre"),
        *("transformer", "attn_pool", "ln_post"),
    )
    pooling = ("visual.proj", "visual.ln_post.", "visual.attn_pool.")
    parts = (
        *("visual.transformer.resblocks", "visual.transformer.grad_checkpointing", "visual.transformer.width"),
        *("visual.proj", "visual.image_size", "visual.conv1.weight"),
        *("visual.pool_type", "visual.attn_pool", "visual.ln_pre", "visual.ln_post"),
        *("visual.class_embedding", "visual.positional_embedding"),
        *(f"visual.transformer.resblocks.0.{part}" for part in PARTS),
    )

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(model.visual, VisionTransformer)

    @property
    def transformer(self) -> Any:
        return self.model.visual.transformer

    @property
    def pools_one_token(self) -> bool:  # type: ignore[override]
        return self.model.visual.pool_type == "tok" and self.model.visual.attn_pool is None

    def embed(self, batch: Tensor) -> Tokens:
        return Tokens(self.model.visual._embeds(batch))

    def token(self, tokens: Tokens) -> Tensor | Average | None:
        return AVERAGE if self.model.visual.pool_type == "avg" and self.model.visual.attn_pool is None else None

    def pool(self, x_NLC: Tensor) -> Tensor:
        visual = self.model.visual
        pooled_NC, _ = visual._pool(x_NLC)
        return pooled_NC if visual.proj is None else pooled_NC @ visual.proj

    def mean(self, tokens: Tokens) -> Tensor:
        return self.pool(tokens.x_NLC)

    def drop_pooling(self) -> None:
        visual = self.model.visual
        visual.proj = visual.attn_pool = None
        visual.ln_post = nn.Identity()

    @contextlib.contextmanager
    def lockable(self) -> Iterator[None]:
        visual, dropped = self.model.visual, self.model.visual.proj is None
        if dropped:
            visual.proj = nn.Parameter(torch.empty(0))  # open_clip lists it among what may stay unlocked
        try:
            yield
        finally:
            if dropped:
                visual.proj = None
