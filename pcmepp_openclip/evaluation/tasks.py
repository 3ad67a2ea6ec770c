"""Evaluation of one dataset: it is encoded, and evaluators give metrics for results.json and data for the report.

All ranks encode; rank 0 alone computes the metrics, the others get None. An evaluator is a function from what was
encoded to metrics; a new one is one file, and one line in `RETRIEVAL_EVALUATORS` or `ZEROSHOT_EVALUATORS`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import open_clip
import torch
from torch import Tensor

from ..ambiguity.bank import IMAGES, TEXTS, Bank
from ..data.captioned import Captioned, ImageRef
from ..distances import Distance
from ..distances.approximate import approximate_distances
from ..gaussian import Gaussian
from . import coco, conformal, correspondence, neighbours, uncertainty, vagueness
from .columns import EvaluatedModel
from .datasets import Hierarchies, Labelled, NoisyPairs
from .failure import confidences, failure
from .levels import levels
from .metric import Metric, as_dict
from .pairs import Curve, reliabilities
from .pairs import pairs as pair_metrics
from .retrieval import Ranking, invert, rankings, retrieval_metrics
from .zeroshot import predict, weighted, zeroshot

STANDARD_PROMPT = "a photo of a {c}."
BANK_SCORES = ("bank", "bank_gallery")


@dataclass
class QueryResults:
    """The images or the captions with their uncertainties, and whether each of them, as the query, found its answer.

    Arguments:
        samples: "images" or "captions".
        uncertainty: [N].
        hits: [N] of 0 and 1, by what counts as a hit, such as "csd_R@1".
        confidences: what a model without uncertainties would go by, [N] each, see `failure.confidences`; of captions
            also their length in words, `caption_length`; given a bank, the negative entropies over its references and
            over the items at hand, `bank` and `bank_gallery`.
    """

    samples: str
    uncertainty: Tensor
    hits: dict[str, Tensor]
    confidences: dict[str, Tensor]

    def uncertainties(self, probabilistic: bool) -> dict[str, Tensor]:
        """Return the uncertainties to judge, [N] each, by the `score` of `Metric`: that of the model as "", if it has
        one, and those of the bank."""
        own = {"": self.uncertainty} if probabilistic else {}
        return own | {score: -self.confidences[score] for score in BANK_SCORES if score in self.confidences}


@dataclass
class TaskResult:
    name: str
    task: str
    data: Any  # It is Captioned, Labelled, Hierarchies or NoisyPairs.
    metrics: list[Metric]
    probabilistic: bool
    queries: list[QueryResults] = field(default_factory=list)
    pairs: dict[str, tuple[Curve, float]] = field(default_factory=dict)  # see `pairs.reliabilities`
    encoded: "CaptionedGaussians | None" = None  # Retrieval sets it, for pictures of samples.

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"images": len(self.data.images)}
        if isinstance(self.data, Captioned):
            out["captions"] = len(self.data.captions)
        elif isinstance(self.data, Hierarchies):
            out["chains"] = len(self.data.chains)
        elif isinstance(self.data, NoisyPairs):
            out["wrong_pairs"] = sum(self.data.wrong)
        else:
            out["classes"] = len(self.data.classes)
        values = as_dict(self.metrics)
        out["metrics"] = {key: value if math.isfinite(value) else None for key, value in values.items()}
        bins = {
            "/".join(filter(None, (query.samples, name, score))): uncertainty.bins(uncertainty_N, hit)
            for query in self.queries
            for score, uncertainty_N in query.uncertainties(self.probabilistic).items()
            for name, hit in query.hits.items()
        }
        if bins:
            out["bins"] = bins
        if self.pairs:
            out["pairs"] = {score: curve for score, (curve, _) in self.pairs.items()}
        return out


@dataclass(frozen=True)
class CaptionedGaussians:
    """The input of an evaluator of retrieval.

    Arguments:
        data: the captions, which image each belongs to, and what else is known of them.
        images, captions: their Gaussians, [N, D] and [M, D]; points, of variance 0, if the model is not probabilistic.
        rankings: both directions by each distance.
        queries: the images, then the captions.
        eccv_caption: that package, where the data are COCO, else None.
        cropped: the Gaussians of the images' centre crops, [N, D], or None.
        bank: reference pairs, or None.
        pairs: how far the probability of a pair can be relied on, see `pairs.reliabilities`; {} without a calibration.
        distance: the name of the distance that the model was trained with, "cosine" if its variances mean nothing.
    """

    data: Captioned
    images: Gaussian
    captions: Gaussian
    probabilistic: bool
    rankings: list[Ranking]
    queries: list[QueryResults]
    eccv_caption: Any = None
    cropped: Gaussian | None = None
    bank: Bank | None = None
    pairs: dict[str, tuple[Curve, float]] = field(default_factory=dict)
    distance: str = "cosine"

    def fits(self, image: int, caption: int) -> bool:
        """Return whether an image and a caption are a pair, or are known to fit."""
        known = self.data.images_of_caption
        return self.data.image_of_caption[caption] == image or (known is not None and image in known[caption])


@dataclass(frozen=True)
class LabelledGaussians:
    """The input of an evaluator of zero-shot classification.

    Arguments:
        data: the labels, classes and prompt templates.
        images: their Gaussians, [N, D].
        prompts_CTD: the Gaussians of T prompts for each of C classes.
        one_prompt: the index of the prompt that is also used alone.
        validation: Gaussians and labels of another split, or None.
        queries: the images.
        cropped: the Gaussians of the images' centre crops, [N, D], or None.
        distances: what classes are ranked by, by name; None for those that are ranked by default.
        bank: reference pairs, or None.
    """

    data: Labelled
    images: Gaussian
    prompts_CTD: Gaussian
    one_prompt: int
    validation: tuple[Gaussian, Sequence[int]] | None
    probabilistic: bool
    queries: list[QueryResults]
    cropped: Gaussian | None = None
    distances: dict[str, Distance] | None = None
    bank: Bank | None = None


def evaluate_retrieval(
    encoder: EvaluatedModel, name: str, data: Captioned, rank: int = 0, crops: bool = False, ann: bool = False
) -> TaskResult | None:
    """Encode a dataset and run the evaluators of retrieval on it.

    Arguments:
        crops: encode a centre crop of each image too.
        ann: also search by an approximate index over the means.
    """
    images = encoder.images(data.images, f"{name}-images")
    cropped = _cropped(encoder, name, data.images) if crops else None
    texts = encoder.texts(data.captions, f"{name}-captions")
    if rank:
        return None
    distances = encoder.distances | (approximate_distances() if ann else {})
    ranked = rankings(images, texts, data.image_of_caption, data.images_of_caption, distances)
    queries = []
    for samples, side, query, gallery in (("images", IMAGES, images, texts), ("captions", TEXTS, texts, images)):
        hits = {
            label: hit
            for ranking in ranked
            if ranking.samples == samples and ranking.distance in ("cosine", encoder.distance)
            for label, hit in ranking.hits.items()
        }
        query_confidences = _by_bank(encoder.bank, query.mean, side, gallery.mean)
        query_confidences |= confidences(query.mean, gallery.mean, encoder.scale)
        if samples == "captions":
            query_confidences["caption_length"] = torch.tensor(
                [float(len(caption.split())) for caption in data.captions]
            )
        queries.append(QueryResults(samples, query.uncertainty, hits, query_confidences))
    eccv_caption = None if data.coco_captions is None else coco.load_eccv_caption()
    if data.coco_captions is not None and encoder.probabilistic:
        hits_1k = coco.first_hits_1k(images, texts, data.coco_captions, data.image_of_caption, "csd", eccv_caption)
        for results, hit in zip(queries, hits_1k, strict=True):
            results.hits["coco_1k_csd_R@1"] = hit
    curves = {}
    if encoder.calibration is not None:
        curves = reliabilities(encoder.calibration, images, texts, data.image_of_caption, encoder.scale, encoder.bank)
    encoded = CaptionedGaussians(
        data,
        images,
        texts,
        encoder.probabilistic,
        ranked,
        queries,
        eccv_caption,
        cropped,
        encoder.bank,
        curves,
        encoder.distance if encoder.distance in encoder.distances else "cosine",
    )
    metrics = [metric for evaluate in RETRIEVAL_EVALUATORS.values() for metric in evaluate(encoded)]
    return TaskResult(name, "retrieval", data, metrics, encoder.probabilistic, queries, curves, encoded)


def evaluate_zeroshot(
    encoder: EvaluatedModel, name: str, data: Labelled, validation: Labelled | None, rank: int = 0, crops: bool = False
) -> TaskResult | None:
    """Encode a dataset and run the evaluators of zero-shot classification on it.

    Arguments:
        crops: encode a centre crop of each image too.
    """
    templates = data.templates or [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    images = encoder.images(data.images, f"{name}-images")
    cropped = _cropped(encoder, name, data.images) if crops else None
    prompts = encoder.texts([template.format(c=c) for c in data.classes for template in templates], f"{name}-prompts")
    known = None
    if validation is not None:
        known = encoder.images(validation.images, f"{name}-validation"), validation.labels
    if rank:
        return None
    shape = len(data.classes), len(templates), -1
    prompts_CTD = Gaussian(prompts.mean.reshape(shape), prompts.logvar.reshape(shape))
    one_prompt = templates.index(STANDARD_PROMPT) if STANDARD_PROMPT in templates else 0
    classifier = weighted(prompts_CTD, torch.ones(shape[:2]))
    hit = (predict(images.mean, classifier)[:, 0] == torch.tensor(data.labels)).float()
    image_confidences = _by_bank(encoder.bank, images.mean, IMAGES, classifier)
    image_confidences |= confidences(images.mean, classifier, encoder.scale)
    queries = [QueryResults("images", images.uncertainty, {"accuracy": hit}, image_confidences)]
    encoded = LabelledGaussians(
        data,
        images,
        prompts_CTD,
        one_prompt,
        known,
        encoder.probabilistic,
        queries,
        cropped,
        encoder.distances,
        encoder.bank,
    )
    metrics = [metric for evaluate in ZEROSHOT_EVALUATORS.values() for metric in evaluate(encoded)]
    return TaskResult(name, "zeroshot", data, metrics, encoder.probabilistic, queries)


def evaluate_vagueness(
    encoder: EvaluatedModel, name: str, data: Hierarchies, rank: int = 0, himo: bool = False
) -> TaskResult | None:
    """Encode chains of captions and judge their order.

    Arguments:
        himo: compute HiMo@K, in place of the traversal of HierarCaps.
    """
    texts = encoder.texts([caption for chain in data.chains for caption in chain], f"{name}-captions")
    root = encoder.texts([""], f"{name}-root")
    images = encoder.images(data.images, f"{name}-images") if data.images else None
    if rank:
        return None
    specificity = vagueness.specificities(data.chains, texts, root.mean[0], encoder.probabilistic, encoder.bank)
    metrics = list(vagueness.order(data.chains, specificity))
    if images is not None and himo:
        metrics += vagueness.himo(data.chains, texts, images, data.image_of_chain, encoder.distances)
    elif images is not None:
        metrics += vagueness.traversal(data.chains, texts, images, data.image_of_chain, specificity)
    return TaskResult(name, "vagueness", data, metrics, encoder.probabilistic)


def evaluate_correspondence(encoder: EvaluatedModel, name: str, data: NoisyPairs, rank: int = 0) -> TaskResult | None:
    images = encoder.images(data.images, f"{name}-pair-images")
    texts = encoder.texts(data.captions, f"{name}-pair-captions")
    if rank:
        return None
    scores = {kind: measure.paired(images, texts) for kind, measure in encoder.distances.items()}
    matching = None
    if encoder.probabilistic:
        matching = _matching(encoder)
        scores["uncertainty"] = images.uncertainty + texts.uncertainty
    scores |= correspondence.in_batches(images, texts, encoder.scale, matching)
    scores["caption_length"] = torch.tensor([float(len(caption.split())) for caption in data.captions])
    metrics = list(correspondence.correspondence(scores, torch.tensor(data.wrong)))
    return TaskResult(name, "correspondence", data, metrics, encoder.probabilistic)


def _matching(encoder: EvaluatedModel) -> tuple[Distance, float, float] | None:
    """Return d, a and b of the matching logit that a PCME++ model was trained with; None where there was none."""
    model, measure = encoder.model, encoder.distances[encoder.distance]
    if model.pcmepp_cfg.trains_matching:
        return measure, model.match_scale.item(), model.match_shift.item()
    return (measure, 1.0, 0.0) if encoder.distance == "match_probability" else None  # PCME's distance contains a and b


def _cropped(encoder: EvaluatedModel, name: str, places: Sequence[ImageRef]) -> Gaussian | None:
    """Encode centre crops of the images; None for a model without uncertainties, which needs none."""
    if not encoder.probabilistic and encoder.bank is None:
        return None
    return encoder.images(places, f"{name}-crops", neighbours.crop_ratios(len(places)))


def _by_bank(bank: Bank | None, mean_ND: Tensor, side: str, gallery_MD: Tensor) -> dict[str, Tensor]:
    """Return `bank` and `bank_gallery` of `QueryResults.confidences`, or {} without a bank."""
    if bank is None:
        return {}
    return {"bank": -bank.confusion(mean_ND, side), "bank_gallery": -bank.confusion(mean_ND, side, gallery_MD)}


def _recalls(encoded: CaptionedGaussians) -> Iterator[Metric]:
    for metric in retrieval_metrics(encoded.rankings):
        if metric.name != "RSUM" or encoded.data.coco_images is None:  # COCO has two, of 1K and of 5K
            yield metric


def _coco(encoded: CaptionedGaussians) -> Iterator[Metric]:
    data = encoded.data
    if data.coco_images is not None and data.coco_captions is not None:
        ids, own = (data.coco_images, data.coco_captions), data.image_of_caption
        distances = {
            ranking.distance: ranking.measure for ranking in encoded.rankings if ranking.samples == "images"
        }  # They are called with the images first.
        yield from coco.coco(encoded.images, encoded.captions, *ids, own, distances, encoded.eccv_caption)


def _captions(encoded: CaptionedGaussians) -> Iterator[Metric]:
    matches, captions = encoded.data.images_of_caption, encoded.data.captions
    counts = None if matches is None else [len(images) for images in matches]
    (query,) = (query for query in encoded.queries if query.samples == "captions")
    for score, uncertainty_N in query.uncertainties(encoded.probabilistic).items():
        yield from uncertainty.of_captions(uncertainty_N, captions, counts, score)
    if counts is not None:  # short captions fit many images: what an uncertainty has to exceed
        words_N = query.confidences["caption_length"]
        for metric in uncertainty.of_captions(-words_N, captions, counts, "caption_length"):
            if metric.name == "spearman_matches":
                yield metric


def _zeroshot(encoded: LabelledGaussians) -> Iterator[Metric]:
    return zeroshot(
        encoded.images,
        encoded.data.labels,
        encoded.prompts_CTD,
        encoded.one_prompt,
        encoded.validation,
        encoded.probabilistic,
        encoded.distances,
    )


def _hits(encoded: CaptionedGaussians | LabelledGaussians) -> Iterator[Metric]:
    for query in encoded.queries:
        for label, hit in query.hits.items():
            error = uncertainty.reliability(query.confidences["max_softmax"], hit)[1]
            yield Metric("calibration_error", error, samples=query.samples, hit=label)
            judged = query.uncertainties(encoded.probabilistic)
            for score, uncertainty_N in judged.items():
                yield from uncertainty.against_hits(uncertainty_N, hit, query.samples, label, score)
                yield from levels(uncertainty_N, hit, query.samples, label, score)
            confidence = {score: -uncertainty_N for score, uncertainty_N in judged.items()} | query.confidences
            for score, confidence_N in confidence.items():
                yield from failure(confidence_N, hit, query.samples, label, score)


def _facts(encoded: CaptionedGaussians | LabelledGaussians) -> Iterator[Metric]:
    for score, uncertainty_N in _images(encoded).uncertainties(encoded.probabilistic).items():
        yield from uncertainty.against_facts(uncertainty_N, encoded.data.facts, "images", score)


def _images(encoded: CaptionedGaussians | LabelledGaussians) -> QueryResults:
    return next(query for query in encoded.queries if query.samples == "images")


def _crops(encoded: CaptionedGaussians | LabelledGaussians) -> Iterator[Metric]:
    if encoded.cropped is not None and encoded.probabilistic:
        yield from neighbours.crops(encoded.images.uncertainty, encoded.cropped.uncertainty)
    if encoded.cropped is not None and encoded.bank is not None:
        cropped_N = encoded.bank.confusion(encoded.cropped.mean, IMAGES)
        yield from neighbours.crops(_images(encoded).uncertainties(False)["bank"], cropped_N, "bank")


def _neighbours(encoded: LabelledGaussians) -> Iterator[Metric]:
    others = {} if encoded.bank is None else {"bank": _images(encoded).uncertainties(False)["bank"]}
    return neighbours.neighbours(encoded.images, encoded.data.labels, encoded.probabilistic, others)


def _conformal(encoded: CaptionedGaussians) -> Iterator[Metric]:
    pairs = [[image] for image in encoded.data.image_of_caption]
    sides = {
        "images": (encoded.images, encoded.captions, invert(pairs, len(encoded.data.images))),
        "captions": (encoded.captions, encoded.images, pairs),
    }
    queries = {query.samples: query for query in encoded.queries}
    for ranking in encoded.rankings:
        rank_N, (_, gallery, _) = ranking.own_rank_N, sides[ranking.samples]
        yield from conformal.conformal(ranking, *sides[ranking.samples])
        label, query = f"{ranking.distance}_R@1", queries[ranking.samples]
        if label in query.hits:
            key = len(gallery.mean), ranking.samples, label
            for score, uncertainty_N in query.uncertainties(encoded.probabilistic).items():
                yield from conformal.conformal_levels(rank_N, uncertainty_N, *key, score)
            yield from conformal.conformal_levels(rank_N, -query.confidences["max_softmax"], *key, "max_softmax")


def _pairs(encoded: CaptionedGaussians) -> Iterator[Metric]:
    return pair_metrics(encoded.pairs)


RETRIEVAL_EVALUATORS: dict[str, Callable[[CaptionedGaussians], Iterable[Metric]]] = {
    "retrieval": _recalls,
    "coco": _coco,
    "hits": _hits,
    "facts": _facts,
    "crops": _crops,
    "captions": _captions,
    "conformal": _conformal,
    "pairs": _pairs,
}
ZEROSHOT_EVALUATORS: dict[str, Callable[[LabelledGaussians], Iterable[Metric]]] = {
    "zeroshot": _zeroshot,
    "hits": _hits,
    "neighbours": _neighbours,
    "facts": _facts,
    "crops": _crops,
}
