"""Failure prediction against scikit-learn and plain loops, with ties and constants."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics

from pcmepp_openclip.evaluation.failure import (
    aurc,
    average_precision,
    best_aurc,
    confidences,
    failure,
    fpr95,
)
from pcmepp_openclip.evaluation.metric import as_dict

NAMES = ("miss_AUROC", "FPR95", "AUPR_error", "AURC_x1000", "E-AURC_x1000")


def samples(n=150, steps=None, seed=0, errors=0.3):
    """Confident samples hit more often; with `steps`, many are equally confident."""
    g = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=g)
    hit = (torch.rand(n, generator=g) < 1 - 2 * errors * (1 - confidence)).float()
    return confidence if steps is None else (confidence * steps).round() / steps, hit


def slow_aurc(confidence, hit, order):
    order = sorted(order, key=lambda i: -confidence[i])  # stable: equal ones stay as they are in `order`
    risks = [sum(1 - hit[i] for i in order[:k]) / k for k in range(1, len(order) + 1)]
    return sum(risks) / len(risks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [None, 12, 3])
def test_against_scikit_learn(steps, seed):
    confidence, hit = samples(steps=steps, seed=seed, errors=(0.1, 0.3, 0.5, 0.9)[seed])
    got = as_dict(failure(confidence, hit, "images", "accuracy", "max_softmax"))
    assert list(got) == [f"images/accuracy/max_softmax/{name}" for name in NAMES]
    values = dict(zip(NAMES, got.values(), strict=True))
    c, h = confidence.numpy(), hit.numpy()
    assert values["miss_AUROC"] == pytest.approx(metrics.roc_auc_score(h, c))
    assert values["AUPR_error"] == pytest.approx(metrics.average_precision_score(1 - h, -c))
    fpr, tpr, _ = metrics.roc_curve(h, c, drop_intermediate=False)
    first = np.unique(tpr, return_index=True)[1]  # of equal rates of hits, the fewest misses
    last = len(tpr) - 1 - np.unique(tpr[::-1], return_index=True)[1]
    low, high = (t := tpr[first])[t < 0.95].max(), t[t >= 0.95].min()
    start, end = fpr[last][t == low][0], fpr[first][t == high][0]  # the segment that crosses 0.95
    assert values["FPR95"] == pytest.approx(start + (0.95 - low) / (high - low) * (end - start))
    assert values["FPR95"] == pytest.approx(np.interp(0.95, tpr, fpr)) or 0.95 in tpr
    error = 1 - h.mean()
    assert values["E-AURC_x1000"] == pytest.approx(
        values["AURC_x1000"] - 1000 * (error + (1 - error) * np.log(1 - error)), abs=1e-3
    )


def test_aurc_without_ties_against_a_loop():
    confidence, hit = samples()
    assert aurc(confidence, hit) == pytest.approx(slow_aurc(confidence.tolist(), hit.tolist(), range(150)))


def test_aurc_of_ties_is_that_of_a_drawn_order():
    confidence, hit = samples(40, steps=3)
    rng, drawn = random.Random(0), []
    for _ in range(2000):
        drawn.append(slow_aurc(confidence.tolist(), hit.tolist(), rng.sample(range(40), 40)))
    assert aurc(confidence, hit) == pytest.approx(sum(drawn) / len(drawn), abs=2e-3)
    turned = torch.arange(39, -1, -1)
    assert aurc(confidence, hit) == pytest.approx(aurc(confidence[turned], hit[turned]))


def test_the_best_order_is_the_best_aurc():
    hit = (torch.arange(20_000) < 14_000).float()
    assert aurc(-torch.arange(20_000.0), hit) == pytest.approx(best_aurc(0.3), abs=1e-4)
    values = as_dict(failure(-torch.arange(20_000.0), hit, "images", "accuracy"))
    assert values["images/accuracy/miss_AUROC"] == 1 and values["images/accuracy/FPR95"] == 0
    assert values["images/accuracy/AUPR_error"] == 1 and abs(values["images/accuracy/E-AURC_x1000"]) < 0.1


def test_fpr95_by_hand():
    """20 hits and 4 misses; the 19th hit comes after two misses."""
    order = [1] * 18 + [0, 0, 1, 0, 1, 0]
    assert fpr95(-torch.arange(24.0), torch.tensor(order).float()) == 0.5
    tied = -torch.tensor([0.0] * 10 + [1.0] * 14)  # of 10 hits, then of 10 hits and 4 misses at once
    assert fpr95(tied, torch.tensor([1.0] * 20 + [0.0] * 4)) == pytest.approx(0.9)


def test_all_hits_all_misses_and_equal_confidences():
    confidence, hit = samples(30)

    def values(*args):
        return dict(zip(NAMES, as_dict(failure(*args, "images", "R@1")).values(), strict=True))

    all_hits, all_misses = values(confidence, torch.ones(30)), values(confidence, torch.zeros(30))
    for name in ("miss_AUROC", "FPR95"):
        assert math.isnan(all_hits[name]) and math.isnan(all_misses[name])
    assert math.isnan(all_hits["AUPR_error"]) and all_misses["AUPR_error"] == 1
    assert (all_hits["AURC_x1000"], all_hits["E-AURC_x1000"]) == (0, 0)
    assert all_misses["AURC_x1000"] == pytest.approx(1000) and all_misses["E-AURC_x1000"] == pytest.approx(0)
    equal, error = values(torch.ones(30), hit), 1 - hit.mean().item()
    assert equal["miss_AUROC"] == 0.5 and equal["FPR95"] == pytest.approx(0.95)
    assert equal["AUPR_error"] == pytest.approx(error) and equal["AURC_x1000"] == pytest.approx(1000 * error)
    assert math.isnan(average_precision(torch.zeros(3), torch.zeros(3)))


@pytest.mark.parametrize("chunk", [1, 10**6])
def test_confidences_against_the_formulas(chunk):
    g = torch.Generator().manual_seed(0)
    query, gallery = (F.normalize(torch.randn(n, 8, generator=g), dim=-1) for n in (9, 5))
    got = confidences(query, gallery, 20.0, chunk)
    for i in range(9):
        cosines = [sum(a * b for a, b in zip(query[i].tolist(), item.tolist(), strict=True)) for item in gallery]
        whole = sum(math.exp(20 * c) for c in cosines)
        p = [math.exp(20 * c) / whole for c in cosines]
        square = sum(x * x for x in p)
        assert got["max_cosine"][i].item() == pytest.approx(max(cosines), abs=1e-6)
        assert got["max_softmax"][i].item() == pytest.approx(max(p), abs=1e-6)
        assert got["entropy"][i].item() == pytest.approx(sum(x * math.log(x) for x in p), abs=1e-5)
        assert got["doctor"][i].item() == pytest.approx(-(1 - square) / square, abs=1e-4)
