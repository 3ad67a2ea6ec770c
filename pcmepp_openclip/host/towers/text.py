"""open_clip's own text transformer, which is a part of a CLIP and a module of a CustomTextCLIP."""

from typing import Any, ClassVar

import torch
from open_clip.transformer import TextTransformer
from torch import Tensor, nn

from .base import SplitTower, Tokens, check_text
from .blocks import PARTS

_TEXT_PARTS = (
    *("transformer.resblocks", "transformer.grad_checkpointing", "transformer.width", "transformer.get_cast_dtype"),
    *("token_embedding", "positional_embedding", "ln_final", "text_projection", "attn_mask", "context_length"),
    *(f"transformer.resblocks.0.{part}" for part in PARTS),
)


class TextTransformerTower(SplitTower):
    """open_clip's text transformer. It pools one token: the first, the last, EOT, or an additional one at the end."""

    projection, bias = "uncertainty_text_projection", "uncertainty_text_bias"
    backbone: ClassVar[tuple[str, ...]] = ("token_embedding", "positional_embedding", "transformer", "ln_final")
    pools_one_token = True

    @property
    def transformer(self) -> Any:
        return self.holder.transformer

    @property
    def pool_type(self) -> str:
        raise NotImplementedError

    @property
    def eos_id(self) -> int:
        raise NotImplementedError

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def may_be_cut(self) -> bool:
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
        x_NLC, token_N = tokens.x_NLC, self.token(tokens)
        if token_N is None:
            return self.pool(x_NLC[:, :1])
        return self.pool(x_NLC[torch.arange(x_NLC.shape[0], device=x_NLC.device), token_N].unsqueeze(1))


class ClipTextTower(TextTransformerTower):
    """The text tower of a CLIP, whose parts are attributes of the model itself."""

    parts = (*_TEXT_PARTS, "text_pool_type", "text_eos_id")
    pooling = ("text_projection",)

    @staticmethod
    def fits(model: Any) -> bool:
        return not hasattr(model, "text")

    @property
    def holder(self) -> Any:
        return self.model

    @property
    def pool_type(self) -> str:
        return self.model.text_pool_type

    @property
    def eos_id(self) -> int:
        return self.model.text_eos_id


class CustomTextTower(TextTransformerTower):
    """The text tower of a CustomTextCLIP. With `embed_cls` an additional token is appended and pooled."""

    parts = tuple(f"text.{part}" for part in (*_TEXT_PARTS, "pool_type", "eos_id", "pad_id", "cls_emb"))
    backbone = (*TextTransformerTower.backbone, "cls_emb")
    pooling = ("text.text_projection",)

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(getattr(model, "text", None), TextTransformer)

    @property
    def holder(self) -> Any:
        return self.model.text

    @property
    def pool_type(self) -> str:
        return "last" if self.model.text.cls_emb is not None else self.model.text.pool_type

    @property
    def eos_id(self) -> int:
        return self.model.text.eos_id

    @property
    def pad_id(self) -> int:
        return self.model.text.pad_id

    def embed(self, batch: Tensor) -> Tokens:
        if self.model.text.cls_emb is None:
            return super().embed(batch)
        return Tokens(self.model.text._embeds(batch)[0], batch)

    def mask(self, tokens: Tokens) -> Tensor | None:
        text = self.model.text
        if text.cls_emb is None:
            return super().mask(tokens)
        assert tokens.text_NL is not None
        length = tokens.x_NLC.shape[1]
        padding = text._build_additive_mask(tokens.text_NL, length, tokens.x_NLC.dtype)
        return padding if text.attn_mask is None else text.attn_mask[:length, :length] + padding
