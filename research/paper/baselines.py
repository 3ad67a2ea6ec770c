"""The metrics of rankings that look at no query, which all other rows must be read beside.

Chance is the exact expectation of a random order. The prior is one order for every query: the items that fit most
queries first. On the scenes vague captions fit hundreds of images, so that the prior alone has a high mAP@R, and a
variance that puts vague captions first has it, too.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

from pcmepp_openclip.evaluation.datasets import Captioned
from pcmepp_openclip.evaluation.retrieval import KS, SAMPLES, invert

Items: TypeAlias = Sequence[Sequence[int]]  # the items of each query


def retrieval_chance(data: Captioned) -> dict[str, float]:
    """Return the expected metrics of a random order, by the names that `pcmepp eval` gives to those of the cosine."""
    metrics, rsum = {}, 0.0
    for direction, (own, right, gallery) in _sides(data).items():
        for k in KS:
            recall = fmean(1 - _none_of(len(items), k, gallery) for items in own)
            rsum += 100 * recall
            metrics[f"{direction}_R@{k}"] = recall
        metrics[f"{direction}_any_match_R@1"] = fmean(len(items) / gallery for items in right)
        metrics[f"{direction}_R-Precision"] = metrics[f"{direction}_any_match_R@1"]
        metrics[f"{direction}_mAP@R"] = fmean(map_at_r_chance(len(items), gallery) for items in right)
    return {**metrics, "RSUM": rsum}


def retrieval_prior(data: Captioned) -> dict[str, float]:
    """Return the metrics of one order for every query, by the number of queries that an item fits."""
    metrics, rsum = {}, 0.0
    for direction, (own, right, gallery) in _sides(data).items():
        fitting = [len(queries) for queries in invert(right, gallery)]
        order = sorted(range(gallery), key=lambda item: -fitting[item])
        place = {item: i for i, item in enumerate(order)}
        for k in KS:
            recall = fmean(float(min(place[item] for item in items) < k) for items in own)
            rsum += 100 * recall
            metrics[f"{direction}_R@{k}"] = recall
        hits = [sorted(place[item] for item in items) for items in right]
        metrics[f"{direction}_any_match_R@1"] = fmean(float(places[0] == 0) for places in hits)
        metrics[f"{direction}_R-Precision"] = fmean(
            sum(x < len(places) for x in places) / len(places) for places in hits
        )
        metrics[f"{direction}_mAP@R"] = fmean(
            math.fsum((i + 1) / (x + 1) for i, x in enumerate(places) if x < len(places)) / len(places)
            for places in hits
        )
    return {**metrics, "RSUM": rsum}


def _sides(data: Captioned) -> dict[str, tuple[Items, Items, int]]:
    """Return by direction the own items of each query, the items that fit it, and the size of the gallery."""
    pairs = [[image] for image in data.image_of_caption]
    fits = pairs if data.images_of_caption is None else data.images_of_caption
    images, captions = len(data.images), len(data.captions)
    sides: dict[str, tuple[Items, Items, int]] = {
        "image_to_text": (invert(pairs, images), invert(fits, images), captions),
        "text_to_image": (pairs, fits, images),
    }
    assert set(sides) == set(SAMPLES)
    return sides


def map_at_r_chance(right: int, gallery: int) -> float:
    """Return the expected mAP@R of a random order of `gallery` items of which R are right.

    Item r is right with probability R/M, and then r' = r - 1 items before it hold r' (R - 1) / (M - 1) right ones:

        1/R  sum over r = 1..R of  R/M (1 + (r - 1) (R - 1) / (M - 1)) / r
    """
    share = (right - 1) / (gallery - 1) if gallery > 1 else 0.0
    return math.fsum((1 + (r - 1) * share) / r for r in range(1, right + 1)) / gallery


def _none_of(right: int, k: int, gallery: int) -> float:
    """Return the probability that none of the `right` items is among the first k."""
    return math.comb(gallery - right, k) / math.comb(gallery, k) if k <= gallery else 0.0
