"""A batch that frozen towers have been through already."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class CachedTokens:
    """A batch of frozen towers' output, which a model takes in place of images or token ids.

    Arguments:
        mean_ND: the means, l2-normalised, fp32.
        x_NLC: what the log-variance branch reads, in 16 bit where it comes from a cache.
        text_NL: the token ids, of texts.
    """

    mean_ND: Tensor
    x_NLC: Tensor
    text_NL: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean_ND)

    def to(self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> "CachedTokens":
        """Return the batch on another device. The dtype is that of the cache, whatever is asked for: open_clip's loop
        casts images to the precision of the model, which here happens to the tokens alone, and only when they are used.
        """
        moved = {name: x for name, x in vars(self).items() if x is not None}
        return replace(self, **{name: x.to(device=device, non_blocking=non_blocking) for name, x in moved.items()})
