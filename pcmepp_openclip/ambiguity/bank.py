"""Confusion and multiplicity of an image or a caption, by the embeddings of any CLIP and reference pairs.

    h_j        = log mean_i exp(s cos(r_j, q_i))              how much the item r_j attracts anything, its hubness
    p_j        = softmax_j(s cos(q, r_j) - h_j)               what the query q would find among the items r_j
    confusion  = 1 / sum_j p_j^2                              the effective number of items that it is confused among

The confusion is the exponential of Rényi's entropy of order 2: n for a query that n items suit equally well, so it says
whether the model knows where the query belongs, and not how many items are truly right. That is another question:

    crowding      of a caption: its mean cosine with the captions of the bank that are nearest to it, half a percent
                  of an image: the length of the mean of the captions that are nearest to it, 1 where they are alike
    multiplicity  = exp(slope crowding + offset)              the number of items that the query is true of

An input of a kind that people often describe fits many. The order is that of the crowding, and slope and offset set the
unit: over the bank's own items, log multiplicity has the mean and the spread of log sum_j P(pair of q and r_j), where
P = sigmoid(s cos + shift) is calibrated on the bank's pairs. The slope is never negative, though this sum may fall with
the number of true items, as on drawn scenes.

The theory: InfoNCE drives `s cos` to log p(v, t) / (p(v) p(t)) up to a constant per row and column. Subtracting h and
taking the softmax removes these constants. For a caption that is true of some images and says nothing else, p is
uniform over these images.

The variance of PCME++ is not normalised in this way: its calibration, sum_v sigmoid(y) = 1, makes it grow with all
cosines of a sample. Blurred photographs have small cosines with every caption, so it asks for a small variance.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..distances import Distance, Factors
from ..gaussian import Gaussian, full_precision

IMAGES, TEXTS = "images", "texts"
OTHER = {IMAGES: TEXTS, TEXTS: IMAGES}
HUBNESS_WEIGHT = 0.5
SCALES = (1e-3, 1e4)  # the least and the greatest
NEAR_ONE = 0.1
NEAREST, FEWEST = 0.005, 3  # the share of the captions that the crowding takes, and how many at least
PRIOR = 1e-3  # the share of true pairs among all pairs that `multiplicity` assumes
CALIBRATED_ON = 1000  # pairs of the bank, each with each
CHUNK = 10_000_000  # elements of a matrix held at a time


def renyi_entropy(logits_NM: Tensor, order: float = 1.0) -> Tensor:
    """Return Rényi's entropy of the softmax of each row, [N], in nats: Shannon's for order 1."""
    log_p_NM = logits_NM.log_softmax(dim=1)
    if order == 1:
        return torch.special.entr(log_p_NM.exp()).sum(dim=1)
    if abs(order - 1) < NEAR_ONE:  # sum_j p_j^k = 1 + sum_j p_j (p_j^(k-1) - 1), without rounding to 1
        powers_NM = ((order - 1) * log_p_NM.clamp(min=-100)).expm1()  # exp(-100) is too small to count
        return (log_p_NM.exp() * powers_NM).sum(dim=1).log1p() / (1 - order)
    return (order * log_p_NM).logsumexp(dim=1) / (1 - order)


def fitted_shift(logit_NM: Tensor, pair_NM: Tensor) -> float:
    """Return the shift by which sigmoid(logit + shift) is the probability of a pair at a prior of 1/2.

    Arguments:
        pair_NM: whether each is a pair, bool.
    """
    logit_NM = logit_NM.double()
    low, high = -logit_NM.max().item() - 50, -logit_NM.min().item() + 50
    while high - low > 1e-6:  # the mean probability grows with the shift, and is 1/2 at the best one
        shift = (low + high) / 2
        p = (logit_NM + shift).sigmoid()
        too_low = (p[pair_NM].mean() + p[~pair_NM].mean()).item() < 1
        low, high = (shift, high) if too_low else (low, shift)
    return low


@dataclass(frozen=True)
class Bank:
    """Reference pairs of one model.

    Arguments:
        images_BD, texts_BD: l2-normalised embeddings of B images and their captions, fp32; row i of both is a pair.
        scale: s, by which the model multiplies a cosine.

    Example:
        >>> bank = Bank(images_BD, texts_BD, model.logit_scale.exp().item())
        >>> bank.confusion(model.encode_text(tokens, normalize=True), "texts")  # among the images of the bank
    """

    images_BD: Tensor
    texts_BD: Tensor
    scale: float

    def __post_init__(self) -> None:
        images, texts = self.images_BD, self.texts_BD
        if images.ndim != 2 or images.shape != texts.shape or len(images) < 2:
            raise ValueError(
                "A bank needs at least two pairs: image and text embeddings of the same shape [B, D]; "
                f"got {list(images.shape)} and {list(texts.shape)}."
            )
        least, most = SCALES
        if not least <= self.scale <= most:
            raise ValueError(f"A bank needs a scale between {least:g} and {most:g}, not {self.scale}.")

    def __len__(self) -> int:
        return len(self.images_BD)

    def __getattr__(self, name: str) -> Any:
        hint = ": ask its confusion or its multiplicity" if name in ("entropy", "share") else ""  # older names
        raise AttributeError(f"A Bank has no attribute {name!r}{hint}.")

    def to(self, device: torch.device | str) -> "Bank":
        return Bank(self.images_BD.to(device), self.texts_BD.to(device), self.scale)

    def references(self, of: str) -> Tensor:
        """Return the embeddings that queries of this kind are compared with, [B, D]: those of the other modality."""
        return {IMAGES: self.texts_BD, TEXTS: self.images_BD}[of]

    def confusion(self, mean_ND: Tensor, of: str, gallery_MD: Tensor | None = None, order: float = 2.0) -> Tensor:
        """Return the effective number of items that each query is confused among, [N], between 1 and their number.

        Arguments:
            mean_ND: l2-normalised embeddings.
            of: the modality of the queries, "images" or "texts".
            gallery_MD: embeddings of the other modality, by default the references of the bank. The confusion among
                these items predicts whether the first one is right.
            order: the order of Rényi's entropy.
        """
        if gallery_MD is None:
            gallery_MD, hubness_M = self.references(of), self._own_hubness[OTHER[of]]
        else:
            gallery_MD = gallery_MD.float()
            hubness_M = self.hubness(gallery_MD, OTHER[of])
        with full_precision(mean_ND):
            parts = (self.scale * part @ gallery_MD.T - hubness_M for part in self._parts(mean_ND, len(gallery_MD)))
            return _cat([renyi_entropy(logits, order).exp() for logits in parts], mean_ND)

    def multiplicity(self, mean_ND: Tensor, of: str, gallery_MD: Tensor | None = None, prior: float = PRIOR) -> Tensor:
        """Estimate the number of items that each query is true of, [N], between 0 and the number of items.

        Arguments:
            mean_ND, of, gallery_MD: as in `confusion`.
            prior: the share of true pairs among all pairs of a query and an item. It scales the numbers and does not
                change their order.
        """
        own_BD, is_bank = {IMAGES: self.images_BD, TEXTS: self.texts_BD}[of], gallery_MD is None
        items_MD = self.references(of) if gallery_MD is None else gallery_MD.float()
        captions_MD = self.texts_BD if of == TEXTS else items_MD
        shift = self._shift + math.log(prior / (1 - prior))
        with full_precision(mean_ND):
            crowding_B, log_sum_B, first = [], [], 0
            for part in self._parts(own_BD, max(len(items_MD), len(captions_MD))):
                logits = self.scale * part @ items_MD.T + shift
                if is_bank:
                    logits.diagonal(first).fill_(-torch.inf)  # a model may have memorised the own pair
                log_sum_B.append(logsigmoid(logits).logsumexp(dim=1))
                crowding_B.append(_crowding(part, of, captions_MD, first if of == TEXTS or is_bank else None))
                first += len(part)
            x_B, y_B = torch.cat(crowding_B), torch.cat(log_sum_B)
            x, y = x_B.mean(), y_B.mean()
            slope = y_B.std() / x_B.std().clamp(min=1e-6)
            crowding_N = _cat(
                [_crowding(part, of, captions_MD) for part in self._parts(mean_ND, len(captions_MD))], mean_ND
            )
            return (slope * (crowding_N - x) + y).exp().clamp(max=len(items_MD))

    def hubness(self, mean_ND: Tensor, of: str) -> Tensor:
        """Return log mean_j exp(s cos) over the references, [N]: how much an item attracts anything."""
        references_BD = self.references(of)
        with full_precision(mean_ND):
            parts = ((self.scale * part @ references_BD.T).logsumexp(dim=1) for part in self._parts(mean_ND, len(self)))
            return _cat(list(parts), mean_ND) - math.log(len(self))

    @functools.cached_property
    def _own_hubness(self) -> dict[str, Tensor]:
        """Return the hubness of the references themselves, without their own pair, which a model may have memorised."""
        hubness = {}
        with full_precision(self.images_BD):
            for of, own_BD in ((IMAGES, self.images_BD), (TEXTS, self.texts_BD)):
                parts, first = [], 0
                for part in self._parts(own_BD, len(self)):
                    logits = self.scale * part @ self.references(of).T
                    logits.diagonal(first).fill_(-torch.inf)
                    parts.append(logits.logsumexp(dim=1))
                    first += len(part)
                hubness[of] = torch.cat(parts) - math.log(len(self) - 1)
        return hubness

    @functools.cached_property
    def _shift(self) -> float:
        """Return the shift of P in the file's docstring, at a prior of 1/2."""
        images_BD, texts_BD = self.images_BD[:CALIBRATED_ON], self.texts_BD[:CALIBRATED_ON]
        pair_BB = torch.eye(len(images_BD), dtype=torch.bool, device=images_BD.device)
        return fitted_shift(self.scale * images_BD @ texts_BD.T, pair_BB)

    def _parts(self, mean_ND: Tensor, columns: int) -> Iterator[Tensor]:
        return iter(mean_ND.float().split(max(1, CHUNK // columns)))


class HubnessCorrected(Distance):
    """The cosine distance, corrected for items that attract every query: which caption was written for the image?

        d(v, t) = 1 - mu_v . mu_t + weight h_t / s

    and the same with h_v for captions as queries, where h is the hubness in a bank. It takes the place of CSD for a
    model without variances. A calibrated variance is `a u_t = log mean_v exp(2a cos) + const`, the hubness at
    another scale.

    Reference: Bogolin et al., "Cross Modal Retrieval with Querybank Normalisation", CVPR 2022, with the weight 1.

    Arguments:
        bank: the references.
        of: the modality of the first argument of the distance, "images" or "texts".
        weight: the weight of the hubness.
    """

    trainable = False

    def __init__(self, bank: Bank, of: str = IMAGES, weight: float = HUBNESS_WEIGHT):
        self.bank, self.of, self.weight = bank, of, weight

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
        column_M = self.weight / self.bank.scale * self.bank.hubness(mean_MD, OTHER[self.of])
        return Factors(mean_ND, mean_MD, mean_ND.new_ones(len(mean_ND)), column_M)

    @property
    def transposed(self) -> Distance:
        return HubnessCorrected(self.bank, OTHER[self.of], self.weight)


class BankEntailment(Distance):
    """Is the caption true of the image? The entailment score with the bank's confusion in place of a variance.

        d(v, t) = 1 - mu_v . mu_t + (h_t - log share_t) / s

    s cos - h_t estimates log p(v, t) / (p(v) p(t)). share_t, the confusion of order 1 over the number of references,
    stands for the share of images that the caption is true of, so that the sum is the log of the probability that it
    is true. For one caption, the order of images is that of the cosine. It ranks true captions better than the cosine
    on drawn scenes, and not on photographs, where the confusion is no such share; see docs/uncertainty.md.
    """

    trainable = False

    def __init__(self, bank: Bank, of: str = IMAGES):
        self.bank, self.of = bank, of

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
        texts = mean_MD if self.of == IMAGES else mean_ND
        offset = (self.bank.hubness(texts, TEXTS) - self._log_share(texts)) / self.bank.scale
        one_N = mean_ND.new_ones(len(mean_ND))
        return Factors(mean_ND, mean_MD, one_N, offset) if self.of == IMAGES else Factors(mean_ND, mean_MD, 1 + offset)

    @property
    def transposed(self) -> Distance:
        return BankEntailment(self.bank, OTHER[self.of])

    def _log_share(self, texts_ND: Tensor) -> Tensor:
        return (self.bank.confusion(texts_ND, TEXTS, order=1.0) / len(self.bank)).log()


def _crowding(mean_ND: Tensor, of: str, captions_MD: Tensor, own: int | None = None) -> Tensor:
    """Return the crowding of each query, as the file's docstring defines it, [N].

    Arguments:
        own: the index of the first query's own caption, which those of the other queries follow; all are left out.
            None if no caption is a query's own.
    """
    cosine_NM = mean_ND.float() @ captions_MD.T
    if own is not None:
        cosine_NM.diagonal(own).fill_(-torch.inf)
    count = max(FEWEST, round(NEAREST * len(captions_MD)))
    nearest = cosine_NM.topk(min(count, len(captions_MD) - (own is not None)), dim=1)
    if of == TEXTS:
        return nearest.values.mean(dim=1)
    return captions_MD[nearest.indices].mean(dim=1).norm(dim=1)


def _cat(parts: list[Tensor], mean_ND: Tensor) -> Tensor:
    return torch.cat(parts) if parts else mean_ND.new_zeros(0, dtype=torch.float32)
