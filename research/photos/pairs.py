"""R@1 and mAP@R of all true matches by each score, and calibrated pairs in and out of their domain."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pcmepp_openclip import DISTANCES, Gaussian
from pcmepp_openclip.ambiguity import Bank, BankEntailment, HubnessCorrected, calibration
from pcmepp_openclip.ambiguity.bank import IMAGES
from pcmepp_openclip.ambiguity.calibration import pair_offsets
from pcmepp_openclip.distances import Distance, Entailment

from .features import TrueMatches
from .heads import METHODS, Heads
from .questions import Encoded, Numbers, first_hits

CALIBRATED_ON = 500  # images of a split
WEIGHTS = (0.25, 0.5, 0.75, 1.0)


def scores(name: str, heads: Heads, bank: Bank) -> Iterator[tuple[str, Distance]]:
    """Yield the scores of a model: those of the means for plain CLIP, else those of its variances."""
    if name == "plain":
        yield "cosine", DISTANCES["cosine"]
        for weight in WEIGHTS:
            yield f"cosine, corrected by {weight:g} h", HubnessCorrected(bank, weight=weight)
        yield "entailment by the bank", BankEntailment(bank)
    else:
        words, weights = METHODS[name].words, METHODS[name].weights
        yield f"CSD: {words}", DISTANCES["csd"]
        if weights["match_weight"]:  # else the match scale, which weighs the variance, was not trained
            yield f"entailment: {words}", Entailment.of_scales(heads.match_scale.item(), heads.scale.item())


def pairs(data: Encoded, distance: Distance, true: Sequence[TrueMatches] = ()) -> Numbers:
    """Yield R@1, and mAP@R of the queries whose true items are known."""
    values = dict(zip(("R@1 i2t", "R@1 t2i"), first_hits(data, distance), strict=True))
    for known in true:
        values["mAP@R i2t" if known.of == IMAGES else "mAP@R t2i"] = _precisions(distance, data, known)
    for name, value_N in values.items():
        yield name, len(value_N), _mean_of(value_N)


def graded_pairs(graded: Encoded, distance: Distance) -> Numbers:
    """Yield mAP@R of an image's own captions among all different ones, vague and exact."""
    place = {text: i for i, text in enumerate(dict.fromkeys(graded.photos.captions))}
    first = torch.tensor([graded.photos.captions.index(text) for text in place])
    own = [sorted({place[graded.photos.captions[i]] for i in rows}) for rows in graded.photos.captions_of]
    texts = Gaussian(*(x[first] for x in graded.texts))
    value_N = torch.tensor(
        [_average_precision(row, right) for row, right in zip(distance.matrix(graded.images, texts), own, strict=True)]
    )
    yield "mAP@R i2t", len(value_N), _mean_of(value_N)


def _mean_of(value_N: Tensor) -> Callable[[Tensor], float]:
    """Return the mean of some rows."""
    return lambda rows: value_N[rows].mean().item()


def _precisions(distance: Distance, data: Encoded, known: TrueMatches) -> Tensor:
    """Return the average precision at R of each query whose true items are known."""
    query, gallery = (data.images, data.texts) if known.of == IMAGES else (data.texts, data.images)
    distance = distance if known.of == IMAGES else distance.transposed
    matrix = distance.matrix(Gaussian(*(x[known.rows] for x in query)), gallery)
    return torch.tensor([_average_precision(row, own) for row, own in zip(matrix, known.items, strict=True)])


def _average_precision(distance_M: Tensor, right: list[int]) -> float:
    first = distance_M.topk(len(right), largest=False).indices
    hit = torch.isin(first, torch.tensor(right)).double()
    return (hit * hit.cumsum(0) / torch.arange(1, len(hit) + 1)).mean().item()


@torch.inference_mode()
def calibration_errors(fitted_to: Encoded, others: dict[str, Encoded], bank: Bank) -> Iterator[tuple[str, str, float]]:
    """Yield (calibration, data, expected calibration error at a prior of 1/2), fitted to one split: first the error on
    the half of its images that was not fitted to, then that on the other splits, "" and their names."""

    def inputs(data: Encoded) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Return the input of a calibration for the first images, and the image of each of their captions."""
        own = data.photos.image_of_text[data.photos.image_of_text < CALIBRATED_ON]
        images = Gaussian(*(x[:CALIBRATED_ON] for x in data.images))
        texts = Gaussian(*(x[: len(own)] for x in data.texts))
        logit_NM = data.scale * images.mean @ texts.mean.T
        return (logit_NM, *pair_offsets(images, texts, data.scale, bank)), own

    known, own = inputs(fitted_to)
    fits = {"the shift alone": calibration.fit_shift(known[0], own), "by the bank": calibration.fit(*known, own)}
    for name, fitted in fits.items():
        yield name, "", fitted.error
        for split, data in others.items():
            scores, own = inputs(data)
            is_pair = torch.arange(len(scores[0]))[:, None] == own
            yield name, split, calibration.reliability(fitted.probability(*scores), is_pair)[1]
