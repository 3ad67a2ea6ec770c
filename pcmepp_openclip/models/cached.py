"""What frozen towers give, kept for later: a batch that a model takes in place of images or token ids."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class CachedTokens:
    """A batch of frozen towers' output, in place of images or token ids: what the log-variance branch reads, and the
    means.

    Arguments:
        mean_ND: features of the tower, l2-normalised, fp32.
        x_NLC: what the branch reads; 16 bit in a cache.
        text_NL: token ids, of texts.
    """

    mean_ND: Tensor
    x_NLC: Tensor
    text_NL: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mean_ND)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> "CachedTokens":
        """Moves the batch; `dtype` is ignored, since the means stay in fp32 and the tokens as they are stored."""
        return CachedTokens(
            self.mean_ND.to(device, non_blocking=non_blocking),
            self.x_NLC.to(device, non_blocking=non_blocking),
            None if self.text_NL is None else self.text_NL.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "CachedTokens":
        text_NL = None if self.text_NL is None else self.text_NL.pin_memory()
        return CachedTokens(self.mean_ND.pin_memory(), self.x_NLC.pin_memory(), text_NL)
