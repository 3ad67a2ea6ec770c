"""Branches of a model that pools all tokens by GPO, for the mean as for the log-variance, as the paper fine-tunes.

    split    shared blocks -+-> the tower's last blocks -> norm of a text -> Linear -> GPO -> mean
                            +-> logvar blocks                             -> Linear -> GPO -> logvar

    top      tower -+-> norm of a text                                    -> Linear -> GPO -> mean
                    +-> logvar blocks                                     -> Linear -> GPO -> logvar

The tower's own pooling and projection are removed: nothing depends on them, and D need not be that of the weights which
the tower starts with. As in the authors' code the tokens of open_clip's ViT are not normed before the projection, those
of its text transformer are, and the tokens of the log-variance are not.

Images count with all of their tokens, the class token too, and texts with those up to EOT, or with all of them if the
tower reads its padding too (see `Tower.valid`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..host.towers.base import Tokens
from ..host.towers.blocks import plain_blocks, run_blocks
from .branch import Branch
from .gpo import TokenPool
from .split import SplitBranch
from .top import TopBranch, attention_heads

MEAN, LOGVAR = "gpo_mean", "uncertainty_gpo"  # the tower's attributes for the two poolings


class GPOBranch(Branch):
    """The common part of the branches at both places."""

    def build(self, embed_dim: int, new_blocks: Any, built: dict) -> None:
        holder, width = self.tower.holder, self.tower.width
        setattr(holder, self.attribute, new_blocks(**built))
        self.tower.drop_pooling()
        setattr(holder, MEAN, TokenPool(width, embed_dim, 0.0))
        setattr(holder, LOGVAR, TokenPool(width, embed_dim, self.cfg.init_logvar_bias))

    @property
    def modules(self) -> list[nn.Module]:
        return [self.body, getattr(self.tower.holder, LOGVAR)]

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self.tower.holder, LOGVAR).bias

    def set_recompute(self, enable: bool) -> None:
        self.body.grad_checkpointing = enable

    def pool(self, name: str, x_NLC: Tensor, tokens: Tokens) -> Tensor:
        """Return the mean or the log-variance, [N, D], fp32, pooled from the tokens of a last block.

        Arguments:
            name: `MEAN` or `LOGVAR`.
            tokens: the input of the blocks.
        """
        pool, valid_NL = getattr(self.tower.holder, name), self.tower.valid(tokens)
        if tokens.kept_NL is not None:
            valid_NL = tokens.kept_NL if valid_NL is None else valid_NL & tokens.kept_NL
        if self.body.grad_checkpointing:  # the order of all tokens in all channels is large
            return checkpoint(pool, x_NLC, valid_NL, use_reentrant=False)
        return pool(x_NLC, valid_NL)


class SplitGPOBranch(GPOBranch, SplitBranch):
    """A branch with GPO that leaves the tower before its last blocks."""

    def mean(self, tokens: Tokens) -> Tensor:
        tower = self.tower
        x_NLC = run_blocks(tower.transformer, tokens.x_NLC, tower.mask(tokens), start=-self.cfg.head_layers)
        return self.pool(MEAN, tower.normed(x_NLC), tokens)

    def logvar(self, tokens: Tokens) -> Tensor:
        x_NLC = run_blocks(self.body, tokens.x_NLC, self.tower.mask(tokens))
        return self.pool(LOGVAR, x_NLC, tokens)


class TopGPOBranch(GPOBranch, TopBranch):
    """A branch with GPO that reads the tokens which the tower would pool. Its blocks are open_clip's plain ones."""

    def build(self, embed_dim: int, new_blocks: Any, built: dict) -> None:
        width = self.tower.width
        super().build(embed_dim, plain_blocks, {**built, "width": width, "heads": attention_heads(width)})

    def mean(self, tokens: Tokens) -> Tensor:
        return self.pool(MEAN, self.tower.normed(tokens.x_NLC), tokens)

    def logvar(self, tokens: Tokens) -> Tensor:
        x_NLC, valid_NL = tokens.x_NLC.to(self.dtype), self.tower.valid(tokens)
        mask = None
        if valid_NL is not None:
            hidden_NL = torch.zeros_like(valid_NL, dtype=x_NLC.dtype).masked_fill_(~valid_NL, -1e4)  # fits 16 bit
            heads, length = attention_heads(self.tower.width), x_NLC.shape[1]
            mask = hidden_NL.repeat_interleave(heads, dim=0)[:, None].expand(-1, length, -1)  # [N * H, L, L]
        return self.pool(LOGVAR, run_blocks(self.body, x_NLC, mask), tokens)
