"""How a tower's tokens become two embeddings at less than CLIP's cost.

CLIP reads one token of a tower's last block: CLS of the image, EOT of the text. So that block needs query, output
projection and MLP of that one token only, and no keys and values at all (see `single_query_attention`). Both
branches of a PCME++ tower, mean and log-variance, end in such a block:

    embeddings -> shared blocks -+-> mean blocks   -> last block for one token -> norm, projection -> mean
                                 +-> logvar blocks -> last block for one token -> projection       -> logvar

Nothing here knows open_clip: its blocks are passed in, and taken apart by `host.towers.parts_of`.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..host.towers import Stack, parts_of


def run_blocks(stack: Stack, x_NLC: Tensor, mask_LL: Tensor | None) -> Tensor:
    """All tokens through all blocks."""
    return _run(stack.blocks, x_NLC, mask_LL, stack.recompute)


def _run(blocks: Iterable[nn.Module], x_NLC: Tensor, mask_LL: Tensor | None, recompute: bool) -> Tensor:
    for block in blocks:
        if recompute:
            x_NLC = checkpoint(block, x_NLC, attn_mask=mask_LL, use_reentrant=False)
        else:
            x_NLC = block(x_NLC, attn_mask=mask_LL)
    return x_NLC


def pool_last_block(stack: Stack, x_NLC: Tensor, token_N: Tensor | None, mask_LL: Tensor | None) -> Tensor:
    """The output of the blocks for one token per sample, [N, 1, C]; the last block is computed for that token alone.

    Arguments:
        token_N: the index of the token to read, or None for the first one of every sample.
        mask_LL: the additive attention mask, or None.
    """
    *full, last = stack.blocks
    x_NLC = _run(full, x_NLC, mask_LL, stack.recompute)
    if stack.recompute:
        return checkpoint(_last_block, last, x_NLC, token_N, mask_LL, use_reentrant=False)
    return _last_block(last, x_NLC, token_N, mask_LL)


def _last_block(block: nn.Module, x_NLC: Tensor, token_N: Tensor | None, mask_LL: Tensor | None) -> Tensor:
    parts = parts_of(block)
    if parts is None:  # a block of another kind: compute all tokens, read one
        return _pick(block(x_NLC, attn_mask=mask_LL), token_N)
    normed_NLC = parts.norm_1(x_NLC)
    mask_NL = None
    if mask_LL is not None:
        mask_NL = mask_LL[:1].expand(x_NLC.shape[0], -1) if token_N is None else mask_LL[token_N]
    attended_N1C = single_query_attention(parts.attention, _pick(normed_NLC, token_N), normed_NLC, mask_NL)
    x_N1C = _pick(x_NLC, token_N) + parts.scale_1(attended_N1C)
    return x_N1C + parts.scale_2(parts.mlp(parts.norm_2(x_N1C)))


def single_query_attention(
    attn: nn.MultiheadAttention, query_N1C: Tensor, x_NLC: Tensor, mask_NL: Tensor | None
) -> Tensor:
    """Attention of one token per sample to all of its tokens, [N, 1, C], as `attn` gives it, at a fraction of the cost.

    For a single query q of a head, matrix products may be taken in another order, which spares the keys K x and the
    values V x of every token x, 2 L C^2 products, for 2 C^2 + 2 H L C; p sums to 1, and what is added to all logits of
    a query, such as the bias of the keys, changes no p:

        p = softmax_l(q . (K x_l + k)) = softmax_l((K^T q) . x_l)        sum_l p_l (V x_l + v) = V (sum_l p_l x_l) + v
    """
    heads, width = attn.num_heads, attn.head_dim
    weight_q, weight_k, weight_v = attn.in_proj_weight.chunk(3)
    bias_q, _, bias_v = attn.in_proj_bias.chunk(3)
    q_HNE = F.linear(query_N1C.squeeze(1), weight_q, bias_q).unflatten(1, (heads, width)).transpose(0, 1)
    key_NHC = (q_HNE * width**-0.5 @ weight_k.unflatten(0, (heads, width))).transpose(0, 1)
    logits_NHL = key_NHC @ x_NLC.transpose(1, 2)
    if mask_NL is not None:
        logits_NHL = logits_NHL + mask_NL[:, None].to(logits_NHL.dtype)
    mixed_NHC = logits_NHL.softmax(dim=-1) @ x_NLC
    value_HNE = mixed_NHC.transpose(0, 1) @ weight_v.unflatten(0, (heads, width)).transpose(1, 2)
    return attn.out_proj(value_HNE.transpose(0, 1).flatten(1) + bias_v).unsqueeze(1)


def _pick(x_NLC: Tensor, token_N: Tensor | None) -> Tensor:
    if token_N is None:
        return x_NLC[:, :1]
    return x_NLC[torch.arange(x_NLC.shape[0], device=x_NLC.device), token_N].unsqueeze(1)
