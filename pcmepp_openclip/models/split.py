"""The log-variance branch that leaves a tower before its last blocks, as in the paper.

CLIP reads one token of a tower's last block: CLS of the image, EOT of the text. So that block needs query, output
projection and MLP of that one token only, and no keys and values at all (see `host.towers.blocks`). Both branches of a
PCME++ tower, mean and log-variance, end in such a block, which makes a training step cheaper than plain CLIP's:

    embeddings -> shared blocks -+-> mean blocks   -> last block for one token -> norm, projection -> mean
                                 +-> logvar blocks -> last block for one token -> projection       -> logvar

A tower that pools all tokens computes the last block of the mean for all of them. Its log-variance branch still ends in
one token: the first one, or, where the tower averages, the average of the tokens that the last block reads.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..host.towers.base import SplitTower, Tokens
from ..host.towers.blocks import run_blocks, run_to_token
from .branch import Branch, logvar_of, new_bias, new_projection


class SplitBranch(Branch):
    """The log-variance branch that leaves a tower before its last blocks, as in the paper."""

    attribute = "uncertainty_transformer"
    tower: SplitTower

    def build(self, embed_dim: int, new_blocks: Any, built: dict) -> None:
        holder, tower, blocks = self.tower.holder, self.tower, new_blocks(**built)
        setattr(holder, self.attribute, blocks)
        setattr(holder, tower.projection, new_projection(blocks.width, embed_dim))
        setattr(holder, tower.bias, new_bias(self.cfg.init_logvar_bias, embed_dim))

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self.tower.holder, self.tower.bias)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.body.resblocks

    def set_recompute(self, enable: bool) -> None:
        self.body.grad_checkpointing = enable

    def tokens(self, batch: Tensor) -> Tokens:
        tower, embedded = self.tower, self.tower.embed(batch)
        mask = tower.mask(embedded)
        x_NLC = run_blocks(tower.transformer, embedded.x_NLC, mask, stop=-self.cfg.head_layers)
        return embedded._replace(x_NLC=x_NLC)

    def mean(self, tokens: Tokens) -> Tensor:
        tower, mask, start = self.tower, self.tower.mask(tokens), -self.cfg.head_layers
        if tower.pools_one_token:
            return tower.pool(run_to_token(tower.transformer, tokens.x_NLC, tower.token(tokens), mask, start))
        return tower.pool(run_blocks(tower.transformer, tokens.x_NLC, mask, start))

    def logvar(self, tokens: Tokens) -> Tensor:
        tower = self.tower
        x_N1C = run_to_token(self.body, tokens.x_NLC, tower.token(tokens), tower.mask(tokens))
        return logvar_of(x_N1C.squeeze(1), getattr(tower.holder, tower.projection), self.bias)
