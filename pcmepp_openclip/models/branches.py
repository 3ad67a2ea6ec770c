"""The log-variance branches: each computes the mean and the log-variance from a tower's tokens.

`SplitBranch` leaves a tower before its last blocks, as in the paper. CLIP reads one token of a tower's last block: CLS
of the image, EOT of the text. So that block needs query, output projection and MLP of that one token only, and no keys
and values at all (see `host.towers.blocks`). Both branches of a PCME++ tower, mean and log-variance, end in such a
block, which makes a training step cheaper than plain CLIP's. A tower that pools all tokens computes the last block of
the mean for all of them; its log-variance branch still ends in one token: the first one, or, where the tower averages,
the average of the tokens that the last block reads.

    embeddings -> shared blocks -+-> mean blocks   -> last block for one token -> norm, projection -> mean
                                 +-> logvar blocks -> last block for one token -> projection       -> logvar

`TopBranch` is a small head on the tokens, or the feature map, that the tower pools. A learned query attends to them, in
`head_layers` blocks of attention and MLP for this one query, and is projected to the log-variances. The head takes less
than 1 % of the compute of a tower, whatever the tower is.

    tower up to its pooling -+-> its own pooling, projection                -> mean
                             +-> query blocks over all tokens -> projection -> logvar

`SplitGPOBranch` and `TopGPOBranch` pool all tokens by GPO, for the mean as for the log-variance, as the paper
fine-tunes.

    split    shared blocks -+-> the tower's last blocks -> norm of a text -> Linear -> GPO -> mean
                            +-> logvar blocks                             -> Linear -> GPO -> logvar

    top      tower -+-> norm of a text                                    -> Linear -> GPO -> mean
                    +-> logvar blocks                                     -> Linear -> GPO -> logvar

The tower's own pooling and projection are removed: nothing depends on them, and D need not be that of the weights which
the tower starts with. As in the authors' code the tokens of open_clip's ViT are not normed before the projection, those
of its text transformer are, and the tokens of the log-variance are not. Images count with all of their tokens, the
class token too, and texts with those up to EOT, or with all of them if the tower reads its padding too (see
`Tower.valid`).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import PCMEppCfg
from ..gaussian import full_precision
from ..host.towers.base import SplitTower, Tokens, Tower
from ..host.towers.blocks import attend, plain_blocks, run_blocks, run_to_token
from .gpo import TokenPool, new_bias

HEAD_WIDTH = 64  # the width of an attention head, if the model's width allows it
MEAN, LOGVAR = "gpo_mean", "uncertainty_gpo"  # the tower's attributes for the two poolings of GPO


class Branch:
    """The log-variance branch of a tower. It holds no tensors: they are attributes of the tower's own modules.

    Arguments:
        tower: the tower, of any kind.
        cfg: the settings of the model.
    """

    attribute: ClassVar[str]  # the holder's attribute for the blocks or the head of the branch

    def __init__(self, tower: Tower, cfg: PCMEppCfg):
        self.tower, self.cfg = tower, cfg

    def build(self, embed_dim: int, new_blocks: Any, built: dict) -> None:
        """Add the tensors of the branch to the tower.

        Arguments:
            new_blocks: a function that makes a new transformer of the tower's kind if that is one of open_clip's own.
            built: the further arguments of such a function, `layers` among them.
        """
        raise NotImplementedError

    @property
    def body(self) -> Any:
        """Return the blocks or the head of the branch."""
        return getattr(self.tower.holder, self.attribute)

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules of the branch, which are trained if the tower is frozen."""
        return [self.body]

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
        return self.body.get_cast_dtype()

    def set_recompute(self, enable: bool) -> None:
        """Set whether activations of the branch are recomputed in the backward pass."""

    def tokens(self, batch: Tensor) -> Tokens:
        """Return the tokens of images or token ids that the mean and the log-variance are computed from."""
        return self.tower.tokens(batch)

    def mean(self, tokens: Tokens) -> Tensor:
        """Return the output of the stock tower, or GPO of its tokens, [N, D]."""
        return self.tower.mean(tokens)

    def logvar(self, tokens: Tokens) -> Tensor:
        """Return log-variances, [N, D], fp32."""
        raise NotImplementedError


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


def new_projection(width: int, embed_dim: int) -> nn.Parameter:
    # It is random, not zero: the loss sees the dimensions only through sums, so equal ones would stay equal.
    return nn.Parameter(width**-0.5 * torch.randn(width, embed_dim))


def logvar_of(x_NC: Tensor, projection_CD: Tensor, bias_D: Tensor | None) -> Tensor:
    """Return the projection plus the bias in fp32 at any precision. In bf16, a log-variance of -10 is right to 3 %."""
    with full_precision(x_NC):
        logvar_ND = x_NC.float() @ projection_CD.float()
        return logvar_ND if bias_D is None else logvar_ND + bias_D.float()
