"""The log-variance branch that leaves a tower before its last blocks, as in the paper.

CLIP reads one token of a tower's last block: CLS of the image, EOT of the text. So that block needs query, output
projection and MLP of that one token only, and no keys and values at all (see `branch`). Both branches of a PCME++
tower, mean and log-variance, end in such a block, which makes a training step cheaper than plain CLIP's:

    embeddings -> shared blocks -+-> mean blocks   -> last block for one token -> norm, projection -> mean
                                 +-> logvar blocks -> last block for one token -> projection       -> logvar

A tower that pools all tokens computes the last block of the mean for all of them. Its log-variance branch still ends in
one token: the first one, or, where the tower averages, the average of the tokens that the last block reads.

Nothing here knows open_clip: its blocks are taken apart by `host.towers.parts_of`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..host.towers import AVERAGE, Average, SplitTower, Stack, Tokens, parts_of, set_recompute
from .branch import Branch, logvar_of, new_bias, new_projection, single_query_attention

BLOCKS = "uncertainty_transformer"  # the tower's attribute for the blocks of the branch


class SplitBranch(Branch):
    """The log-variance branch that leaves a tower before its last blocks, as in the paper."""

    tower: SplitTower

    def build(self, embed_dim: int, new_blocks: Callable[[], Any]) -> None:
        holder, tower, blocks = self.tower.holder, self.tower, new_blocks()
        setattr(holder, BLOCKS, blocks)
        setattr(holder, tower.projection, new_projection(blocks.width, embed_dim))
        setattr(holder, tower.bias, new_bias(self.cfg.init_logvar_bias, embed_dim))

    @property
    def modules(self) -> list[nn.Module]:
        return [getattr(self.tower.holder, BLOCKS)]

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self.tower.holder, self.tower.bias)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return Stack.of(getattr(self.tower.holder, BLOCKS)).blocks

    @property
    def last_shared(self) -> nn.Module:
        """Return the block after which the branch leaves the tower."""
        return self._shared().blocks[-1]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self.tower.holder, BLOCKS).get_cast_dtype()

    def set_recompute(self, enable: bool) -> None:
        set_recompute(getattr(self.tower.holder, BLOCKS), enable)

    def tokens(self, batch: Tensor) -> Tokens:
        embedded = self.tower.embed(batch)
        return embedded._replace(x_NLC=run_blocks(self._shared(), embedded.x_NLC, self.tower.mask(embedded)))

    def mean(self, tokens: Tokens) -> Tensor:
        tower, blocks = self.tower, self.tower.stack(start=-self.cfg.head_layers)
        if tower.pools_one_token:
            return tower.pool(pool_last_block(blocks, tokens.x_NLC, tower.token(tokens), tower.mask(tokens)))
        return tower.pool(run_blocks(blocks, tokens.x_NLC, tower.mask(tokens)))

    def logvar(self, tokens: Tokens) -> Tensor:
        tower, holder = self.tower, self.tower.holder
        blocks = Stack.of(getattr(holder, BLOCKS))
        x_N1C = pool_last_block(blocks, tokens.x_NLC, tower.token(tokens), tower.mask(tokens))
        return logvar_of(x_N1C.squeeze(1), getattr(holder, tower.projection), self.bias)

    def _shared(self) -> Stack:
        return self.tower.stack(stop=-self.cfg.head_layers)


def run_blocks(stack: Stack, x_NLC: Tensor, mask: Tensor | None) -> Tensor:
    """Return the output of all blocks for all tokens."""
    return _run(stack.blocks, x_NLC, mask, stack.recompute)


def _run(blocks: Iterable[nn.Module], x_NLC: Tensor, mask: Tensor | None, recompute: bool) -> Tensor:
    for block in blocks:
        if recompute:
            x_NLC = checkpoint(block, x_NLC, attn_mask=mask, use_reentrant=False)
        else:
            x_NLC = block(x_NLC, attn_mask=mask)
    return x_NLC


def pool_last_block(
    stack: Stack, x_NLC: Tensor, token_N: Tensor | Average | None, mask: Tensor | None = None
) -> Tensor:
    """Return the output of the blocks for one token per sample, [N, 1, C]. The last block computes that token alone.

    Arguments:
        token_N: the index of the token to read, None for the first one of every sample, or `AVERAGE`.
        mask: the additive attention mask, [L, L] or [N * H, L, L], or None.
    """
    *full, last = stack.blocks
    x_NLC = _run(full, x_NLC, mask, stack.recompute)
    if stack.recompute:
        return checkpoint(_last_block, last, x_NLC, token_N, mask, use_reentrant=False)
    return _last_block(last, x_NLC, token_N, mask)


def _last_block(block: nn.Module, x_NLC: Tensor, token_N: Tensor | Average | None, mask: Tensor | None) -> Tensor:
    parts = parts_of(block)
    if parts is None:  # a block of another kind computes all tokens, of which one is read
        return _pick(block(x_NLC, attn_mask=mask), token_N)
    normed_NLC, x_N1C = parts.norm_1(x_NLC), _pick(x_NLC, token_N)
    query_N1C = parts.norm_1(x_N1C) if token_N is AVERAGE else _pick(normed_NLC, token_N)
    row = None if mask is None else _mask_row(mask, token_N, x_NLC.shape[0])
    x_N1C = x_N1C + parts.scale_1(single_query_attention(parts.attention, query_N1C, normed_NLC, row))
    return x_N1C + parts.scale_2(parts.mlp(parts.norm_2(x_N1C)))


def _pick(x_NLC: Tensor, token_N: Tensor | Average | None) -> Tensor:
    if token_N is None:
        return x_NLC[:, :1]
    if isinstance(token_N, Average):
        return x_NLC[:, 1:].mean(dim=1, keepdim=True)
    return x_NLC[torch.arange(x_NLC.shape[0], device=x_NLC.device), token_N].unsqueeze(1)


def _mask_row(mask: Tensor, token_N: Tensor | Average | None, samples: int) -> Tensor:
    """Return the row of the mask for the token that is read, [N, L] or [N, H, L]."""
    assert not isinstance(token_N, Average)
    if mask.ndim == 2:
        return mask[:1].expand(samples, -1) if token_N is None else mask[token_N]
    mask_NHLL = mask.unflatten(0, (samples, -1))
    if token_N is None:
        return mask_NHLL[:, :, 0]
    return mask_NHLL[torch.arange(samples, device=mask.device), :, token_N]
