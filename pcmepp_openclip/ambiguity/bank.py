"""How ambiguous an image or a caption is to any CLIP, from its embeddings alone: what it would find among references.

    p_j   = softmax_j(s cos(q, r_j) - h_j)                 over the references r_j of the other modality
    h_j   = log mean_i exp(s cos(r_j, q_i))                how much r_j attracts anything, its hubness
    H     = -sum_j p_j log p_j                             the ambiguity of the query q

exp(H) is a perplexity: the effective number of references that the query fits, and exp(H) / B is their share.

The theory: InfoNCE drives `s cos` to log p(v, t) / (p(v) p(t)) up to a constant per row and column. Subtracting h and
taking the softmax removes these constants. For a caption that is true of some images and says nothing else, p is
uniform over these images, and exp(H) is their number.

The variance of PCME++ is not normalised in this way: its calibration, sum_v sigmoid(y) = 1, makes it grow with all
cosines of a sample. Blurred photographs have small cosines with every caption, so it asks for a small variance.

H is Rényi's entropy of order 1. Order k is log(sum_j p_j^k) / (1 - k); a lower order is better at lost detail and a
higher one at misses, see docs/notes/photographs.md.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distances import Distance, Factors
from ..gaussian import Gaussian, full_precision

IMAGES, TEXTS = "images", "texts"
OTHER = {IMAGES: TEXTS, TEXTS: IMAGES}
ORDER = 1.0
HUBNESS_WEIGHT = 0.5
ORDERS = (0.01, 100.0)  # the least and the greatest
SCALES = (1e-3, 1e4)
NEAR_ONE = 0.1
CHUNK = 10_000_000  # elements of a matrix held at a time


def renyi_entropy(logits_NM: Tensor, order: float = ORDER) -> Tensor:
    """Rényi's entropy of the softmax of each row, [N], in nats: Shannon's for order 1."""
    log_p_NM = logits_NM.log_softmax(dim=1)
    if order == 1:
        return torch.special.entr(log_p_NM.exp()).sum(dim=1)
    if abs(order - 1) < NEAR_ONE:  # sum_j p_j^k = 1 + sum_j p_j (p_j^(k-1) - 1), without rounding to 1
        powers_NM = ((order - 1) * log_p_NM.clamp(min=-100)).expm1()  # exp(-100) is too small to count
        return (log_p_NM.exp() * powers_NM).sum(dim=1).log1p() / (1 - order)
    return (order * log_p_NM).logsumexp(dim=1) / (1 - order)


@dataclass(frozen=True)
class Bank:
    """Reference pairs of one model.

    Arguments:
        images_BD, texts_BD: l2-normalised embeddings of B images and their captions, fp32; row i of both is a pair.
        scale: s, by which the model multiplies a cosine.
        order: of the entropy.

    Example:
        >>> bank = Bank(images_BD, texts_BD, model.logit_scale.exp().item())
        >>> bank.share(model.encode_text(tokens, normalize=True), "texts")  # of the images that each caption fits
    """

    images_BD: Tensor
    texts_BD: Tensor
    scale: float
    order: float = ORDER

    def __post_init__(self) -> None:
        images, texts = self.images_BD, self.texts_BD
        if images.ndim != 2 or images.shape != texts.shape or len(images) < 2:
            raise ValueError(
                "A bank needs at least two pairs: image and text embeddings of the same shape [B, D]; "
                f"got {list(images.shape)} and {list(texts.shape)}."
            )
        for name, value, (least, most) in (("a scale", self.scale, SCALES), ("an order", self.order, ORDERS)):
            if not least <= value <= most:
                raise ValueError(f"A bank needs {name} between {least:g} and {most:g}, not {value}.")

    def __len__(self) -> int:
        return len(self.images_BD)

    def to(self, device: torch.device | str) -> "Bank":
        return Bank(self.images_BD.to(device), self.texts_BD.to(device), self.scale, self.order)

    def references(self, of: str) -> Tensor:
        """The embeddings that queries of this kind are compared with, [B, D]: those of the other modality."""
        return {IMAGES: self.texts_BD, TEXTS: self.images_BD}[of]

    def entropy(self, mean_ND: Tensor, of: str, gallery_MD: Tensor | None = None) -> Tensor:
        """The ambiguity of each query in nats, [N]. Only its order matters to most uses; `share` gives it a unit.

        Arguments:
            mean_ND: l2-normalised embeddings.
            of: what they are, "images" or "texts".
            gallery_MD: embeddings of the other modality, to ask how ambiguous the query is among these items: what
                predicts whether their first one is right. By default the references of the bank.
        """
        if gallery_MD is None:
            gallery_MD, hubness_M = self.references(of), self._own_hubness[OTHER[of]]
        else:
            gallery_MD = gallery_MD.float()
            hubness_M = self.hubness(gallery_MD, OTHER[of])
        with full_precision(mean_ND):
            parts = (self.scale * part @ gallery_MD.T - hubness_M for part in self._parts(mean_ND, len(gallery_MD)))
            return _cat([renyi_entropy(logits, self.order) for logits in parts], mean_ND)

    def share(self, mean_ND: Tensor, of: str) -> Tensor:
        """The effective share of references that each query fits, [N], between 1 / B and 1: exp(entropy) / B."""
        return (self.entropy(mean_ND, of) - math.log(len(self))).exp()

    def hubness(self, mean_ND: Tensor, of: str) -> Tensor:
        """log mean_j exp(s cos) over the references, [N]: how much an item attracts anything."""
        references_BD = self.references(of)
        with full_precision(mean_ND):
            parts = ((self.scale * part @ references_BD.T).logsumexp(dim=1) for part in self._parts(mean_ND, len(self)))
            return _cat(list(parts), mean_ND) - math.log(len(self))

    @functools.cached_property
    def _own_hubness(self) -> dict[str, Tensor]:
        """Of the references themselves, without their own pair, which a model may have memorised."""
        found = {}
        with full_precision(self.images_BD):
            for of, own_BD in ((IMAGES, self.images_BD), (TEXTS, self.texts_BD)):
                parts, first = [], 0
                for part in self._parts(own_BD, len(self)):
                    logits = self.scale * part @ self.references(of).T
                    logits.diagonal(first).fill_(-torch.inf)
                    parts.append(logits.logsumexp(dim=1))
                    first += len(part)
                found[of] = torch.cat(parts) - math.log(len(self) - 1)
        return found

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
        of: what the first argument of the distance is, "images" or "texts".
        weight: of the hubness.
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
    """Is the caption true of the image? The entailment score with the bank's share in place of a variance.

        d(v, t) = 1 - mu_v . mu_t + (h_t - log share_t) / s

    s cos - h_t estimates log p(v, t) / (p(v) p(t)), and adding the log of the share of images that the caption fits
    gives the log of the probability that it is true. For one caption, the order of images is that of the cosine.
    """

    trainable = False

    def __init__(self, bank: Bank, of: str = IMAGES):
        self.bank, self.of = bank, of

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors:
        mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
        texts = mean_MD if self.of == IMAGES else mean_ND
        offset = (self.bank.hubness(texts, TEXTS) - self.bank.share(texts, TEXTS).log()) / self.bank.scale
        one_N = mean_ND.new_ones(len(mean_ND))
        return Factors(mean_ND, mean_MD, one_N, offset) if self.of == IMAGES else Factors(mean_ND, mean_MD, 1 + offset)

    @property
    def transposed(self) -> Distance:
        return BankEntailment(self.bank, OTHER[self.of])


def _cat(parts: list[Tensor], mean_ND: Tensor) -> Tensor:
    return torch.cat(parts) if parts else mean_ND.new_zeros(0, dtype=torch.float32)
