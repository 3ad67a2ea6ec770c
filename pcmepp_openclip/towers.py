"""How a tower's tokens become two embeddings at less than CLIP's cost.

CLIP reads one token of a tower's last block: CLS of the image, EOT of the text. So that block needs keys and
values of all tokens, but queries, output projection and MLP of that one token only. Both branches of a PCME++
tower, mean and log-variance, end in such a block:

    embeddings -> shared blocks -+-> mean blocks  -> last block for one token -> norm, projection -> mean
                                 +-> sigma blocks -> last block for one token -> projection       -> logvar

Nothing here imports open_clip: blocks are its `ResidualAttentionBlock`s, passed in.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def run_blocks(blocks: Iterable[nn.Module], x_NLC: Tensor, mask_LL: Tensor | None, recompute: bool) -> Tensor:
    """All tokens through all blocks; with `recompute`, activations are recomputed in the backward pass."""
    for block in blocks:
        if recompute:
            x_NLC = checkpoint(block, x_NLC, attn_mask=mask_LL, use_reentrant=False)
        else:
            x_NLC = block(x_NLC, attn_mask=mask_LL)
    return x_NLC


def read_token(
    blocks: Sequence[nn.Module], x_NLC: Tensor, token_N: Tensor | None, mask_LL: Tensor | None, recompute: bool
) -> Tensor:
    """One token a sample of what `blocks` give, [N, 1, C]; the last block is computed for that token alone.

    Arguments:
        token_N: the index of the token to read, or None for the first one of every sample.
        mask_LL: the additive attention mask, or None.
    """
    *full, last = blocks
    x_NLC = run_blocks(full, x_NLC, mask_LL, recompute)
    if recompute:
        return checkpoint(_last_block, last, x_NLC, token_N, mask_LL, use_reentrant=False)
    return _last_block(last, x_NLC, token_N, mask_LL)


def _last_block(block: Any, x_NLC: Tensor, token_N: Tensor | None, mask_LL: Tensor | None) -> Tensor:
    if not isinstance(block.attn, nn.MultiheadAttention):
        # open_clip's custom blocks (qk_norm, scale_heads, ...) attend to themselves only: take the long way.
        return _pick(block(x_NLC, attn_mask=mask_LL), token_N)
    normed_NLC = block.ln_1(x_NLC)
    mask = None
    if mask_LL is not None:
        row_NL = mask_LL[:1].expand(x_NLC.shape[0], -1) if token_N is None else mask_LL[token_N]
        mask = row_NL[:, None, None].expand(-1, block.attn.num_heads, -1, -1).flatten(0, 1)  # [N * H, 1, L]
    attended_N1C = block.attention(_pick(normed_NLC, token_N), normed_NLC, normed_NLC, attn_mask=mask)
    x_N1C = _pick(x_NLC, token_N) + block.ls_1(attended_N1C)
    return x_N1C + block.ls_2(block.mlp(block.ln_2(x_N1C)))


def _pick(x_NLC: Tensor, token_N: Tensor | None) -> Tensor:
    if token_N is None:
        return x_NLC[:, :1]
    return x_NLC[torch.arange(x_NLC.shape[0], device=x_NLC.device), token_N].unsqueeze(1)
