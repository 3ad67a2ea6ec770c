"""The log-variance branch on top of a tower: a small head on the tokens, or the feature map, that the tower pools.

A learned query attends to the tokens, in `head_layers` blocks of attention and MLP for this one query, and is projected
to the log-variances. Attention of a single query needs no keys and values (see
`attend`), so that the head takes
less than 1 % of the compute of a tower, whatever the tower is.

    tower up to its pooling -+-> its own pooling, projection                -> mean
                             +-> query blocks over all tokens -> projection -> logvar
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..host.towers.base import Tokens
from ..host.towers.blocks import attend
from .branch import Branch, logvar_of, new_bias, new_projection

HEAD_WIDTH = 64  # the width of an attention head, if the model's width allows it


class TopBranch(Branch):
    """The log-variance branch that is a small head on the tokens which the tower pools."""

    attribute = "uncertainty_head"

    def build(self, embed_dim: int, new_blocks: Any, built: dict) -> None:
        head = TokenHead(self.tower.width, embed_dim, self.cfg.head_layers, self.cfg.init_logvar_bias)
        setattr(self.tower.holder, self.attribute, head)

    @property
    def bias(self) -> nn.Parameter | None:
        return self.body.bias

    def logvar(self, tokens: Tokens) -> Tensor:
        return self.body(tokens.x_NLC, self.tower.valid(tokens))


class TokenHead(nn.Module):
    """The head that turns tokens [N, L, C] into log-variances [N, D].

    Arguments:
        width: C.
        embed_dim: D, which is also the width of the query.
        layers: the number of blocks.
        init_logvar_bias: the initial value of the bias, or None for no bias.
    """

    def __init__(self, width: int, embed_dim: int, layers: int, init_logvar_bias: float | None):
        super().__init__()
        self.query = nn.Parameter(embed_dim**-0.5 * torch.randn(embed_dim))
        self.ln_tokens = HeadNorm(width)
        self.blocks = nn.ModuleList([QueryBlock(width, embed_dim) for _ in range(layers)])
        self.proj = new_projection(embed_dim, embed_dim)
        self.bias = new_bias(init_logvar_bias, embed_dim)

    def get_cast_dtype(self) -> torch.dtype:
        """Return the dtype that the blocks compute in, as transformers of open_clip do."""
        first = self.blocks[0]
        assert isinstance(first, QueryBlock)
        return first.key.weight.dtype

    def forward(self, x_NLC: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """Return log-variances, [N, D], fp32.

        Arguments:
            valid_NL: which tokens count, or None for all.
        """
        dtype = self.get_cast_dtype()
        x_NLC = self.ln_tokens(x_NLC, dtype)
        mask_NL = None
        if valid_NL is not None:
            mask_NL = torch.zeros_like(valid_NL, dtype=torch.float32).masked_fill_(~valid_NL, -1e4)  # fits 16 bit
        query_ND = self.query.to(dtype).expand(x_NLC.shape[0], -1)
        for block in self.blocks:
            query_ND = block(query_ND, x_NLC, mask_NL)
        return logvar_of(query_ND, self.proj, self.bias)


class QueryBlock(nn.Module):
    """A transformer block for one query [N, D], which attends to tokens [N, L, C]."""

    def __init__(self, width: int, embed_dim: int):
        super().__init__()
        self.heads = attention_heads(embed_dim)
        self.ln_1 = HeadNorm(embed_dim)
        self.q = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(width, embed_dim, bias=False)  # a bias of the keys would change nothing
        self.value = nn.Linear(width, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)
        self.ln_2 = HeadNorm(embed_dim)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, query_ND: Tensor, x_NLC: Tensor, mask_NL: Tensor | None) -> Tensor:
        dtype = self.key.weight.dtype
        q_HNE = self.q(self.ln_1(query_ND, dtype)).unflatten(1, (self.heads, -1)).transpose(0, 1)
        attended_ND = attend(q_HNE, self.key.weight, self.value.weight, x_NLC, mask_NL)
        query_ND = query_ND + self.out(attended_ND + self.value.bias)
        return query_ND + self.mlp(self.ln_2(query_ND, dtype))


class HeadNorm(nn.LayerNorm):
    """A layer norm in fp32 under any precision, whose output has the dtype that the next layer takes."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        normed = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(dtype)


def attention_heads(width: int) -> int:
    """Return the number of heads, each of 64 channels or of the next larger width that divides `width`."""
    return next(heads for heads in range(max(1, width // HEAD_WIDTH), 0, -1) if width % heads == 0)
