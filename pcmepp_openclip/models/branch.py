"""The interface of a log-variance branch, which computes the mean and the log-variance from a tower's tokens."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..gaussian import full_precision
from ..host.towers.base import Tokens, Tower


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
