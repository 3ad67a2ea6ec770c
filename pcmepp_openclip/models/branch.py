"""The interface of a log-variance branch, which computes the mean and the log-variance from a tower's tokens.

`attend` makes both cheap. For a single query q of a head, matrix products may be taken in another order, which spares
the keys K x and the values V x of every token x, 2 L C^2 products, for 2 C^2 + 2 H L C; p sums to 1, and what is added
to all logits of a query, such as the bias of the keys, changes no p:

    p = softmax_l(q . (K x_l + k)) = softmax_l((K^T q) . x_l)        sum_l p_l (V x_l + v) = V (sum_l p_l x_l) + v

E is the width of a head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..gaussian import full_precision
from ..host.towers import Tokens, Tower


class Branch:
    """The log-variance branch of a tower. It holds no tensors: they are attributes of the tower's own modules.

    Arguments:
        tower: the tower, of any kind.
        cfg: the settings of the model.
    """

    def __init__(self, tower: Tower, cfg: PCMEppCfg):
        self.tower, self.cfg = tower, cfg

    def build(self, embed_dim: int, new_blocks: Callable[..., Any]) -> None:
        """Add the tensors of the branch to the tower.

        Arguments:
            new_blocks: a function that makes a new transformer of `head_layers` blocks, of the tower's kind if that is
                one of open_clip's own; with `size`, the width and the number of heads, a transformer of plain blocks.
        """
        raise NotImplementedError

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules of the branch, which are trained if the tower is frozen."""
        raise NotImplementedError

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the bias of the log-variances, [D], if there is one."""
        raise NotImplementedError

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Return the copies of a tower's blocks that the branch consists of, or () if it is a head of its own."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tokens that the branch reads."""
        raise NotImplementedError

    def set_recompute(self, enable: bool) -> None:
        """Set whether activations of the branch are recomputed in the backward pass."""

    def tokens(self, batch: Tensor) -> Tokens:
        """Return the tokens of images or token ids that the mean and the log-variance are computed from."""
        raise NotImplementedError

    def mean(self, tokens: Tokens) -> Tensor:
        """Return the output of the stock tower, or GPO of its tokens, [N, D]."""
        raise NotImplementedError

    def logvar(self, tokens: Tokens) -> Tensor:
        """Return log-variances, [N, D], fp32."""
        raise NotImplementedError


def new_projection(width: int, embed_dim: int) -> nn.Parameter:
    # It is random, not zero: the loss sees the dimensions only through sums, so equal ones would stay equal.
    return nn.Parameter(width**-0.5 * torch.randn(width, embed_dim))


def new_bias(value: float | None, embed_dim: int) -> nn.Parameter | None:
    return None if value is None else nn.Parameter(torch.full((embed_dim,), float(value)))


def logvar_of(x_NC: Tensor, projection_CD: Tensor, bias_D: Tensor | None) -> Tensor:
    """Return the projection plus the bias in fp32 at any precision. In bf16, a log-variance of -10 is right to 3 %."""
    with full_precision(x_NC):
        logvar_ND = x_NC.float() @ projection_CD.float()
        return logvar_ND if bias_D is None else logvar_ND + bias_D.float()


# Attention of a single query per sample.


def single_query_attention(
    attn: nn.MultiheadAttention, query_N1C: Tensor, x_NLC: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the attention of one token per sample to all of its tokens, [N, 1, C], as `attn` gives it.

    Arguments:
        mask: what is added to the logits, [N, L] or [N, H, L], or None.
    """
    heads, width = attn.num_heads, attn.head_dim
    weight_q, weight_k, weight_v = attn.in_proj_weight.chunk(3)
    bias_q, _, bias_v = attn.in_proj_bias.chunk(3)
    q_HNE = F.linear(query_N1C.squeeze(1), weight_q, bias_q).unflatten(1, (heads, width)).transpose(0, 1)
    value_NC = attend(q_HNE, weight_k, weight_v, x_NLC, mask)
    return attn.out_proj(value_NC + bias_v).unsqueeze(1)


def attend(q_HNE: Tensor, weight_k: Tensor, weight_v: Tensor, x_NLC: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values that the queries attend to, without the bias of the values, [N, H * E].

    Arguments:
        weight_k, weight_v: [H * E, C].
        mask: see above.
    """
    heads, _, width = q_HNE.shape
    key_NHC = (q_HNE * width**-0.5 @ weight_k.unflatten(0, (heads, width))).transpose(0, 1)
    logits_NHL = key_NHC @ x_NLC.transpose(1, 2)
    if mask is not None:
        logits_NHL = logits_NHL + (mask[:, None] if mask.ndim == 2 else mask).to(logits_NHL.dtype)
    mixed_NHC = logits_NHL.softmax(dim=-1) @ x_NLC
    value_HNE = mixed_NHC.transpose(0, 1) @ weight_v.unflatten(0, (heads, width)).transpose(1, 2)
    return value_HNE.transpose(0, 1).flatten(1)
