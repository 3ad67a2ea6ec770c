"""A batch that frozen towers have encoded already."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class CachedTokens:
    """A batch of frozen towers' output, which a model takes in place of images or token ids.

    Arguments:
        mean_ND: the means, l2-normalised, fp32.
        x_NLC: the tokens that the log-variance branch reads, in 16 bit if they come from a cache.
        text_NL: the token ids of texts; None for images.
    """

    mean_ND: Tensor
    x_NLC: Tensor
    text_NL: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean_ND)

    def to(self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> "CachedTokens":
        """Return the batch on another device, in the dtype of the cache.

        `dtype` is ignored: the training loop casts images to the precision of the model, which here happens to the
        tokens alone, and only when they are used.
        """
        moved = {name: x for name, x in vars(self).items() if x is not None}
        return replace(self, **{name: x.to(device=device, non_blocking=non_blocking) for name, x in moved.items()})
