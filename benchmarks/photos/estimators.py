"""How uncertain images and captions are, by several estimators: functions of the query, and of the gallery for some."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pcmepp_openclip import Gaussian
from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.evaluation.failure import confidences

from .features import Photos
from .heads import Heads, split_rows

BANK_SIZES = (250, 1000, 4000)
ORDERS = (0.3, 0.5, 0.7, 1.0)


@dataclass(frozen=True)
class Estimator:
    """Arguments:
    name: for the table.
    images, texts: a Gaussian and the means of the gallery of the other modality to uncertainties, [N].
    sees_gallery: whether it knows the items among which the query is to find its own.
    """

    name: str
    images: Callable[[Gaussian, Tensor], Tensor]
    texts: Callable[[Gaussian, Tensor], Tensor]
    sees_gallery: bool = False


def make_bank(heads: Heads, photos: Photos, seed: int, size: int, memorised: bool = False) -> Bank:
    """Of held-out pairs, or of pairs that the means were trained on."""
    rows = split_rows(photos, seed)[0 if memorised else 1][:size]
    images, texts = heads.images(photos.views["clean"][rows]), heads.texts(photos.texts[photos.first[rows]])
    return Bank(images.mean, texts.mean, heads.scale.item())


def of_means(heads: Heads, photos: Photos, seed: int) -> Iterator[Estimator]:
    """What needs no variance."""
    scale = heads.scale.item()
    for score, words in (("max_cosine", "largest cosine"), ("max_softmax", "largest softmax"), ("entropy", "entropy")):

        def by(query: Gaussian, gallery: Tensor, score: str = score) -> Tensor:
            return -confidences(query.mean, gallery, scale)[score]

        yield Estimator(f"{words} in the gallery", by, by, sees_gallery=True)
    bank = make_bank(heads, photos, seed, BANK_SIZES[-1])
    yield Estimator(
        "**bank over the gallery**",
        lambda query, gallery: bank.confusion(query.mean, "images", gallery),
        lambda query, gallery: bank.confusion(query.mean, "texts", gallery),
        sees_gallery=True,
    )
    yield _of_bank(bank, f"**bank of {len(bank):,} held-out pairs**")
    for size in BANK_SIZES[:-1]:
        yield _of_bank(make_bank(heads, photos, seed, size), f"bank of {size:,}")
    yield _of_bank(make_bank(heads, photos, seed, BANK_SIZES[-1], memorised=True), "bank of 4,000 training pairs")
    for order in ORDERS:
        yield _of_bank(bank, f"bank, order {order:g}", order)
    halved = Bank(bank.images_BD, bank.texts_BD, scale / 2)
    yield Estimator(
        "hubness at half the scale",  # what the matching loss, tied at k = 1/2, asks of a variance
        lambda query, _: halved.hubness(query.mean, "images"),
        lambda query, _: halved.hubness(query.mean, "texts"),
    )


def _of_bank(bank: Bank, name: str, order: float = 2.0) -> Estimator:
    return Estimator(
        name,
        lambda query, _: bank.confusion(query.mean, "images", order=order),
        lambda query, _: bank.confusion(query.mean, "texts", order=order),
    )


VARIANCE = Estimator("variance", lambda query, _: query.uncertainty, lambda query, _: query.uncertainty)


def oracle(logit_NM: Tensor, image_of_text: Tensor, of: str) -> Tensor:
    """InfoNCE of the own pair, which only one who knows the answer can tell: the bound of what can be expected."""
    log_p = logit_NM.log_softmax(dim=1)
    if of == "texts":
        return -log_p.gather(1, image_of_text[:, None])[:, 0]
    own_NM = torch.arange(len(logit_NM))[:, None] == image_of_text
    return -log_p.masked_fill(~own_NM, -torch.inf).logsumexp(dim=1)
