"""The input of a loss term: the pairs of this rank, and the tensors that it needs of the other ranks."""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..distances import CSD, Distance
from ..gaussian import Gaussian
from .collectives import AllGather
from .csd_matching import MatchLogits, PairSettings
from .fused import PairLosses, chunks
from .labels import LabelledPairs, Labels
from .matching import matching_logits, pairs_divisor
from .pseudo_positives import TruePairs, raised_labels
from .vib import Offsets

NEGATIVES = ("hardest", "all")


@dataclass(frozen=True)
class TermSettings:
    """The settings of single terms, with the names and defaults of their keys in `pcmepp_cfg`.

    Arguments:
        triplet_margin: the margin of the triplet loss.
        triplet_negatives: "hardest" for the hardest negative of each sample, or "all" for the sum over all of them.
        triplet_warmup_epochs: the number of epochs at the start of a run with all negatives, before the hardest ones.
        pcme_samples: the number of samples of each Gaussian in PCME's loss.
        label_smoothing: e of the labels e + (1 - 2e) m of the matching and pseudo-positive losses, at least 0 and below
            1/2.
    """

    triplet_margin: float = 0.2
    triplet_negatives: str = "hardest"
    triplet_warmup_epochs: int = 2
    pcme_samples: int = 8
    label_smoothing: float = 0.0


class PairTerms(NamedTuple):
    """The terms that compare every image with every text, and the number of pseudo-positives, each a 0-d tensor.

    The difficulties are InfoNCE of each of this rank's pairs, by its image and by its text, [n], a constant to the
    gradient.
    """

    contrastive: Tensor
    match: Tensor
    pp: Tensor
    pseudo_positives: Tensor
    image_difficulty: Tensor
    text_difficulty: Tensor


@dataclass(frozen=True)
class PairBatch:
    """n image-text pairs of this rank, of N on all ranks.

    A term of the loss is a function of it that returns a 0-d tensor: this rank's share, scaled so that the mean over
    ranks is the term of the whole batch. Its gradients follow the convention of DDP, whose mean over ranks is then the
    gradient of the whole batch.

    Arguments:
        images, texts: the Gaussians of this rank, [n, D]; image i and text i are a pair.
        trained_means: the means of both for InfoNCE, if it alone trains them: the means of `images` and `texts` are
            then constants. None if all terms train the means.
        clip_scale: the scale of InfoNCE's logits, a 0-d tensor.
        match_scale, match_shift: a and b of the matching logit -a d + b, 0-d tensors.
        distance: d of the matching logit.
        reduction: the reduction of sums over all pairs, "mean" or "sum", see `matching_loss`.
        rank, world_size: the place of this process; every rank has n pairs.
        with_pseudo_positives, with_contrastive: whether pseudo-positives and InfoNCE are wanted.
        labels: soft labels of the matching and pseudo-positive terms, which no other term takes; None if image i
            matches text i alone.
        settings: the settings of single terms.
        epoch: the index of the epoch.
        noise_seed: the seed of terms that draw noise: new in each step, equal on all ranks and in all passes of a step.
    """

    images: Gaussian
    texts: Gaussian
    clip_scale: Tensor
    match_scale: Tensor
    match_shift: Tensor
    distance: Distance = field(default_factory=CSD)
    reduction: str = "mean"
    rank: int = 0
    world_size: int = 1
    with_pseudo_positives: bool = True
    with_contrastive: bool = True
    trained_means: tuple[Tensor, Tensor] | None = None
    labels: Labels | None = None
    settings: TermSettings = field(default_factory=TermSettings)
    epoch: int = 0
    noise_seed: int = 0

    def gather(self, x_n: Tensor) -> Tensor:
        """Return the rows of all ranks, with gradients."""
        return AllGather.apply(x_n) if self.world_size > 1 else x_n

    @property
    def first(self) -> int:
        """Return the index of this rank's first pair among the pairs of all ranks."""
        return self.rank * len(self.texts.mean)

    @functools.cached_property
    def all_text_means(self) -> Tensor:
        """Return the means of the texts of all ranks, [N, D], which are all that CSD and InfoNCE need."""
        return self.gather(self.texts.mean) if self.trained_means is None else self._all_trained_text_means.detach()

    @functools.cached_property
    def _all_trained_text_means(self) -> Tensor:
        """Return the means of the texts of all ranks, [N, D], with the gradient of InfoNCE."""
        return self.all_text_means if self.trained_means is None else self.gather(self.trained_means[1])

    @functools.cached_property
    def _own_offsets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return |mu|^2 + u of this rank's images and of its texts, [n] each, and the sum of the VIBs of both, 0-d."""
        (image_n, image_kl), (text_n, text_kl) = (Offsets.apply(*x) for x in (self.images, self.texts))
        return image_n, text_n, image_kl + text_kl

    @functools.cached_property
    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Return |mu|^2 + u of this rank's images, [n], and of all texts, [N]."""
        return self._own_offsets[0], self.gather(self._own_offsets[1])

    @property
    def vib(self) -> Tensor:
        """Return the sum of the VIBs of the images and of the texts of this rank, a 0-d tensor, see `vib.py`."""
        return self._own_offsets[2]

    @functools.cached_property
    def all_texts(self) -> Gaussian:
        """Return the texts of all ranks in their order, [N, D]. Image i of this rank matches text `first + i`."""
        return Gaussian(self.all_text_means, self.gather(self.texts.logvar))

    @functools.cached_property
    def pairs(self) -> PairTerms:
        """Return InfoNCE, matching and pseudo-positives of all pairs, fused if the distance is CSD."""
        fused = type(self.distance) is CSD
        terms = PairTerms(
            *PairLosses.apply(
                self.images.mean if self.trained_means is None else self.trained_means[0],
                self._all_trained_text_means,
                self.clip_scale,
                *self._offsets,
                *(self.match_scale, self.match_shift),
                PairSettings(
                    first=self.first,
                    reduction=self.reduction,
                    with_contrastive=self.with_contrastive,
                    with_matching=fused,
                    true_pairs=self._true_pairs() if fused else None,
                    labels=self.labels if fused else None,
                    smoothing=self.settings.label_smoothing,
                    constant_means=self.trained_means is not None,
                ),
            )
        )
        return terms if fused else PairTerms(terms.contrastive, *self._matching(), *terms[4:])

    def match_logits(self, rows: slice) -> Tensor:
        """Return the matching logits of some of this rank's images with all texts, [rows, N], without gradients."""
        with torch.no_grad():
            if type(self.distance) is CSD:  # CSD does without the log-variances of other ranks
                cosine_rN = self.images.mean[rows] @ self.all_text_means.T
                return MatchLogits(*self._offsets, self.match_scale, self.match_shift).of(cosine_rN, rows)
            return self._logits(Gaussian(self.images.mean[rows], self.images.logvar[rows]), self.all_texts)

    @torch.no_grad()
    def _true_pairs(self) -> TruePairs | LabelledPairs | None:
        if not self.with_pseudo_positives:
            return None
        if self.labels is not None:
            rows = chunks(self.images.mean, len(self.all_text_means))
            return self.labels.true_pairs(self.match_logits, rows, self.images.keys, self.gather(self.texts.keys))
        if type(self.distance) is CSD:
            image_n, text_n, _ = self._own_offsets
            distance_n = image_n + text_n - 2 * (self.images.mean * self.texts.mean).sum(dim=1)
        else:
            distance_n = self.distance.paired(self.images, self.texts)
        logit_n = matching_logits(distance_n, self.match_scale, self.match_shift)
        return TruePairs(*(self.gather(x) for x in (logit_n, self.images.keys, self.texts.keys)))

    def _matching(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return matching, pseudo-positives and their number for any distance, by autograd.

        Only some rows of the matrix exist at a time: each chunk is computed again in the backward pass.
        """
        images, texts, true_pairs = self.images, self.all_texts, self._true_pairs()
        match = positive = extra = pseudo = self.match_scale.new_zeros(())
        for rows in chunks(images.mean, len(texts.mean)):
            part = Gaussian(images.mean[rows], images.logvar[rows])
            logits = checkpoint(self._logits, part, texts, use_reentrant=False)
            match = match + F.softplus(logits).sum() - self.settings.label_smoothing * logits.sum()
            label = None if self.labels is None else self.labels.of(rows)
            for raised in raised_labels(logits.detach(), label, true_pairs, rows, self.first):
                extra = extra + (raised * logits).sum()
                pseudo = pseudo + (raised if label is None else raised > 0).sum()
            if label is not None:
                positive = positive + (label * logits).sum()
        if self.labels is None:
            distance_n = self.distance.paired(images, self.texts)
            positive = matching_logits(distance_n, self.match_scale, self.match_shift).sum()
        kept = 1 - 2 * self.settings.label_smoothing
        positive, extra = kept * positive, kept * extra
        n, N = len(images.mean), len(texts.mean)
        scale = N / n / pairs_divisor(N, N, self.reduction)
        return scale * (match - positive), scale * (2 * (match - positive) - extra), pseudo

    def _logits(self, images: Gaussian, texts: Gaussian) -> Tensor:
        return matching_logits(self.distance.matrix(images, texts), self.match_scale, self.match_shift)
