"""A text tower from Hugging Face's transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from open_clip.hf_configs import arch_dict
from open_clip.hf_model import HFTextEncoder
from torch import Tensor, nn

from .base import Tokens, Tower, check_text


class HuggingFaceTower(Tower):
    """A text tower from transformers. Its tokens are the last hidden state; those of the padding do not count.

    Texts are not cut: results would be equal up to rounding, but the tower is called as open_clip calls it.
    """

    backbone = ("transformer",)
    pooling = ("text.proj.", "text.transformer.pooler.")

    @staticmethod
    def fits(model: Any) -> bool:
        return isinstance(getattr(model, "text", None), HFTextEncoder)

    def __init__(self, model: Any):
        super().__init__(model.text)
        self.pad_id = model.text.config.pad_token_id

    @property
    def width(self) -> int:
        config = self.holder.config
        return getattr(config, "d_model", None) or config.hidden_size

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks by the name of their attribute that open_clip knows for locking layers."""
        transformer, kind = self.holder.transformer, self.holder.config.model_type
        name = arch_dict.get(kind, {}).get("config_names", {}).get("layer_attr", "")
        blocks = getattr(getattr(transformer, "encoder", transformer), name, ())
        return list(blocks) if isinstance(blocks, nn.ModuleList) else ()

    def check(self, batch: Any) -> None:
        check_text(batch, None)

    def tokens(self, batch: Tensor) -> Tokens:
        mask_NL = (batch != self.pad_id).long()
        output = self.holder.transformer(input_ids=batch, attention_mask=mask_NL)
        return Tokens(output.last_hidden_state, batch, output)

    def mean(self, tokens: Tokens) -> Tensor:
        text = self.holder
        assert tokens.text_NL is not None
        return text.proj(text.pooler(tokens.features, (tokens.text_NL != self.pad_id).long()))

    def drop_pooling(self) -> None:
        text = self.holder
        text.proj = nn.Identity()
        if getattr(text.transformer, "pooler", None) is not None:
            text.transformer.pooler = None

    def lengths(self, text_NL: Tensor) -> Tensor:
        place_L = torch.arange(1, text_NL.shape[1] + 1, device=text_NL.device)
        return ((text_NL != self.pad_id) * place_L).amax(dim=1)

    def valid(self, tokens: Tokens) -> Tensor:
        assert tokens.text_NL is not None
        return tokens.text_NL != self.pad_id
