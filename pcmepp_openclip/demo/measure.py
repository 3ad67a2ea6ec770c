"""What the uncertainty of a model means, in numbers, on pairs whose true matches are known.

numbers = dict(measure(images, texts, truth, bank, match_scale))

The numbers of the variance have plain names, those of the bank begin with "bank/"; `goals` says which are wanted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ambiguity import Bank, BankEntailment, HubnessCorrected
from ..distances import CSD, Cosine, Distance, Entailment
from ..evaluation.retrieval import precisions
from ..evaluation.uncertainty import auroc, bin_correlation, spearman
from ..gaussian import Gaussian
from .goals import ESTIMATORS
from .scenes import CONDITIONS, COVERS

Numbers = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Truth:
    """What is known of N images and M captions.

    Arguments:
        fits_MN: whether a caption is true of an image, bool.
        own_M: the image that a caption was written for, its label in training and in most benchmarks.
        text_M: a number for each wording: captions of the same words are one and the same.
        words_M: how many words a caption has.
        things_N: how many things an image shows, or would.
        visible_N: how many of them are not behind a cover.
        condition_N: "clean", "blurred" or "covered".
        cover_N: what it is covered with, "none" for those that are not.
    """

    fits_MN: Tensor
    own_M: Tensor
    text_M: Tensor
    words_M: Tensor
    things_N: Tensor
    visible_N: Tensor
    condition_N: Sequence[str]
    cover_N: Sequence[str]

    @property
    def own_MN(self) -> Tensor:
        """Whether a caption was written for an image."""
        own_MN = torch.zeros_like(self.fits_MN)
        own_MN[torch.arange(len(own_MN)), self.own_M] = True
        return own_MN

    @property
    def own_NM(self) -> Tensor:
        """Whether a caption is of the same words as one that was written for the image."""
        own_NT = torch.zeros(self.fits_MN.shape[1], int(self.text_M.max()) + 1, dtype=torch.bool)
        own_NT[self.own_M, self.text_M] = True
        return own_NT[:, self.text_M]

    @property
    def each_T(self) -> Tensor:
        """One caption of each wording."""
        return torch.tensor(list({text: i for i, text in enumerate(self.text_M.tolist())}.values()))


@dataclass(frozen=True)
class Estimator:
    """What says how uncertain an input is, and the two scores that are made of it.

    Arguments:
        image_N, text_M: the uncertainties: the sum of the variances, or the confusion.
        multiplicity_M: the more images a caption fits, the larger; captions are ranked by it if no image is known.
        csd: which caption was written for the image? Images first; `transposed` ranks images for a caption.
        entailment: is the caption true of the image? Images first.
    """

    image_N: Tensor
    text_M: Tensor
    multiplicity_M: Tensor
    csd: Distance
    entailment: Distance


def by_variance(images: Gaussian, texts: Gaussian, match_scale: float, clip_scale: float) -> Estimator:
    """The sum of the variances, which the model has learned."""
    entailment = Entailment.of_scales(match_scale, clip_scale)
    return Estimator(images.uncertainty, texts.uncertainty, texts.uncertainty, CSD(), entailment)


def by_bank(images: Gaussian, texts: Gaussian, bank: Bank) -> Estimator:
    """The confusion among reference pairs, and the multiplicity, which need the means alone."""
    image_N, text_M = bank.confusion(images.mean, "images"), bank.confusion(texts.mean, "texts")
    multiplicity_M = bank.multiplicity(texts.mean, "texts")
    return Estimator(image_N, text_M, multiplicity_M, HubnessCorrected(bank), BankEntailment(bank))


def measure(images: Gaussian, texts: Gaussian, truth: Truth, bank: Bank, match_scale: float) -> Numbers:
    """(name, value) of all numbers. Two notions of a hit, since a caption may fit more images than its own:

    - `own`: the first item is the one that the query was paired with, as in the paper's and in most R@1. A vague
      caption cannot do that, however good the model; it is the notion under which uncertainty should predict failure.
      The items are ranked by the mean, in `csd_bins` by CSD, as in the paper, or for the bank by the cosine that is
      corrected for hubness.
    - `any_match`: the first item truly fits the query. "a shape" cannot fail, so that is no measure of its uncertainty.

    An image's own captions are all of the same words as one that was written for it. Of items that tie, one is taken
    to be drawn. Numbers of `wording` and the rank correlation of captions count each wording once.

    What needs no estimator stands beside: the shortness of a caption (`caption_shortness_spearman`), the largest cosine
    (`cosine_bins`, `cosine_miss_auroc`), the prior alone, which ranks captions without an image
    (`wording_prior_mAP@R`), and the true share of images in its place (`wording_oracle_mAP@R`).

    Arguments:
        bank: reference pairs of the same model, none of them held out.
        match_scale: a of the matching logit.
    """
    yield from _of_means(images, texts, truth, bank.scale)
    estimators = (by_variance(images, texts, match_scale, bank.scale), by_bank(images, texts, bank))
    for prefix, estimator in zip(ESTIMATORS.values(), estimators, strict=True):
        for part in (_of_captions, _of_images):
            yield from ((prefix + name, value) for name, value in part(estimator, truth))
        yield from ((prefix + name, value) for name, value in _of_retrieval(estimator, images, texts, truth))
    missed = _missed(images, texts, truth)
    for name, of, query, gallery in (
        ("text_to_image", "texts", texts, images),
        ("image_to_text", "images", images, texts),
    ):
        confusion_Q = bank.confusion(query.mean, of, gallery.mean)
        yield f"bank/{name}_gallery_miss_auroc", auroc(confusion_Q, missed[name])


def _of_means(images: Gaussian, texts: Gaussian, truth: Truth, scale: float) -> Numbers:
    """What the cosine of the means gives, chance, and what knows the truth."""
    cosine_MN = texts.mean @ images.mean.T
    missed, own_hits = _missed(images, texts, truth), []
    for name, score, fits, own in (
        ("text_to_image", cosine_MN, truth.fits_MN, truth.own_MN),
        ("image_to_text", cosine_MN.T, truth.fits_MN.T, truth.own_NM),
    ):
        hit_own, largest = first_is(score, own), score.amax(dim=1)
        own_hits.append(hit_own.mean().item())
        yield f"{name}_own_R@1", own_hits[-1]
        yield f"{name}_own_R@1_chance", own.float().mean().item()
        yield f"{name}_any_match_R@1", first_is(score, fits).mean().item()
        yield f"{name}_any_match_R@1_chance", fits.float().mean().item()
        yield f"{name}_mAP@R", map_at_r(score, fits)
        drawn = torch.rand(score.shape, generator=torch.Generator().manual_seed(0))
        yield f"{name}_mAP@R_chance", map_at_r(drawn, fits)
        yield f"{name}_cosine_bins", bin_correlation(-largest, hit_own)
        yield f"{name}_cosine_miss_auroc", auroc(-largest, missed[name])
    yield "own_R@1", sum(own_hits) / 2
    each_T = truth.each_T
    fits_NT, cosine_NT = truth.fits_MN[each_T].T, cosine_MN[each_T].T
    number_T = fits_NT.sum(dim=0)
    yield "caption_shortness_spearman", spearman(-truth.words_M[each_T], number_T)
    oracle_NT = scale * cosine_NT + number_T.clamp(min=1).log()
    for kind, score_NT in (("", cosine_NT), ("oracle_", oracle_NT)):
        yield f"wording_{kind}mAP@R", map_at_r(score_NT, fits_NT)
        yield f"wording_{kind}auroc", auroc(score_NT.flatten(), fits_NT.flatten())
    paper = torch.tensor([cover == COVERS[0] for cover in truth.cover_N])
    either = paper | _is(truth, "clean")
    yield "covered_by_paper_auroc_ceiling", auroc(-truth.visible_N[either], paper[either])


def _of_captions(estimator: Estimator, truth: Truth) -> Numbers:
    """How many images does a caption fit?"""
    each_T = truth.each_T
    yield "caption_matches_spearman", spearman(estimator.multiplicity_M[each_T], truth.fits_MN[each_T].sum(dim=1))


def _of_images(estimator: Estimator, truth: Truth) -> Numbers:
    """Are images uncertain that show less? AUROC against clean images, whatever their number of things and of as many
    things, since a scene of one thing says less than one of two, seen clearly or not."""
    lost = {condition: _is(truth, condition) for condition in CONDITIONS[1:]}
    lost |= {f"covered_by_{c}": torch.tensor([cover == c for cover in truth.cover_N]) for c in COVERS}
    for name, lost_N in lost.items():
        either = lost_N | _is(truth, "clean")
        yield f"{name}_auroc", auroc(estimator.image_N[either], lost_N[either])
        for number in (1, 2):
            same = either & (truth.things_N == number)
            yield f"{name}_auroc_of_{number}", auroc(estimator.image_N[same], lost_N[same])


def _of_retrieval(estimator: Estimator, images: Gaussian, texts: Gaussian, truth: Truth) -> Numbers:
    """Do uncertain queries fail, and what do the two scores give in place of the cosine?"""
    cosine_MN = texts.mean @ images.mean.T
    csd_MN, csd_NM = -estimator.csd.transposed.matrix(texts, images), -estimator.csd.matrix(images, texts)
    missed, gains = _missed(images, texts, truth), []
    for name, uncertainty_Q, score, csd, fits, own in (
        ("text_to_image", estimator.text_M, cosine_MN, csd_MN, truth.fits_MN, truth.own_MN),
        ("image_to_text", estimator.image_N, cosine_MN.T, csd_NM, truth.fits_MN.T, truth.own_NM),
    ):
        hit_mean, hit_csd = first_is(score, own), first_is(csd, own)
        yield f"{name}_bins", bin_correlation(uncertainty_Q, hit_mean)
        yield f"{name}_csd_bins", bin_correlation(uncertainty_Q, hit_csd)
        yield f"{name}_any_match_bins", bin_correlation(uncertainty_Q, first_is(score, fits))
        yield f"{name}_miss_auroc", auroc(uncertainty_Q, missed[name])
        yield f"{name}_csd_own_R@1", hit_csd.mean().item()
        yield f"{name}_csd_mAP@R", map_at_r(csd, fits)
        gains.append((hit_csd.mean() - hit_mean.mean()).item())
    yield "csd_gain_R@1", sum(gains) / 2
    each_T = truth.each_T
    fits_NT, some = truth.fits_MN[each_T].T, Gaussian(texts.mean[each_T], texts.logvar[each_T])
    scores = {
        "csd": csd_NM[:, each_T],
        "entailment": -estimator.entailment.matrix(images, some),
        "prior": estimator.multiplicity_M[each_T].expand(fits_NT.shape),
    }
    for name, score_NT in scores.items():
        yield f"wording_{name}_mAP@R", map_at_r(score_NT, fits_NT)
        yield f"wording_{name}_auroc", auroc(score_NT.flatten(), fits_NT.flatten())
    by_mean = map_at_r(cosine_MN[each_T].T, fits_NT)
    yield "entailment_gain_mAP@R", map_at_r(scores["entailment"], fits_NT) - by_mean


def _missed(images: Gaussian, texts: Gaussian, truth: Truth) -> dict[str, Tensor]:
    """Which queries do not find their own item first, by the mean."""
    cosine_MN = -Cosine().matrix(texts, images)
    hits = {"text_to_image": first_is(cosine_MN, truth.own_MN), "image_to_text": first_is(cosine_MN.T, truth.own_NM)}
    return {name: hit < 0.5 for name, hit in hits.items()}


def _is(truth: Truth, condition: str) -> Tensor:
    return torch.tensor([found == condition for found in truth.condition_N])


def first_is(score_QG: Tensor, wanted_QG: Tensor) -> Tensor:
    """The share of wanted items among those of the highest score, [Q]: 0 or 1 but for ties."""
    first_QG = score_QG == score_QG.amax(dim=1, keepdim=True)
    return (first_QG & wanted_QG).sum(dim=1) / first_QG.sum(dim=1)


def map_at_r(score_QG: Tensor, fits_QG: Tensor) -> float:
    """mAP@R over queries, each of which must have an item that fits."""
    order_QG = score_QG.argsort(dim=1, descending=True, stable=True)
    return precisions(fits_QG.gather(1, order_QG), fits_QG.sum(dim=1))[0].mean().item()
