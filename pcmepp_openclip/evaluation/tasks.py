"""Evaluation of one dataset: it is encoded, and evaluators give metrics for results.json and data for the report.

All ranks encode; rank 0 alone computes the metrics, the others get None. An evaluator is a function from what was
encoded to metrics; a new one is one file, and one line in `RETRIEVAL_EVALUATORS` or `ZEROSHOT_EVALUATORS`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import open_clip
import torch
from torch import Tensor

from ..ambiguity.bank import IMAGES, TEXTS
from ..data.captioned import Captioned, ImageRef
from ..distances import Distance
from ..distances.approximate import approximate_distances
from ..gaussian import Gaussian
from . import coco, conformal, correspondence, neighbours, uncertainty, vagueness
from .columns import EvaluatedModel
from .datasets import Hierarchies, Labelled, NoisyPairs
from .failure import confidences, failure
from .levels import levels
from .metric import Metric, as_dict, labelled
from .pairs import Curve, pairs, reliabilities
from .retrieval import Ranking, invert, rankings, retrieval_metrics
from .uncertainty import reliability
from .zeroshot import predict, weighted, zeroshot

STANDARD_PROMPT = "a photo of a {c}."


@dataclass
class QueryResults:
    """The images or the captions with their uncertainties, and whether each of them, as the query, found its answer.

    Arguments:
        samples: "images" or "captions".
        hits: [N] of 0 and 1, by what counts as a hit, such as "csd_R@1".
        uncertainties: those to judge, [N] each, by the `score` of `Metric`: that of the model as "", if it has one,
            and given a bank, the confusion among its references and among the items at hand, `bank` and `bank_gallery`.
        confidences: what a model without uncertainties would go by, [N] each, see `failure.confidences`; of captions
            also their length in words, `caption_length`.
    """

    samples: str
    hits: dict[str, Tensor]
    uncertainties: dict[str, Tensor]
    confidences: dict[str, Tensor]


@dataclass
class TaskResult:
    """The results of one dataset.

    Arguments:
        counts: how many images there are, and captions or classes.
        pairs: see `pairs.reliabilities`.
        encoded: the samples of retrieval, for pictures of them.
    """

    name: str
    task: str
    data: Any  # It is Captioned, Labelled, Hierarchies or NoisyPairs.
    counts: dict[str, int]
    metrics: list[Metric]
    queries: Sequence[QueryResults] = ()
    pairs: dict[str, tuple[Curve, float]] = field(default_factory=dict)
    encoded: "CaptionedGaussians | None" = None

    def as_json(self) -> dict[str, Any]:
        values = as_dict(self.metrics).items()
        bins = {
            "/".join(filter(None, (query.samples, name, score))): uncertainty.bins(uncertainty_N, hit)
            for query in self.queries
            for score, uncertainty_N in query.uncertainties.items()
            for name, hit in query.hits.items()
        }
        return {
            **self.counts,
            "metrics": {key: value if math.isfinite(value) else None for key, value in values},
            **({"bins": bins} if bins else {}),
            **({"pairs": {score: curve for score, (curve, _) in self.pairs.items()}} if self.pairs else {}),
        }


@dataclass(frozen=True)
class EncodedImages:
    """The input of an evaluator.

    Arguments:
        images: their Gaussians, [N, D]; points, of variance 0, if the model is not probabilistic.
        cropped: the Gaussians of the images' centre crops, [N, D], or None.
        queries: the images, then the captions, where there are any.
    """

    model: EvaluatedModel
    data: Any
    images: Gaussian
    cropped: Gaussian | None
    queries: Sequence[QueryResults]


@dataclass(frozen=True)
class CaptionedGaussians(EncodedImages):
    """The input of an evaluator of retrieval.

    Arguments:
        captions: their Gaussians, [M, D].
        rankings: both directions by each distance.
        pairs: how far the probability of a pair can be relied on, see `pairs.reliabilities`; {} without a calibration.
    """

    data: Captioned
    captions: Gaussian
    rankings: list[Ranking]
    pairs: dict[str, tuple[Curve, float]]

    def fits(self, image: int, caption: int) -> bool:
        """Return whether an image and a caption are a pair, or are known to fit."""
        known = self.data.images_of_caption
        return self.data.image_of_caption[caption] == image or (known is not None and image in known[caption])


@dataclass(frozen=True)
class LabelledGaussians(EncodedImages):
    """The input of an evaluator of zero-shot classification.

    Arguments:
        prompts_CTD: the Gaussians of T prompts for each of C classes.
        one_prompt: the index of the prompt that is also used alone.
        validation: Gaussians and labels of another split, or None.
    """

    data: Labelled
    prompts_CTD: Gaussian
    one_prompt: int
    validation: tuple[Gaussian, Sequence[int]] | None


def evaluate_retrieval(
    model: EvaluatedModel, name: str, data: Captioned, rank: int = 0, crops: bool = False, ann: bool = False
) -> TaskResult | None:
    """Encode a dataset and run the evaluators of retrieval on it.

    Arguments:
        crops: encode a centre crop of each image too.
        ann: also search by an approximate index over the means.
    """
    images = model.images(data.images, f"{name}-images")
    cropped = _cropped(model, name, data.images) if crops else None
    texts = model.texts(data.captions, f"{name}-captions")
    if rank:
        return None
    distances = model.distances | (approximate_distances() if ann else {})
    ranked = rankings(images, texts, data.image_of_caption, data.images_of_caption, distances)
    queries = []
    for samples, side, query, gallery in (("images", IMAGES, images, texts), ("captions", TEXTS, texts, images)):
        hits = {
            label: hit
            for ranking in ranked
            if ranking.samples == samples and ranking.distance in ("cosine", model.distance)
            for label, hit in ranking.hits.items()
        }
        judged = _uncertainties(model, query, side, gallery.mean)
        queries.append(QueryResults(samples, hits, judged, confidences(query.mean, gallery.mean, model.loaded.scale)))
    queries[1].confidences["caption_length"] = _words(data.captions)
    if data.coco_captions is not None and model.loaded.probabilistic:
        hits_1k = coco.first_hits_1k(images, texts, data.coco_captions, data.image_of_caption, "csd")
        for results, hit in zip(queries, hits_1k, strict=True):
            results.hits["coco_1k_csd_R@1"] = hit
    curves = {}
    if model.calibration is not None:
        curves = reliabilities(model.calibration, images, texts, data.image_of_caption, model.loaded.scale, model.bank)
    encoded = CaptionedGaussians(model, data, images, cropped, queries, texts, ranked, curves)
    metrics = [metric for evaluate in RETRIEVAL_EVALUATORS.values() for metric in evaluate(encoded)]
    counts = {"images": len(data.images), "captions": len(data.captions)}
    return TaskResult(name, "retrieval", data, counts, metrics, queries, curves, encoded)


def evaluate_zeroshot(
    model: EvaluatedModel, name: str, data: Labelled, validation: Labelled | None, rank: int = 0, crops: bool = False
) -> TaskResult | None:
    """Encode a dataset and run the evaluators of zero-shot classification on it.

    Arguments:
        crops: encode a centre crop of each image too.
    """
    templates = data.templates or [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    images = model.images(data.images, f"{name}-images")
    cropped = _cropped(model, name, data.images) if crops else None
    prompts = model.texts([template.format(c=c) for c in data.classes for template in templates], f"{name}-prompts")
    known = None
    if validation is not None:
        known = model.images(validation.images, f"{name}-validation"), validation.labels
    if rank:
        return None
    shape = len(data.classes), len(templates), -1
    prompts_CTD = Gaussian(prompts.mean.reshape(shape), prompts.logvar.reshape(shape))
    one_prompt = templates.index(STANDARD_PROMPT) if STANDARD_PROMPT in templates else 0
    classifier = weighted(prompts_CTD, torch.ones(shape[:2]))
    hit = (predict(images.mean, classifier)[:, 0] == torch.tensor(data.labels)).float()
    judged = _uncertainties(model, images, IMAGES, classifier)
    confidence = confidences(images.mean, classifier, model.loaded.scale)
    queries = [QueryResults("images", {"accuracy": hit}, judged, confidence)]
    encoded = LabelledGaussians(model, data, images, cropped, queries, prompts_CTD, one_prompt, known)
    metrics = [metric for evaluate in ZEROSHOT_EVALUATORS.values() for metric in evaluate(encoded)]
    counts = {"images": len(data.images), "classes": len(data.classes)}
    return TaskResult(name, "zeroshot", data, counts, metrics, queries)


def evaluate_vagueness(
    model: EvaluatedModel, name: str, data: Hierarchies, rank: int = 0, himo: bool = False
) -> TaskResult | None:
    """Encode chains of captions and judge their order.

    Arguments:
        himo: compute HiMo@K, in place of the traversal of HierarCaps.
    """
    texts = model.texts([caption for chain in data.chains for caption in chain], f"{name}-captions")
    root = model.texts([""], f"{name}-root")
    images = model.images(data.images, f"{name}-images") if data.images else None
    if rank:
        return None
    specificity = vagueness.specificities(data.chains, texts, root.mean[0], model.loaded.probabilistic, model.bank)
    metrics = list(vagueness.order(data.chains, specificity))
    if images is not None and himo:
        metrics += vagueness.himo(data.chains, texts, images, data.image_of_chain, model.distances)
    elif images is not None:
        metrics += vagueness.traversal(data.chains, texts, images, data.image_of_chain, specificity)
    return TaskResult(name, "vagueness", data, {"images": len(data.images), "chains": len(data.chains)}, metrics)


def evaluate_correspondence(model: EvaluatedModel, name: str, data: NoisyPairs, rank: int = 0) -> TaskResult | None:
    images = model.images(data.images, f"{name}-pair-images")
    texts = model.texts(data.captions, f"{name}-pair-captions")
    if rank:
        return None
    scores = {kind: measure.paired(images, texts) for kind, measure in model.distances.items()}
    matching = None
    if model.loaded.probabilistic:
        matching = _matching(model)
        scores["uncertainty"] = images.uncertainty + texts.uncertainty
    scores |= correspondence.in_batches(images, texts, model.loaded.scale, matching)
    scores["caption_length"] = _words(data.captions)
    metrics = list(correspondence.correspondence(scores, torch.tensor(data.wrong)))
    counts = {"images": len(data.images), "wrong_pairs": sum(data.wrong)}
    return TaskResult(name, "correspondence", data, counts, metrics)


def _matching(model: EvaluatedModel) -> tuple[Distance, float, float] | None:
    """Return d, a and b of the matching logit that a PCME++ model was trained with; None where there was none."""
    trained, measure = model.loaded.model, model.distances[model.distance]
    if trained.pcmepp_cfg.trains_matching:
        return measure, trained.match_scale.item(), trained.match_shift.item()
    return (measure, 1.0, 0.0) if model.distance == "match_probability" else None  # PCME's distance contains a and b


def _words(captions: Sequence[str]) -> Tensor:
    return torch.tensor([float(len(caption.split())) for caption in captions])


def _cropped(model: EvaluatedModel, name: str, places: Sequence[ImageRef]) -> Gaussian | None:
    """Encode centre crops of the images; None for a model without uncertainties, which needs none."""
    if not model.loaded.probabilistic and model.bank is None:
        return None
    return model.images(places, f"{name}-crops", neighbours.crop_ratios(len(places)))


def _uncertainties(
    model: EvaluatedModel, queries: Gaussian, side: str, gallery_MD: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `QueryResults.uncertainties`, without `bank_gallery` if there is no gallery.

    Arguments:
        side: the modality of the queries, see `Bank`.
    """
    scores = {"": queries.uncertainty} if model.loaded.probabilistic else {}
    if model.bank is not None:
        scores["bank"] = model.bank.confusion(queries.mean, side)
        if gallery_MD is not None:
            scores["bank_gallery"] = model.bank.confusion(queries.mean, side, gallery_MD)
    return scores


def _recalls(encoded: CaptionedGaussians) -> Iterator[Metric]:
    for metric in retrieval_metrics(encoded.rankings):
        if metric.name != "RSUM" or encoded.data.coco_images is None:  # COCO has two, of 1K and of 5K
            yield metric


def _coco(encoded: CaptionedGaussians) -> Iterator[Metric]:
    data = encoded.data
    if data.coco_images is not None and data.coco_captions is not None:
        ids, own = (data.coco_images, data.coco_captions), data.image_of_caption
        # These distances are called with the images first.
        distances = {x.distance: x.measure for x in encoded.rankings if x.samples == "images"}
        yield from coco.coco(encoded.images, encoded.captions, *ids, own, distances)


def _captions(encoded: CaptionedGaussians) -> Iterator[Metric]:
    matches, captions = encoded.data.images_of_caption, encoded.data.captions
    counts = None if matches is None else [len(images) for images in matches]
    query = encoded.queries[1]
    for score, uncertainty_N in query.uncertainties.items():
        of_score = uncertainty.of_captions(uncertainty_N, captions, counts)
        yield from labelled(of_score, samples="captions", score=score)
    if counts is not None:  # short captions fit many images: what an uncertainty has to exceed
        words_N = query.confidences["caption_length"]
        of_words = (x for x in uncertainty.of_captions(-words_N, captions, counts) if x.name == "spearman_matches")
        yield from labelled(of_words, samples="captions", score="caption_length")


def _zeroshot(encoded: LabelledGaussians) -> Iterator[Metric]:
    prompts, model = (encoded.prompts_CTD, encoded.one_prompt, encoded.validation), encoded.model
    probabilistic = model.loaded.probabilistic
    return zeroshot(encoded.images, encoded.data.labels, *prompts, probabilistic, model.distances)


def _hits(encoded: EncodedImages) -> Iterator[Metric]:
    for query in encoded.queries:
        for label, hit in query.hits.items():
            labels: dict[str, Any] = {"samples": query.samples, "hit": label}
            yield Metric("calibration_error", reliability(query.confidences["max_softmax"], hit)[1], **labels)
            for score, uncertainty_N in query.uncertainties.items():
                judged = (*uncertainty.against_hits(uncertainty_N, hit), *levels(uncertainty_N, hit))
                yield from labelled(judged, **labels, score=score)
            certainties = {score: -uncertainty_N for score, uncertainty_N in query.uncertainties.items()}
            for score, confidence_N in (certainties | query.confidences).items():
                yield from labelled(failure(confidence_N, hit), **labels, score=score)


def _facts(encoded: EncodedImages) -> Iterator[Metric]:
    for score, uncertainty_N in encoded.queries[0].uncertainties.items():
        of_facts = uncertainty.against_facts(uncertainty_N, encoded.data.facts)
        yield from labelled(of_facts, samples="images", score=score)


def _crops(encoded: EncodedImages) -> Iterator[Metric]:
    cropped = {} if encoded.cropped is None else _uncertainties(encoded.model, encoded.cropped, IMAGES)
    for score, cropped_N in cropped.items():
        metric = neighbours.crops(encoded.queries[0].uncertainties[score], cropped_N)
        yield replace(metric, samples="images", score=score)


def _neighbours(encoded: LabelledGaussians) -> Iterator[Metric]:
    judged = {score: x for score, x in encoded.queries[0].uncertainties.items() if score != "bank_gallery"}
    return neighbours.neighbours(encoded.images, encoded.data.labels, judged)


def _conformal(encoded: CaptionedGaussians) -> Iterator[Metric]:
    pairs = [[image] for image in encoded.data.image_of_caption]
    sides = {
        "images": (encoded.images, encoded.captions, invert(pairs, len(encoded.data.images))),
        "captions": (encoded.captions, encoded.images, pairs),
    }
    queries = {query.samples: query for query in encoded.queries}
    for ranking in encoded.rankings:
        yield from conformal.conformal(ranking, *sides[ranking.samples])
        label, query = f"{ranking.distance}_R@1", queries[ranking.samples]
        if label in query.hits:
            judged = {**query.uncertainties, "max_softmax": -query.confidences["max_softmax"]}
            for score, uncertainty_N in judged.items():
                gallery = len(sides[ranking.samples][1].mean)
                of_levels = conformal.conformal_levels(ranking.own_rank_N, uncertainty_N, gallery)
                yield from labelled(of_levels, samples=query.samples, hit=label, score=score)


RETRIEVAL_EVALUATORS: dict[str, Callable[[CaptionedGaussians], Iterable[Metric]]] = {
    "retrieval": _recalls,
    "coco": _coco,
    "hits": _hits,
    "facts": _facts,
    "crops": _crops,
    "captions": _captions,
    "conformal": _conformal,
    "pairs": lambda encoded: pairs(encoded.pairs),
}
ZEROSHOT_EVALUATORS: dict[str, Callable[[LabelledGaussians], Iterable[Metric]]] = {
    "zeroshot": _zeroshot,
    "hits": _hits,
    "neighbours": _neighbours,
    "facts": _facts,
    "crops": _crops,
}
