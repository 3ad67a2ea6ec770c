"""open_clip's own text transformer, which is a part of a CLIP and a module of a CustomTextCLIP."""

from typing import Any, ClassVar

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from .base import SplitTower, Tokens, check_text
from .blocks import pick


class TextTransformerTower(SplitTower):
    """open_clip's text transformer. It pools one token: the first, the last, EOT, or an additional one at the end."""

    projection, bias = "uncertainty_text_projection", "uncertainty_text_bias"
    backbone: ClassVar[tuple[str, ...]] = ("token_embedding", "positional_embedding", "transformer", "ln_final")
    pool_type: str
    eos_id: int

    @property
    def may_be_cut(self) -> bool:  # type: ignore[override]
        """Return whether padding changes nothing: no token sees later ones, and the last one is not pooled."""
        return self.holder.attn_mask is not None and self.pool_type != "last"

    def check(self, batch: Any) -> None:
        length = self.holder.context_length
        check_text(batch, length)
        if batch.shape[1] != length and not self.may_be_cut:
            raise ValueError(
                f"This model reads the padding too, so that texts cannot be cut: pad them to {length} tokens."
            )

    def embed(self, batch: Tensor) -> Tokens:
        dtype = self.transformer.get_cast_dtype()
        x_NLC = self.holder.token_embedding(batch).to(dtype)
        return Tokens(x_NLC + self.holder.positional_embedding[: batch.shape[1]].to(dtype), batch)

    def mask(self, tokens: Tokens) -> Tensor | None:
        length = tokens.x_NLC.shape[1]
        return None if self.holder.attn_mask is None else self.holder.attn_mask[:length, :length]

    def token(self, tokens: Tokens) -> Tensor | None:
        text_NL = tokens.text_NL
        assert text_NL is not None
        if self.pool_type == "first":
            return None
        if self.pool_type == "last":
            return torch.full_like(text_NL[:, 0], tokens.x_NLC.shape[1] - 1)
        ids_NL = text_NL if self.pool_type == "argmax" else (text_NL == self.eos_id).int()
        return ids_NL.argmax(dim=-1)

    def lengths(self, text_NL: Tensor) -> Tensor:
        if not self.may_be_cut:
            return torch.full_like(text_NL[:, 0], text_NL.shape[1])
        token_N = self.token(Tokens(text_NL, text_NL))
        return torch.ones_like(text_NL[:, 0]) if token_N is None else token_N + 1

    def valid(self, tokens: Tokens) -> Tensor | None:
        if not self.may_be_cut:
            return None
        assert tokens.text_NL is not None
        place_L = torch.arange(tokens.x_NLC.shape[1], device=tokens.x_NLC.device)
        return place_L < self.lengths(tokens.text_NL)[:, None]

    def pool(self, x_NLC: Tensor) -> Tensor:
        x_NC = self.holder.ln_final(x_NLC).squeeze(1)
        projection = self.holder.text_projection
        if projection is None:
            return x_NC
        return projection(x_NC) if isinstance(projection, nn.Linear) else x_NC @ projection

    def drop_pooling(self) -> None:
        self.holder.text_projection = None

    def normed(self, x_NLC: Tensor) -> Tensor:
        return self.holder.ln_final(x_NLC)

    def mean(self, tokens: Tokens) -> Tensor:
        return self.pool(pick(tokens.x_NLC, self.token(tokens)))


class ClipTextTower(TextTransformerTower):
    """The text tower of a CLIP, whose parts are attributes of the model itself."""

    pooling = ("text_projection",)

    def __init__(self, model: Any):
        super().__init__(model)
        self.pool_type, self.eos_id, self.pad_id = model.text_pool_type, model.text_eos_id, 0

    @staticmethod
    def fits(model: Any) -> bool:
        return not hasattr(model, "text")


class CustomTextTower(TextTransformerTower):
    """The text tower of a CustomTextCLIP. With `embed_cls` an additional token is appended and pooled."""

    backbone = (*TextTransformerTower.backbone, "cls_emb")
    pooling = ("text.text_projection",)

    def __init__(self, model: Any):
        text = model.text
        super().__init__(text)
        self.pool_type, self.eos_id, self.pad_id = text.pool_type, text.eos_id, text.pad_id
        if text.cls_emb is not None:
            self.pool_type = "last"

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(getattr(model, "text", None), TextTransformer)

    def embed(self, batch: Tensor) -> Tokens:
        return super().embed(batch) if self.holder.cls_emb is None else Tokens(self.holder._embeds(batch)[0], batch)

    def mask(self, tokens: Tokens) -> Tensor | None:
        text = self.holder
        if text.cls_emb is None:
            return super().mask(tokens)
        assert tokens.text_NL is not None
        length = tokens.x_NLC.shape[1]
        padding = text._build_additive_mask(tokens.text_NL, length, tokens.x_NLC.dtype)
        return padding if text.attn_mask is None else text.attn_mask[:length, :length] + padding
