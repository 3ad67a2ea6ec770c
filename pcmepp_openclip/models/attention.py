"""Attention of a single query per sample, at a fraction of its usual cost.

For a single query q of a head, matrix products may be taken in another order, which spares the keys K x and the
values V x of every token x, 2 L C^2 products, for 2 C^2 + 2 H L C; p sums to 1, and what is added to all logits of
a query, such as the bias of the keys, changes no p:

    p = softmax_l(q . (K x_l + k)) = softmax_l((K^T q) . x_l)        sum_l p_l (V x_l + v) = V (sum_l p_l x_l) + v

E is the width of a head.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def single_query_attention(
    attn: nn.MultiheadAttention, query_N1C: Tensor, x_NLC: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the attention of one token per sample to all of its tokens, [N, 1, C], as `attn` computes it.

    Arguments:
        mask: a term that is added to the logits, [N, L] or [N, H, L], or None.
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
