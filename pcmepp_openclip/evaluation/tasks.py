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

from ..gaussian import Gaussian
from . import coco, uncertainty
from .datasets import Captioned, Labelled
from .encode import Encoder
from .retrieval import DISTANCES, confidence, first_hit, invert, retrieval
from .zeroshot import predict, weighted, zeroshot

HIT_BY = ("mean", "csd")  # the distances by which what comes first is held against the uncertainty
STANDARD_PROMPT = "a photo of a {c}."


@dataclass
class QueryResults:
    """One kind of sample with its uncertainties, and what came of each sample when it was the query."""

    kind: str  # "images" or "captions"
    uncertainty: Tensor
    hits: dict[str, Tensor]  # by the name of what counts as a hit
    confidence: Tensor


@dataclass
class TaskResult:
    name: str
    task: str
    data: Any  # Captioned or Labelled
    metrics: dict[str, float]
    probabilistic: bool
    sides: list[QueryResults] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"images": len(self.data.images)}
        if isinstance(self.data, Captioned):
            out["captions"] = len(self.data.captions)
        else:
            out["classes"] = len(self.data.classes)
        out["metrics"] = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        if self.probabilistic:
            out["bins"] = {
                f"{side.kind}/{name}": uncertainty.bins(side.uncertainty, hit)
                for side in self.sides
                for name, hit in side.hits.items()
            }
        return out


def evaluate_retrieval(encoder: Encoder, name: str, data: Captioned, rank: int = 0) -> TaskResult | None:
    images = encoder.images(data.images, f"{name}-images")
    texts = encoder.texts(data.captions, f"{name}-captions")
    if rank:
        return None
    pairs = [[i] for i in data.image_of_caption]
    right = {"R@1": pairs, **({"any_match_R@1": data.images_of_caption} if data.images_of_caption else {})}
    distances = DISTANCES if encoder.probabilistic else DISTANCES[:1]
    sides = []
    for kind, query, gallery in (("images", images, texts), ("captions", texts, images)):
        hits = {}
        for what, matches in right.items():
            by_query = invert(matches, len(data.images)) if kind == "images" else matches
            for distance in (distance for distance in distances if distance in HIT_BY):
                hits[f"{distance}_{what}"] = first_hit(query, gallery, by_query, distance)
        sides.append(QueryResults(kind, query.uncertainty, hits, confidence(query, gallery, encoder.scale)))
    metrics = dict(retrieval(images, texts, data.image_of_caption, data.images_of_caption, distances))
    if data.coco_images is not None:
        assert data.coco_captions is not None
        package, own = coco.load_eccv_caption(), data.image_of_caption
        for distance in distances:
            del metrics[f"{distance}/RSUM"]  # COCO has two, of 1K and of 5K, which have their own names
        metrics |= coco.coco(images, texts, data.coco_images, data.coco_captions, own, distances, package)
        if encoder.probabilistic:
            for side, hit in zip(
                sides, coco.first_hits_1k(images, texts, data.coco_captions, own, "csd", package), strict=True
            ):
                side.hits["coco_1k_csd_R@1"] = hit
    metrics |= _of_sides(encoder, sides)
    if encoder.probabilistic:
        metrics |= {f"images/{k}": v for k, v in uncertainty.against_facts(images.uncertainty, data.facts)}
        counts = None if data.images_of_caption is None else [len(fits) for fits in data.images_of_caption]
        metrics |= {f"captions/{k}": v for k, v in uncertainty.of_captions(texts.uncertainty, data.captions, counts)}
    return TaskResult(name, "retrieval", data, metrics, encoder.probabilistic, sides)


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
    metrics = dict(zeroshot(images, data.labels, prompts_CTD, one, known, encoder.probabilistic))
    classifier = weighted(prompts_CTD, torch.ones(shape[:2]))
    hit = (predict(images.mean, classifier)[:, 0] == torch.tensor(data.labels)).float()
    sure = confidence(images, Gaussian(classifier, classifier), encoder.scale)
    sides = [QueryResults("images", images.uncertainty, {"accuracy": hit}, sure)]
    metrics |= _of_sides(encoder, sides)
    if encoder.probabilistic:
        metrics |= {f"images/{k}": v for k, v in uncertainty.against_facts(images.uncertainty, data.facts)}
    return TaskResult(name, "zeroshot", data, metrics, encoder.probabilistic, sides)


def _of_sides(encoder: Encoder, sides: Sequence[QueryResults]) -> Iterator[tuple[str, float]]:
    for side in sides:
        for what, hit in side.hits.items():
            yield f"{side.kind}/{what}/calibration_error", uncertainty.reliability(side.confidence, hit)[1]
            if encoder.probabilistic:
                for key, value in uncertainty.against_hits(side.uncertainty, hit):
                    yield f"{side.kind}/{what}/{key}", value
