"""What the uncertainty of a model means, in numbers, on pairs whose true matches are known.

numbers = dict(measure(images, texts, truth))
for target in GOALS: target.reached(numbers[target.name])
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distances import DISTANCES
from ..evaluation.retrieval import precisions
from ..evaluation.uncertainty import auroc, bin_correlation, spearman
from ..gaussian import Gaussian
from .scenes import CONDITIONS


@dataclass(frozen=True)
class Truth:
    """What is known of N images and M captions.

    Arguments:
        fits_MN: whether a caption is true of an image, bool.
        own_M: the image that a caption was written for, its label in training and in most benchmarks.
        text_M: a number for each wording: captions of the same words are one and the same.
        words_M: how many words a caption has.
        things_N: how many things an image shows, or would.
        condition_N: "clean", "blurred" or "covered".
    """

    fits_MN: Tensor
    own_M: Tensor
    text_M: Tensor
    words_M: Tensor
    things_N: Tensor
    condition_N: list[str]


@dataclass(frozen=True)
class Goal:
    """A number of `measure` and the value that one would like it to have: at least, or at most if `below`."""

    name: str
    value: float
    words: str
    below: bool = False

    def reached(self, value: float) -> bool:
        return value <= self.value if self.below else value >= self.value


GOALS = (
    Goal("caption_uncertainty_spearman", 0.8, "captions that fit more images are more uncertain (Spearman)"),
    Goal("blurred_auroc", 0.8, "blurred images are more uncertain than clean ones (AUROC)"),
    Goal("covered_auroc", 0.8, "half covered images are more uncertain than clean ones (AUROC)"),
    Goal("csd_gain_mAP@R", 0.0, "ranking by CSD is not worse than by the mean (difference of mAP@R)"),
    Goal("text_to_image_bins", -0.8, "uncertain captions find their own image less often (10 bins)", below=True),
    Goal("image_to_text_bins", -0.8, "uncertain images find their own caption less often (10 bins)", below=True),
)


def measure(images: Gaussian, texts: Gaussian, truth: Truth) -> Iterator[tuple[str, float]]:
    """(name, value) of all numbers. Two notions of a hit, since a caption may fit more images than its own:

    - `own`: the first item is the one that the query was paired with, as in the paper's and in most R@1. A vague
      caption cannot do that, however good the model; it is the notion under which uncertainty should predict failure.
      The items are ranked by the mean, in `csd_bins` by CSD, as in the paper.
    - `true`: the first item truly fits the query. "a shape" cannot fail, so that is no measure of its uncertainty.

    An image's own captions are all of the same words as one that was written for it. Of items that tie, one is taken
    to be drawn. The rank correlation of captions counts each wording once; that of a caption's shortness is what no
    model is needed for.
    """
    fits_MN, own_MN = truth.fits_MN, torch.zeros_like(truth.fits_MN)
    own_MN[torch.arange(len(own_MN)), truth.own_M] = True
    own_NT = torch.zeros(own_MN.shape[1], int(truth.text_M.max()) + 1, dtype=torch.bool)
    own_NT[truth.own_M, truth.text_M] = True
    cosine_MN, csd_MN = (-DISTANCES[name].matrix(texts, images) for name in ("cosine", "csd"))
    by_csd = {"text_to_image": csd_MN, "image_to_text": csd_MN.T}
    gains = []
    for name, query, score, fits, own in (
        ("text_to_image", texts, cosine_MN, fits_MN, own_MN),
        ("image_to_text", images, cosine_MN.T, fits_MN.T, own_NT[:, truth.text_M]),
    ):
        hit_own, hit_true = first_is(score, own), first_is(score, fits)
        yield f"{name}_own_R@1", hit_own.mean().item()
        yield f"{name}_own_R@1_chance", own.float().mean().item()
        yield f"{name}_any_match_R@1", hit_true.mean().item()
        yield f"{name}_any_match_R@1_chance", fits.float().mean().item()
        by_mean, by_distance = map_at_r(score, fits), map_at_r(by_csd[name], fits)
        yield f"{name}_mAP@R", by_mean
        yield f"{name}_csd_mAP@R", by_distance
        yield (
            f"{name}_mAP@R_chance",
            map_at_r(torch.rand(score.shape, generator=torch.Generator().manual_seed(0)), fits),
        )
        gains.append(by_distance - by_mean)
        yield f"{name}_bins", bin_correlation(query.uncertainty, hit_own)
        yield f"{name}_any_match_bins", bin_correlation(query.uncertainty, hit_true)
        yield f"{name}_csd_bins", bin_correlation(query.uncertainty, first_is(by_csd[name], own))
    yield "csd_gain_mAP@R", sum(gains) / 2
    each_T = torch.tensor(list({text: i for i, text in enumerate(truth.text_M.tolist())}.values()))
    number_T = fits_MN[each_T].sum(dim=1)
    yield "caption_uncertainty_spearman", spearman(texts.uncertainty[each_T], number_T)
    yield "caption_shortness_spearman", spearman(-truth.words_M[each_T], number_T)
    u_N, things_N = images.uncertainty, truth.things_N
    of = {name: torch.tensor([condition == name for condition in truth.condition_N]) for name in CONDITIONS}
    for condition in CONDITIONS[1:]:
        both = of[condition] | of["clean"]
        yield f"{condition}_auroc", auroc(u_N[both], of[condition][both])
        for number in (1, 2):  # a scene of one thing says less than one of two, seen clearly or not
            same = both & (things_N == number)
            yield f"{condition}_auroc_of_{number}", auroc(u_N[same], of[condition][same])


def first_is(score_QG: Tensor, wanted_QG: Tensor) -> Tensor:
    """The share of wanted items among those of the highest score, [Q]: 0 or 1 but for ties."""
    first_QG = score_QG == score_QG.amax(dim=1, keepdim=True)
    return (first_QG & wanted_QG).sum(dim=1) / first_QG.sum(dim=1)


def map_at_r(score_QG: Tensor, fits_QG: Tensor) -> float:
    """mAP@R over queries, each of which must have an item that fits."""
    order_QG = score_QG.argsort(dim=1, descending=True, stable=True)
    return precisions(fits_QG.gather(1, order_QG), fits_QG.sum(dim=1))[0].mean().item()
