"""CLIP's own loss, InfoNCE, in memory that does not grow with the square of the batch: for plain models."""

import torch
from torch import Tensor, nn

from ..gaussian import full_precision
from .collectives import AllGather, MeanOverRanks
from .csd_matching import PairSettings
from .fused import PairLosses


class ChunkedClipLoss(nn.Module):
    """A drop-in for `open_clip.ClipLoss` with its values and gradients, of which no N x N matrix is ever held.

        L = 1/2N sum_i (log sum_j exp(s c_ij) - s c_ii) + 1/2N sum_j (log sum_i exp(s c_ij) - s c_jj)

    The cosines c are visited in chunks of rows, see `fused.py`. That takes 3 to 4 matrix products instead of 6, and on
    several ranks half the bytes of --local-loss --gather-with-grad, since image features are never sent.

        >>> loss = ChunkedClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
        >>> loss(image_features, text_features, logit_scale)

    Arguments:
        local_loss: whether the value is this rank's share, or the loss of the whole batch. The work is that of this
            rank's share in both cases.
        gather_with_grad: whether the gradient is, under DDP, that of the whole batch. Without it, features have the
            same gradient divided by the number of ranks, as in `ClipLoss`: the sum over ranks is missing there.
        rank, world_size: the place of this process; every rank must have the same batch size.

    `ClipLoss` with `local_loss` alone leaves out a part of the gradient. There is no such choice here. The loss is
    computed in fp32, also under autocast.
    """

    def __init__(self, local_loss: bool = False, gather_with_grad: bool = False, rank: int = 0, world_size: int = 1):
        super().__init__()
        if local_loss and not gather_with_grad and world_size > 1:
            raise ValueError("ChunkedClipLoss has the whole gradient: local_loss needs gather_with_grad.")
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad
        self.rank, self.world_size = rank, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> dict[str, Tensor] | Tensor:
        """Return the loss, a 0-d tensor, or {"contrastive_loss": loss} with `output_dict`.

        Arguments:
            image_features, text_features: the features of this rank's pairs, [n, D].
            logit_scale: s, 0-d.
            logit_bias: a term of all logits, which changes neither the loss nor another gradient.
        """
        with full_precision(image_features):
            text_ND = text_features.float()
            settings = PairSettings(
                first=self.rank * len(text_ND),
                with_matching=False,
                share_of_means=1.0 if self.gather_with_grad else 1 / self.world_size,
            )
            if self.world_size > 1:
                text_ND = AllGather.apply(text_ND)
            scale = torch.as_tensor(logit_scale, dtype=torch.float32, device=text_ND.device)
            loss, *_ = PairLosses.apply(image_features.float(), text_ND, scale, *[None] * 4, settings)
            if self.world_size > 1 and not self.local_loss:
                loss = MeanOverRanks.apply(loss)
            if logit_bias is not None:
                loss = loss + 0 * logit_bias.float()  # DDP expects a gradient for every parameter
        return {"contrastive_loss": loss} if output_dict else loss
