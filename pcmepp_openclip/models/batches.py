"""Batches that a model takes in place of pixels or token ids."""

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


@dataclass
class LabelledImages:
    """A batch of images, which a model takes in place of pixels and whose other entries it passes on to the loss.

    The label of image i and text j is

        m_ij = own_share_i [own_id_i = own_id_j] + (1 - own_share_i) [partner_id_i = own_id_j]

    where text j has the `own_id` of the image that it was written for. Ids that differ from all others on all ranks
    give the identity; equal ids of the same picture give several positives; a share below 1 belongs to a mixed image.
    Without ids image i matches text i alone.

    Arguments:
        image_NCHW: the pixels.
        own_id_N: int64, the same for pictures whose texts match each other.
        partner_id_N: int64, the `own_id` of the image that was mixed in; the image's own if nothing was mixed in.
        own_share_N: fp32, in [0, 1]; 1 if nothing was mixed in.
        token_seed_N: int64, from which the tokens to drop are drawn, the same in every forward pass of a step; None
            to drop none.
    """

    image_NCHW: Tensor
    own_id_N: Tensor | None = None
    partner_id_N: Tensor | None = None
    own_share_N: Tensor | None = None
    token_seed_N: Tensor | None = None

    def __len__(self) -> int:
        return len(self.image_NCHW)

    @property
    def labels(self) -> dict[str, Tensor]:
        """Return the ids and shares of the labels, [N] each, under the names that `PCMEppLoss` takes."""
        entries = {"own_id": self.own_id_N, "partner_id": self.partner_id_N, "own_share": self.own_share_N}
        return {name: x for name, x in entries.items() if x is not None}

    def to(self, device: Any = None, dtype: torch.dtype | None = None, non_blocking: bool = False) -> "LabelledImages":
        """Return the batch on another device; `dtype` is the dtype of the pixels, as the training loop asks for it."""
        moved = {
            name: x.to(device=device, non_blocking=non_blocking) for name, x in vars(self).items() if x is not None
        }
        return replace(self, **{**moved, "image_NCHW": moved["image_NCHW"].to(dtype=dtype)})
