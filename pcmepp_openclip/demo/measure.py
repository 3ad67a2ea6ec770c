"""The meaning of a model's uncertainty, in numbers, on pairs whose true matches are known.

numbers = dict(measure(images, texts, truth, bank, match_scale))

The numbers of the variance have plain names, those of the bank begin with "bank/"; `goals` says which are wanted.
`result_of` has all that they need of a trained model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ambiguity import Bank, BankEntailment, HubnessCorrected
from ..data.captioned import read_captioned
from ..distances import CSD, Distance, Entailment
from ..encode.encode import Encoder
from ..encode.load import load_model
from ..evaluation.retrieval import precisions
from ..evaluation.uncertainty import auroc, bin_correlation, spearman
from ..gaussian import Gaussian
from ..models.pcmepp import ProbabilisticModel
from .command import HELD_OUT, MODEL, Seed
from .dataset import CAPTIONS_PER_IMAGE, HeldOut, draw_held_out
from .drawing import visible
from .goals import ESTIMATORS
from .scenes import COVERS, fitting

BANK = 2000  # training pairs that the bank is made of
LOST = ("blurred", "covered", *(f"covered_by_{cover}" for cover in COVERS))  # images of which less can be seen
Numbers = Iterator[tuple[str, float]]


@dataclass(frozen=True)
class Truth:
    """The facts of N images and M captions.

    Arguments:
        fits_MN: whether a caption is true of an image, bool.
        own_M: the image that a caption was written for, its label in training and in most benchmarks.
        text_M: a number for each wording: captions of the same words are one and the same.
        words_M: how many words a caption has.
        things_N: how many things an image shows, or would.
        visible_N: how many of them are not behind a cover.
        kind_N: "clean" or one of `LOST`, with its cover if it is covered.
    """

    fits_MN: Tensor
    own_M: Tensor
    text_M: Tensor
    words_M: Tensor
    things_N: Tensor
    visible_N: Tensor
    kind_N: Sequence[str]

    @property
    def own_MN(self) -> Tensor:
        """Return whether a caption was written for an image."""
        own_MN = torch.zeros_like(self.fits_MN)
        own_MN[torch.arange(len(own_MN)), self.own_M] = True
        return own_MN

    @property
    def own_NM(self) -> Tensor:
        """Return whether a caption is of the same words as one that was written for the image."""
        own_NT = torch.zeros(self.fits_MN.shape[1], int(self.text_M.max()) + 1, dtype=torch.bool)
        own_NT[self.own_M, self.text_M] = True
        return own_NT[:, self.text_M]

    @property
    def each_T(self) -> Tensor:
        """Return the index of one caption of each wording."""
        return torch.tensor(list({text: i for i, text in enumerate(self.text_M.tolist())}.values()))

    def shows(self, kind: str) -> Tensor:
        """Return whether an image is of a kind: "covered" stands for all covers."""
        return torch.tensor([each.startswith(kind) for each in self.kind_N])


def truth_of(held_out: HeldOut) -> Truth:
    scenes, captions = held_out.scenes, [str(caption) for caption in held_out.captions]
    wording = {text: number for number, text in enumerate(sorted(set(captions)))}
    return Truth(
        fits_MN=torch.from_numpy(fitting(held_out.captions, scenes)),
        own_M=torch.arange(len(captions)) // CAPTIONS_PER_IMAGE,
        text_M=torch.tensor([wording[text] for text in captions]),
        words_M=torch.tensor([len(text.split()) for text in captions]),
        things_N=torch.tensor([len(scene.things) for scene in scenes]),
        visible_N=torch.tensor([visible(scene) for scene in scenes]),
        kind_N=[scene.condition + f"_by_{scene.cover}" * (scene.condition == "covered") for scene in scenes],
    )


class Estimator(NamedTuple):
    """An estimate of how uncertain each input is, and the two scores that are made of it.

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


def estimators(images: Gaussian, texts: Gaussian, bank: Bank, match_scale: float) -> dict[str, Estimator]:
    """Return the estimators of `goals.ESTIMATORS`: the sum of the variances, which the model has learned, and the
    confusion among reference pairs, which needs the means alone."""
    image_N, text_M = (bank.confusion(x.mean, of) for x, of in ((images, "images"), (texts, "texts")))
    multiplicity_M, entailment = bank.multiplicity(texts.mean, "texts"), Entailment.of_scales(match_scale, bank.scale)
    return {
        "variance": Estimator(images.uncertainty, texts.uncertainty, texts.uncertainty, CSD(), entailment),
        "bank": Estimator(image_N, text_M, multiplicity_M, HubnessCorrected(bank), BankEntailment(bank)),
    }


class Direction(NamedTuple):
    """A direction of retrieval: the cosines of Q queries with G items, and which items fit or are the query's own."""

    name: str
    score_QG: Tensor
    fits_QG: Tensor
    own_QG: Tensor

    @property
    def hit_Q(self) -> Tensor:
        """Return whether the own item comes first by the mean."""
        return first_is(self.score_QG, self.own_QG)

    @property
    def missed_Q(self) -> Tensor:
        return self.hit_Q < 0.5


def measure(images: Gaussian, texts: Gaussian, truth: Truth, bank: Bank, match_scale: float) -> Numbers:
    """Yield the name and the value of each number. There are two notions of a hit, since a caption may fit more images
    than its own:

    - `own`: the first item is the one that the query was paired with, as in the paper's and in most R@1. A vague
      caption cannot do that, however good the model; it is the notion under which uncertainty should predict failure.
      The items are ranked by the mean, in `csd_bins` by CSD, as in the paper, or for the bank by the cosine that is
      corrected for hubness.
    - `any_match`: the first item truly fits the query. "a shape" cannot fail, so that is no measure of its uncertainty.

    An image's own captions are all of the same words as one that was written for it. Of items that tie, one is taken
    to be drawn. Numbers of `wording` and the rank correlation of captions count each wording once.

    Some numbers need no estimator: the shortness of a caption (`caption_shortness_spearman`), the largest cosine
    (`cosine_bins`, `cosine_miss_auroc`), the prior alone, which ranks captions without an image
    (`wording_prior_mAP@R`), and the true share of images in its place (`wording_oracle_mAP@R`).

    Arguments:
        bank: reference pairs of the same model, none of them held out.
        match_scale: a of the matching logit.
    """
    cosine_MN = texts.mean @ images.mean.T
    to_image = Direction("text_to_image", cosine_MN, truth.fits_MN, truth.own_MN)
    to_text = Direction("image_to_text", cosine_MN.T, truth.fits_MN.T, truth.own_NM)
    yield from _of_means((to_image, to_text), truth, bank.scale)
    for name, estimator in estimators(images, texts, bank, match_scale).items():
        parts = (*_of_inputs(estimator, truth), *_of_retrieval(estimator, images, texts, (to_image, to_text), truth))
        yield from ((ESTIMATORS[name] + part, value) for part, value in parts)
    for direction, of, query, gallery in ((to_image, "texts", texts, images), (to_text, "images", images, texts)):
        confusion_Q = bank.confusion(query.mean, of, gallery.mean)
        yield f"bank/{direction.name}_gallery_miss_auroc", auroc(confusion_Q, direction.missed_Q)


def _of_means(directions: Sequence[Direction], truth: Truth, scale: float) -> Numbers:
    """Yield the numbers of the cosine of the means, of chance, and of estimators that know the truth."""
    for direction in directions:
        name, score, fits, own = direction
        largest_Q, drawn = score.amax(dim=1), torch.rand(score.shape, generator=torch.Generator().manual_seed(0))
        yield f"{name}_own_R@1", direction.hit_Q.mean().item()
        yield f"{name}_own_R@1_chance", own.float().mean().item()
        yield f"{name}_any_match_R@1", first_is(score, fits).mean().item()
        yield f"{name}_any_match_R@1_chance", fits.float().mean().item()
        yield f"{name}_mAP@R", map_at_r(score, fits)
        yield f"{name}_mAP@R_chance", map_at_r(drawn, fits)
        yield f"{name}_cosine_bins", bin_correlation(-largest_Q, direction.hit_Q)
        yield f"{name}_cosine_miss_auroc", auroc(-largest_Q, direction.missed_Q)
    yield "own_R@1", sum(direction.hit_Q.mean().item() for direction in directions) / 2
    each_T, cosine_MN = truth.each_T, directions[0].score_QG
    fits_NT, cosine_NT = truth.fits_MN[each_T].T, cosine_MN[each_T].T
    number_T = fits_NT.sum(dim=0)
    yield "caption_shortness_spearman", spearman(-truth.words_M[each_T], number_T)
    yield from _of_wordings("", cosine_NT, fits_NT)
    yield from _of_wordings("oracle_", scale * cosine_NT + number_T.clamp(min=1).log(), fits_NT)
    paper = truth.shows("covered_by_paper")
    either = paper | truth.shows("clean")
    yield "covered_by_paper_auroc_ceiling", auroc(-truth.visible_N[either], paper[either])


def _of_wordings(name: str, score_NT: Tensor, fits_NT: Tensor) -> Numbers:
    """Yield how well a score tells whether a caption is true of an image; each wording counts once."""
    yield f"wording_{name}mAP@R", map_at_r(score_NT, fits_NT)
    yield f"wording_{name}auroc", auroc(score_NT.flatten(), fits_NT.flatten())


def _of_inputs(estimator: Estimator, truth: Truth) -> Numbers:
    """Yield whether captions that fit more images are told from others, and whether images are uncertain that show
    less: the AUROC against clean images, whatever their number of things and of as many things, since a scene of one
    thing says less than one of two, seen clearly or not."""
    each_T, clean_N = truth.each_T, truth.shows("clean")
    yield "caption_matches_spearman", spearman(estimator.multiplicity_M[each_T], truth.fits_MN[each_T].sum(dim=1))
    for name in LOST:
        lost_N = truth.shows(name)
        either = lost_N | clean_N
        yield f"{name}_auroc", auroc(estimator.image_N[either], lost_N[either])
        for number in (1, 2):
            same = either & (truth.things_N == number)
            yield f"{name}_auroc_of_{number}", auroc(estimator.image_N[same], lost_N[same])


def _of_retrieval(
    estimator: Estimator, images: Gaussian, texts: Gaussian, directions: Sequence[Direction], truth: Truth
) -> Numbers:
    """Yield whether uncertain queries fail, and how good the two scores are in place of the cosine."""
    csd_MN, csd_NM = -estimator.csd.transposed.matrix(texts, images), -estimator.csd.matrix(images, texts)
    gain = 0.0
    for direction, uncertainty_Q, csd_QG in zip(
        directions, (estimator.text_M, estimator.image_N), (csd_MN, csd_NM), strict=True
    ):
        name, score, fits, own = direction
        hit_csd = first_is(csd_QG, own)
        yield f"{name}_bins", bin_correlation(uncertainty_Q, direction.hit_Q)
        yield f"{name}_csd_bins", bin_correlation(uncertainty_Q, hit_csd)
        yield f"{name}_any_match_bins", bin_correlation(uncertainty_Q, first_is(score, fits))
        yield f"{name}_miss_auroc", auroc(uncertainty_Q, direction.missed_Q)
        yield f"{name}_csd_own_R@1", hit_csd.mean().item()
        yield f"{name}_csd_mAP@R", map_at_r(csd_QG, fits)
        gain += (hit_csd.mean() - direction.hit_Q.mean()).item() / 2
    yield "csd_gain_R@1", gain
    each_T = truth.each_T
    fits_NT, some = truth.fits_MN[each_T].T, Gaussian(texts.mean[each_T], texts.logvar[each_T])
    entailment_NT = -estimator.entailment.matrix(images, some)
    yield from _of_wordings("csd_", csd_NM[:, each_T], fits_NT)
    yield from _of_wordings("entailment_", entailment_NT, fits_NT)
    yield from _of_wordings("prior_", estimator.multiplicity_M[each_T].expand(fits_NT.shape), fits_NT)
    by_mean = map_at_r(directions[0].score_QG[each_T].T, fits_NT)
    yield "entailment_gain_mAP@R", map_at_r(entailment_NT, fits_NT) - by_mean


def first_is(score_QG: Tensor, wanted_QG: Tensor) -> Tensor:
    """Return the share of wanted items among those of the highest score, [Q]: 0 or 1 but for ties."""
    first_QG = score_QG == score_QG.amax(dim=1, keepdim=True)
    return (first_QG & wanted_QG).sum(dim=1) / first_QG.sum(dim=1)


def map_at_r(score_QG: Tensor, fits_QG: Tensor) -> float:
    """Return mAP@R over queries, each of which must have an item that fits."""
    order_QG = score_QG.argsort(dim=1, descending=True, stable=True)
    return precisions(fits_QG.gather(1, order_QG), fits_QG.sum(dim=1))[0].mean().item()


@dataclass(frozen=True)
class Result:
    """A model, its bank, and the held-out scenes with the facts and the Gaussians of their images and captions."""

    model: ProbabilisticModel
    bank: Bank
    held_out: HeldOut
    truth: Truth
    images: Gaussian
    texts: Gaussian

    @property
    def numbers(self) -> dict[str, float]:
        return dict(measure(self.images, self.texts, self.truth, self.bank, self.model.match_scale.item()))

    @property
    def estimators(self) -> dict[str, Estimator]:
        return estimators(self.images, self.texts, self.bank, self.model.match_scale.item())


def result_of(seed: Seed) -> Result:
    """Encode the held-out scenes and the first training pairs, which are the bank, by the model of a seed."""
    loaded = load_model(MODEL, str(seed.checkpoint), device="cpu")
    encoder = Encoder(loaded, seed.folder / "embeddings")
    held_out = draw_held_out(HELD_OUT, seed.number)
    data = read_captioned(str(seed.data / "retrieval"))
    images, texts = encoder.images(data.images), encoder.texts(data.captions, "captions")
    seen = read_captioned(str(seed.data / "train" / "00000.tar"), flag="--train-data")
    references = encoder.images(seen.images[:BANK], "bank-images"), encoder.texts(seen.captions[:BANK], "bank-captions")
    bank = Bank(references[0].mean, references[1].mean, loaded.scale)
    return Result(loaded.model, bank, held_out, truth_of(held_out), images, texts)
