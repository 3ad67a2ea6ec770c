"""The pretraining objective: CLIP's InfoNCE plus the terms of PCME++."""

from typing import Any

import torch
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..gaussian import Gaussian
from ..precision import full_precision
from .collectives import AllGather, MeanOverRanks
from .fused import PairLosses, TruePairs
from .matching import pairs_divisor
from .vib import vib


class PCMEppLoss(nn.Module):
    """CLIP's contrastive loss with PCME++'s matching, pseudo-positive and VIB terms (paper, equation 3).

        L = contrastive_weight * InfoNCE + match_weight * matching
                + pp_weight * (PP image-to-text + PP text-to-image) + vib_weight * (VIB of images + VIB of texts)

    A drop-in for `open_clip.ClipLoss` in open_clip's loop, called with a `PCMEppCLIP`'s output:

        >>> loss = PCMEppLoss(vib_weight=1e-6)
        >>> terms = loss(**model(image, text), output_dict=True)
        >>> sum(terms.values()).backward()

    Arguments:
        local_loss, gather_with_grad, cache_labels: `ClipLoss`'s, accepted and without effect. On any number of ranks
            the value is the loss of the whole batch, and under DDP so is every gradient; that takes less compute and
            half the bytes of CLIP's --local-loss --gather-with-grad (see `pairwise.py`).
        rank, world_size: this process's place; ranks must bring batches of one size.
        use_horovod: refused.
        contrastive_weight, match_weight, pp_weight, vib_weight: weights of the terms; 0 switches a term off.
        reduction: of the matching and pseudo-positive terms, "mean" or "sum", see `matching_loss`.

    Conventions: in each term all quantities are fp32, also under autocast. The VIB is the mean over the rank's own
    samples and dimensions. The authors' fine-tuning code counts matching once for each direction and adds no InfoNCE
    (match_weight=2, contrastive_weight=0 here), and keeps a and b on the criterion; here they are parameters of the
    model, which alone is optimised, saved and wrapped by DDP.

    With `diagnose` set, a call also notes what a user wants to see of it; `read_diagnostics` gives that out.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
        match_weight: float = 1.0,
        vib_weight: float = 1e-6,
        pp_weight: float = 0.0,
        reduction: str = "mean",
        contrastive_weight: float = 1.0,
    ):
        super().__init__()
        if use_horovod:
            raise ValueError("PCMEppLoss works with torch.distributed: drop --horovod and start by torchrun or srun.")
        pairs_divisor(1, 1, reduction)
        self.rank, self.world_size = rank, world_size
        self.weights = (contrastive_weight, match_weight, pp_weight, vib_weight)
        self.reduction = reduction
        self.diagnose = False
        self.diagnostics: dict[str, Tensor] = {}

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        image_logvar: Tensor,
        text_logvar: Tensor,
        clip_scale: Tensor,
        match_scale: Tensor,
        match_shift: Tensor,
        output_dict: bool = False,
    ) -> dict[str, Tensor] | Tensor:
        """The weighted terms, `*_loss`, whose sum is the objective; that sum itself without `output_dict`.

        Arguments:
            image_features, text_features: means, l2-normalised, [N, D].
            logit_scale: not used: with gradient accumulation its gradient would be counted too often.
            image_logvar, text_logvar: log sigma^2, [N, D].
            clip_scale, match_scale, match_shift: scale of InfoNCE's logits, a and b, a value for each sample, [N].
        """
        with full_precision(image_features):
            terms = self._terms(
                Gaussian(image_features.float(), image_logvar.float()),
                Gaussian(text_features.float(), text_logvar.float()),
                clip_scale.float().mean(),
                match_scale.float().mean(),
                match_shift.float().mean(),
            )
        return terms if output_dict else torch.stack(list(terms.values())).sum()

    def _terms(self, images: Gaussian, texts: Gaussian, s: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        image_unc_n, text_unc_n = images.uncertainty, texts.uncertainty
        image_offset_n = images.mean.square().sum(dim=1) + image_unc_n
        text_offset_n = texts.mean.square().sum(dim=1) + text_unc_n
        true_pairs = None
        if self.weights[2] > 0 or self.diagnose:
            with torch.no_grad():
                distance_n = image_offset_n + text_offset_n - 2 * (images.mean * texts.mean).sum(dim=1)
                of_rank = -a * distance_n + b, images.keys, texts.keys
                true_pairs = TruePairs(*(self._gather(x) for x in of_rank))
        contrastive, match, pp, pseudo = PairLosses.apply(
            images.mean,
            self._gather(texts.mean),
            image_offset_n,
            self._gather(text_offset_n),
            *(s, a, b),
            true_pairs,
            self.rank * len(texts.mean),
            self.reduction,
        )
        values = torch.stack([contrastive, match, pp, vib(images) + vib(texts)])
        if self.world_size > 1:
            values = MeanOverRanks.apply(values)
        if self.diagnose:
            self._diagnose(
                Gaussian(*(x.detach() for x in images)), Gaussian(*(x.detach() for x in texts)), a, b, pseudo
            )
        # A term of weight 0 is left out of the sum; its parameters still get a gradient, of 0, as DDP demands.
        weighted = zip(("contrastive_loss", "match_loss", "pp_loss", "vib_loss"), self.weights, values, strict=True)
        return {name: weight * value for name, weight, value in weighted if weight > 0}

    def _gather(self, x: Tensor) -> Tensor:
        return AllGather.apply(x) if self.world_size > 1 else x

    @torch.no_grad()
    def _diagnose(self, images: Gaussian, texts: Gaussian, a: Tensor, b: Tensor, pseudo: Tensor) -> None:
        image_unc, text_unc = images.uncertainty.mean(), texts.uncertainty.mean()
        # The mean CSD of all pairs: that of the means is the product of the mean image and the mean text.
        squares = images.mean.square().sum(dim=1).mean() + texts.mean.square().sum(dim=1).mean()
        distance = squares - 2 * images.mean.mean(dim=0) @ texts.mean.mean(dim=0) + image_unc + text_unc
        self.diagnostics = {
            "a": a.detach(),
            "b": b.detach(),
            "image_uncertainty": image_unc,
            "text_uncertainty": text_unc,
            "variance_share": (image_unc + text_unc) / distance,
            "pseudo_positives": pseudo * self.world_size,
        }

    def read_diagnostics(self) -> dict[str, float]:
        """The diagnostics of the last call with `diagnose`, averaged over ranks. To be called on every rank."""
        values = torch.stack(list(self.diagnostics.values()))
        if self.world_size > 1:
            values = MeanOverRanks.apply(values)
        return dict(zip(self.diagnostics, values.tolist(), strict=True))


def create_loss(args: Any, pcmepp_cfg: dict) -> PCMEppLoss:
    """The loss for open_clip_train's arguments and a model's `pcmepp_cfg`, whose weights are the defaults."""
    cfg = PCMEppCfg.parse(pcmepp_cfg)
    if getattr(args, "distill", False) or getattr(args, "siglip", False):
        raise ValueError("A PCME++ model has a loss of its own: drop --distill-model and --siglip.")
    return PCMEppLoss(
        local_loss=args.local_loss,
        gather_with_grad=args.gather_with_grad,
        rank=args.rank,
        world_size=args.world_size,
        use_horovod=args.horovod,
        match_weight=cfg.match_weight,
        vib_weight=cfg.vib_weight,
        pp_weight=cfg.pp_weight,
        reduction=cfg.reduction,
        contrastive_weight=cfg.contrastive_weight,
    )
