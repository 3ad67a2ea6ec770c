"""The reliability of the probability of a pair, against loops over all combinations and the form without chunks."""

import math

import pytest
import torch
import torch.nn.functional as F

from pcmepp_openclip import Gaussian
from pcmepp_openclip.ambiguity import Bank, Calibration
from pcmepp_openclip.ambiguity.calibration import reliability
from pcmepp_openclip.evaluation import pairs
from pcmepp_openclip.evaluation.metric import as_dict

SCALE, IMAGES, TEXTS = 12.0, 14, 40


@pytest.fixture(scope="module")
def case():
    """Several captions of each image, and a bank of other pairs; all have variances."""
    g = torch.Generator().manual_seed(0)

    def unit(x):
        return F.normalize(x, dim=-1)

    own = [i % IMAGES for i in range(TEXTS)]
    images = unit(torch.randn(IMAGES, 8, generator=g))
    texts = unit(images[own] + 0.6 * torch.randn(TEXTS, 8, generator=g))
    references = unit(torch.randn(30, 8, generator=g))
    bank = Bank(references, unit(references + 0.5 * torch.randn(30, 8, generator=g)), SCALE)
    variances = (torch.randn(n, 8, generator=g) - 3 for n in (IMAGES, TEXTS))
    images, texts = (Gaussian(mean, logvar) for mean, logvar in zip((images, texts), variances, strict=True))
    return images, texts, own, bank


def calibration(estimator):
    return Calibration(estimator, 0.8, 0.3, 0.5, -4.0, 100, 0.0)


def slow_probability(images, texts, bank, estimator):
    """One combination at a time, in Python's own floats; `estimator` None is the logit of the model."""
    rows = []
    for v in range(IMAGES):
        row = []
        for t in range(TEXTS):
            logit = SCALE * float(images.mean[v].double() @ texts.mean[t].double())
            if estimator == "bank":
                x_v = sum(math.exp(SCALE * float(images.mean[v] @ text)) for text in bank.texts_BD)
                x_t = sum(math.exp(SCALE * float(image @ texts.mean[t])) for image in bank.images_BD)
                x_v, x_t = math.log(x_v / len(bank)), math.log(x_t / len(bank))
            elif estimator == "variance":
                x_v = float(images.logvar[v].exp().sum()) * SCALE / 2
                x_t = float(texts.logvar[t].exp().sum()) * SCALE / 2
            if estimator:
                logit = 0.8 * logit - 0.3 * x_v - 0.5 * x_t - 4.0
            row.append(logit)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.double)


@pytest.mark.parametrize("estimator", ["bank", "variance"])
@pytest.mark.parametrize("chunk", [1, 100, 10**7])
def test_every_number_against_loops(case, estimator, chunk):
    images, texts, own, bank = case
    found = pairs.reliabilities(calibration(estimator), images, texts, own, SCALE, bank, chunk)
    assert list(found) == [f"calibrated_{estimator}", "sigmoid"]
    truth = torch.arange(IMAGES)[:, None] == torch.tensor(own)
    curve, error = found[f"calibrated_{estimator}"]
    expected = reliability(slow_probability(images, texts, bank, estimator).sigmoid(), truth)
    assert error == pytest.approx(expected[1], abs=1e-4) and error > 0.01
    assert [x for point in curve for x in point] == pytest.approx([x for p in expected[0] for x in p], abs=1e-3)
    logits = slow_probability(images, texts, bank, None)
    weight = torch.where(truth, 0.5 / truth.sum(), 0.5 / (~truth).sum())

    def loss(c):
        return (weight * F.binary_cross_entropy_with_logits(logits + c, truth.double(), reduction="none")).sum().item()

    shifts = [-SCALE + i * 0.001 for i in range(int(2000 * SCALE))]
    best = min(shifts, key=loss)
    expected = reliability((logits + best).sigmoid(), truth)
    assert found["sigmoid"][1] == pytest.approx(expected[1], abs=2e-3)
    metrics = as_dict(pairs.pairs(found))
    assert metrics == {
        f"pairs/calibrated_{estimator}/match_ECE": error,
        "pairs/sigmoid/match_ECE": found["sigmoid"][1],
    }


def test_the_shift_leaves_the_mean_at_the_prior(case):
    images, texts, own, _ = case
    combinations = pairs._Combinations(images.mean, texts.mean, torch.tensor(own), SCALE, 100)
    p = (SCALE * images.mean @ texts.mean.T + pairs.best_shift(combinations)).sigmoid()
    truth = torch.arange(IMAGES)[:, None] == torch.tensor(own)
    assert (p[truth].mean() + p[~truth].mean()).item() / 2 == pytest.approx(0.5, abs=1e-3)


def test_one_image_has_no_other_to_be_told_from(case):
    images, texts, _, bank = case
    one = Gaussian(images.mean[:1], images.logvar[:1])
    assert pairs.reliabilities(calibration("bank"), one, texts, [0] * TEXTS, SCALE, bank) == {}
    assert list(pairs.pairs({})) == []
