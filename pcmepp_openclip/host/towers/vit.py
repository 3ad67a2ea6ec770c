"""open_clip's own image transformer."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

from .base import ImageTower, SplitTower, Tokens
from .blocks import AVERAGE, Average


class VisionTransformerTower(ImageTower, SplitTower):
    """open_clip's image transformer. It pools the class token, the average of the others, or all by attention."""

    projection, bias = "uncertainty_proj", "uncertainty_bias"
    backbone = (
        *("conv1", "class_embedding", "positional_embedding", "ln_pre"),
        *("transformer", "attn_pool", "ln_post"),
    )
    pooling = ("visual.proj", "visual.ln_post.", "visual.attn_pool.")

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(model.visual, VisionTransformer)

    @property
    def pools_one_token(self) -> bool:
        return self.holder.pool_type == "tok" and self.holder.attn_pool is None

    def embed(self, batch: Tensor) -> Tokens:
        return Tokens(self.holder._embeds(batch))

    def token(self, tokens: Tokens) -> Tensor | Average | None:
        return AVERAGE if self.holder.pool_type == "avg" and self.holder.attn_pool is None else None

    def pool(self, x_NLC: Tensor) -> Tensor:
        visual = self.holder
        pooled_NC, _ = visual._pool(x_NLC)
        return pooled_NC if visual.proj is None else pooled_NC @ visual.proj

    def mean(self, tokens: Tokens) -> Tensor:
        return self.pool(tokens.x_NLC)

    def drop_pooling(self) -> None:
        visual = self.holder
        visual.proj = visual.attn_pool = None
        visual.ln_post = nn.Identity()

    @contextlib.contextmanager
    def lockable(self) -> Iterator[None]:
        visual, dropped = self.holder, self.holder.proj is None
        if dropped:
            visual.proj = nn.Parameter(torch.empty(0))  # open_clip lists it among what may stay unlocked
        try:
            yield
        finally:
            if dropped:
                visual.proj = None
