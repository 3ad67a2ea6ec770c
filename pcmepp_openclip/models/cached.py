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
        """The batch on another device. The dtype is that of the cache, whatever is asked for: open_clip's loop casts
        images to the precision of the model, which here happens to the tokens alone, and only when they are used."""
        return self._map(lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "CachedTokens":
        return self._map(lambda x: x.pin_memory())

    def _map(self, function: Any) -> "CachedTokens":
        text_NL = None if self.text_NL is None else function(self.text_NL)
        return replace(self, mean_ND=function(self.mean_ND), x_NLC=function(self.x_NLC), text_NL=text_NL)
