"""The pretraining objective: CLIP's InfoNCE plus the terms of PCME++."""

import torch
from torch import Tensor, nn

from ..distances import CSD, get_distance
from ..gaussian import Gaussian, full_precision
from .batch import PairBatch, TermSettings
from .collectives import MeanOverRanks
from .diagnostics import calibration_diagnostics
from .labels import Labels
from .matching import pairs_divisor
from .terms import LOSSES, WEIGHT, loss_weights, without_labels

SEED_STRIDE = 1_000_003  # so that steps of runs with neighbouring seeds have different noise


class PCMEppLoss(nn.Module):
    """CLIP's contrastive loss with PCME++'s matching, pseudo-positive and VIB terms (paper, equation 3).

        L = contrastive_weight * InfoNCE + match_weight * matching
                + pp_weight * (PP image-to-text + PP text-to-image) + vib_weight * (VIB of images + VIB of texts)

    A drop-in for `open_clip.ClipLoss` in open_clip's loop, called with the output of a `PCMEppCLIP`:

        >>> loss = PCMEppLoss(vib_weight=1e-6)
        >>> terms = loss(**model(image, text), output_dict=True)
        >>> sum(terms.values()).backward()

    Arguments:
        rank, world_size: the place of this process; every rank must have the same batch size.
        distance: the name of the distance in the matching logit, see `DISTANCES`. CSD is the paper's, and fast.
        reduction: the reduction of the matching and pseudo-positive terms, "mean" or "sum", see `matching_loss`.
        train_means_by: "all" terms, or "contrastive" for InfoNCE alone: then the others see the means as constants.
        settings: the settings of single terms, such as the margin of the triplet loss.
        seed: the seed of terms that draw noise.
        weights: `contrastive_weight`, `match_weight`, `pp_weight`, `vib_weight`, and the weight of every other term in
            `LOSSES`; 0 switches a term off. The defaults are those of `LOSSES`.

    On any number of ranks the value is the loss of the whole batch, and under DDP so is every gradient; that takes less
    compute and half the bytes of CLIP's --local-loss --gather-with-grad (see `fused.py`). All terms are computed in
    fp32, also under autocast. The VIB is the mean over this rank's samples and dimensions.

    Relations: the authors' fine-tuning code counts matching once per direction and adds no InfoNCE (match_weight=2,
    contrastive_weight=0 here), and keeps a and b on the criterion; here they are parameters of the model, which alone
    is optimised, saved and wrapped by DDP.

    Some terms depend on the position in a run: set `epoch` and `step` before a call, as the training loop does. The
    triplet loss has a warm-up in epochs, and PCME's draws new noise in each step.

    The value takes an all-reduce that no gradient needs. With `global_value` False there is none, and the terms are
    this rank's shares, whose mean over ranks is the value: the training loop does so in steps that it does not log.

    With `diagnose` set, a call also records its diagnostics (see `diagnostics.py`), which `read_diagnostics`
    returns. Neither the value nor a gradient depends on it.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        distance: str = "csd",
        reduction: str = "mean",
        train_means_by: str = "all",
        settings: TermSettings | None = None,
        seed: int = 0,
        **weights: float,
    ):
        super().__init__()
        pairs_divisor(1, 1, reduction)
        self.rank, self.world_size = rank, world_size
        self.weights = loss_weights(weights)
        self.distance, self.reduction = get_distance(distance), reduction
        self.settings, self.seed = settings or TermSettings(), seed
        self.epoch = self.step = 0
        self.constant_means = train_means_by == "contrastive"
        self.global_value = True
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
        logit_bias: Tensor | None = None,
        own_id: Tensor | None = None,
        partner_id: Tensor | None = None,
        own_share: Tensor | None = None,
        output_dict: bool = False,
    ) -> dict[str, Tensor] | Tensor:
        """Return the weighted terms, `*_loss`, whose sum is the objective, or that sum itself without `output_dict`.

        Arguments:
            image_features, text_features: the means, l2-normalised, [n, D].
            logit_scale, logit_bias: not used: with gradient accumulation their gradient would be counted too often.
            image_logvar, text_logvar: log sigma^2, [n, D].
            clip_scale, match_scale, match_shift: the scale of InfoNCE's logits, a and b, one value per sample, [n].
            own_id, partner_id, own_share: soft labels, see `LabelledImages`, [n]; none of them if image i matches
                text i alone. Terms that take no labels (InfoNCE, and terms that depend on it) must have a weight of 0.
        """
        with full_precision(image_features):
            image_means, text_means = image_features.float(), text_features.float()
            trained_means = None
            if self.constant_means:
                trained_means = image_means, text_means
                image_means, text_means = image_means.detach(), text_means.detach()
            batch = PairBatch(
                images=Gaussian(image_means, image_logvar.float()),
                texts=Gaussian(text_means, text_logvar.float()),
                clip_scale=clip_scale.float().mean(),
                match_scale=match_scale.float().mean(),
                match_shift=match_shift.float().mean(),
                distance=self.distance,
                reduction=self.reduction,
                rank=self.rank,
                world_size=self.world_size,
                with_pseudo_positives=self.weights["pp"] > 0 or self.diagnose,
                with_contrastive=self.weights["contrastive"] > 0 or self.weights["difficulty"] > 0,
                trained_means=trained_means,
                labels=self._labels(own_id, partner_id, own_share),
                settings=self.settings,
                epoch=self.epoch,
                noise_seed=(self.seed * SEED_STRIDE + self.step) % 2**32,
            )
            terms = self._terms(batch)
            if self.diagnose:
                self._diagnose(batch)
        return terms if output_dict else torch.stack(list(terms.values())).sum()

    def _labels(self, own_id: Tensor | None, partner_id: Tensor | None, own_share: Tensor | None) -> Labels | None:
        if own_id is None:
            return None
        assert partner_id is not None and own_share is not None
        if hard := without_labels(self.weights):
            raise ValueError(
                f"The loss term '{hard[0]}' takes no soft labels, which mixed images and several positives have: set "
                f"{', '.join(name + WEIGHT for name in hard)} to 0."
            )
        return Labels.gathered(own_id, partner_id, own_share, self.world_size)

    def _terms(self, batch: PairBatch) -> dict[str, Tensor]:
        weights = {name: weight for name, weight in self.weights.items() if weight > 0}
        values = [LOSSES[name].compute(batch) for name in weights]
        # The first entry is part of no term: if all pairwise terms have a weight of 0, it gives their parameters a
        # gradient of 0, since DDP expects one for every parameter.
        stacked = torch.stack([batch.pairs.contrastive, *values])
        if self.world_size > 1 and self.global_value:
            stacked = MeanOverRanks.apply(stacked)
        return {f"{name}_loss": weights[name] * value for name, value in zip(weights, stacked[1:], strict=True)}

    @torch.no_grad()
    def _diagnose(self, batch: PairBatch) -> None:
        images, texts = (Gaussian(x.mean.detach(), x.logvar.detach()) for x in (batch.images, batch.texts))
        image_uncertainty, text_uncertainty = images.uncertainty.mean(), texts.uncertainty.mean()
        factors = CSD().factors(images, texts)
        assert factors.column_M is not None
        # The mean over all pairs of a product is the product of the means.
        product = factors.scale * factors.query_NE.mean(dim=0) @ factors.gallery_ME.mean(dim=0)
        distance = factors.row_N.mean() + factors.column_M.mean() - product
        self.diagnostics = {
            "match_scale": batch.match_scale.detach(),
            "match_shift": batch.match_shift.detach(),
            "image_uncertainty": image_uncertainty,
            "text_uncertainty": text_uncertainty,
            "variance_share": (image_uncertainty + text_uncertainty) / distance,
            "pseudo_positives": batch.pairs.pseudo_positives * self.world_size,
            **calibration_diagnostics(batch),
        }

    def read_diagnostics(self) -> dict[str, float]:
        """Return the diagnostics of the last call with `diagnose`, averaged over ranks. Called on every rank."""
        values = torch.stack(list(self.diagnostics.values()))
        if self.world_size > 1:
            values = MeanOverRanks.apply(values)
        return dict(zip(self.diagnostics, values.tolist(), strict=True))
