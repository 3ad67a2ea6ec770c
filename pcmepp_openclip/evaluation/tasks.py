"""A dataset through the encoder and the evaluators: numbers for results.json, and what the report draws from.

All ranks encode; rank 0 alone computes the numbers, the others get None.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import open_clip
import torch
from torch import Tensor

from ..distances import DISTANCES
from ..gaussian import Gaussian
from . import coco, uncertainty
from .datasets import Captioned, Labelled
from .encode import Encoder
from .metric import Metric, as_dict
from .retrieval import confidence, rankings, retrieval_metrics
from .zeroshot import predict, weighted, zeroshot

STANDARD_PROMPT = "a photo of a {c}."
SAMPLES = {"image_to_text": "images", "text_to_image": "captions"}  # the queries of each direction


@dataclass
class QueryResults:
    """The images or the captions with their uncertainties, and whether each of them, as the query, found its answer.

    Arguments:
        samples: "images" or "captions".
        uncertainty: [N].
        hits: [N] of 0 and 1, by what counts as a hit, such as "csd_R@1".
        confidence: the softmax's probability of the first answer, [N].
    """

    samples: str
    uncertainty: Tensor
    hits: dict[str, Tensor]
    confidence: Tensor


@dataclass
class TaskResult:
    name: str
    task: str
    data: Any  # Captioned or Labelled
    metrics: list[Metric]
    probabilistic: bool
    queries: list[QueryResults] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"images": len(self.data.images)}
        if isinstance(self.data, Captioned):
            out["captions"] = len(self.data.captions)
        else:
            out["classes"] = len(self.data.classes)
        values = as_dict(self.metrics)
        out["metrics"] = {key: value if math.isfinite(value) else None for key, value in values.items()}
        if self.probabilistic:
            out["bins"] = {
                f"{query.samples}/{name}": uncertainty.bins(query.uncertainty, hit)
                for query in self.queries
                for name, hit in query.hits.items()
            }
        return out


def evaluate_retrieval(encoder: Encoder, name: str, data: Captioned, rank: int = 0) -> TaskResult | None:
    images = encoder.images(data.images, f"{name}-images")
    texts = encoder.texts(data.captions, f"{name}-captions")
    if rank:
        return None
    distances = list(DISTANCES) if encoder.probabilistic else ["cosine"]
    found = rankings(images, texts, data.image_of_caption, data.images_of_caption, distances)
    queries = []
    for direction, query, gallery in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        hits = {
            label: hit
            for ranking in found
            if ranking.direction == direction and ranking.distance in ("cosine", encoder.distance)
            for label, hit in ranking.hits.items()
        }
        sure = confidence(query, gallery, encoder.scale)
        queries.append(QueryResults(SAMPLES[direction], query.uncertainty, hits, sure))
    metrics = list(retrieval_metrics(found))
    if data.coco_images is not None:
        assert data.coco_captions is not None
        package, own = coco.load_eccv_caption(), data.image_of_caption
        metrics = [metric for metric in metrics if metric.name != "RSUM"]  # COCO has two, of 1K and of 5K
        metrics += coco.coco(images, texts, data.coco_images, data.coco_captions, own, distances, package)
        if encoder.probabilistic:
            hits_1k = coco.first_hits_1k(images, texts, data.coco_captions, own, "csd", package)
            for results, hit in zip(queries, hits_1k, strict=True):
                results.hits["coco_1k_csd_R@1"] = hit
    metrics += _about_hits(encoder, queries)
    if encoder.probabilistic:
        metrics += uncertainty.against_facts(images.uncertainty, data.facts, "images")
        counts = None if data.images_of_caption is None else [len(fits) for fits in data.images_of_caption]
        metrics += uncertainty.of_captions(texts.uncertainty, data.captions, counts)
    return TaskResult(name, "retrieval", data, metrics, encoder.probabilistic, queries)


def evaluate_zeroshot(
    encoder: Encoder, name: str, data: Labelled, validation: Labelled | None, rank: int = 0
) -> TaskResult | None:
    templates = data.templates or [template("{c}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    images = encoder.images(data.images, f"{name}-images")
    prompts = encoder.texts([template.format(c=c) for c in data.classes for template in templates], f"{name}-prompts")
    known = None
    if validation is not None:
        known = encoder.images(validation.images, f"{name}-validation"), validation.labels
    if rank:
        return None
    shape = len(data.classes), len(templates), -1
    prompts_CTD = Gaussian(prompts.mean.reshape(shape), prompts.logvar.reshape(shape))
    one = templates.index(STANDARD_PROMPT) if STANDARD_PROMPT in templates else 0
    metrics = list(zeroshot(images, data.labels, prompts_CTD, one, known, encoder.probabilistic))
    classifier = weighted(prompts_CTD, torch.ones(shape[:2]))
    hit = (predict(images.mean, classifier)[:, 0] == torch.tensor(data.labels)).float()
    sure = confidence(images, Gaussian(classifier, classifier), encoder.scale)
    queries = [QueryResults("images", images.uncertainty, {"accuracy": hit}, sure)]
    metrics += _about_hits(encoder, queries)
    if encoder.probabilistic:
        metrics += uncertainty.against_facts(images.uncertainty, data.facts, "images")
    return TaskResult(name, "zeroshot", data, metrics, encoder.probabilistic, queries)


def _about_hits(encoder: Encoder, queries: Sequence[QueryResults]) -> Iterator[Metric]:
    for query in queries:
        for label, hit in query.hits.items():
            error = uncertainty.reliability(query.confidence, hit)[1]
            yield Metric("calibration_error", error, samples=query.samples, hit=label)
            if encoder.probabilistic:
                yield from uncertainty.against_hits(query.uncertainty, hit, query.samples, label)
