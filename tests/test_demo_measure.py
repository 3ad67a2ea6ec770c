"""The demo's numbers, against plain loops, and on cases where they are known."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pcmepp_openclip.demo import measure as m
from pcmepp_openclip.gaussian import Gaussian


def slow_map_at_r(score, fits):
    total = 0.0
    for scores, wanted in zip(score.tolist(), fits.tolist(), strict=True):
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        r = sum(wanted)
        found, ap = 0, 0.0
        for place, item in enumerate(order[:r], 1):
            if wanted[item]:
                found += 1
                ap += found / place
        total += ap / r
    return total / len(score)


@pytest.fixture
def case():
    """20 images and 50 captions at random, every caption fitting its own image, every image one caption at least."""
    generator = torch.Generator().manual_seed(0)

    def gaussians(n):
        mean = torch.nn.functional.normalize(torch.randn(n, 8, generator=generator), dim=1)
        return Gaussian(mean, torch.randn(n, 8, generator=generator) - 2)

    own = torch.arange(50) % 20
    fits = torch.rand(50, 20, generator=generator) < 0.3
    fits[torch.arange(50), own] = True
    condition = [("clean", "blurred", "covered")[i % 3] for i in range(20)]
    images, texts = gaussians(20), gaussians(50)
    texts = Gaussian(torch.nn.functional.normalize(texts.mean + images.mean[own], dim=1), texts.logvar)
    words, things = torch.arange(50) % 7, 1 + torch.arange(20) % 2
    return images, texts, m.Truth(fits, own, torch.arange(50), words, things, condition)


def test_against_plain_loops_and_scipy(case):
    images, texts, truth = case
    numbers = dict(m.measure(*case))
    assert all(math.isfinite(value) for value in numbers.values())
    cosine = texts.mean @ images.mean.T
    distance = -torch.cdist(texts.mean, images.mean).square() - texts.uncertainty[:, None] - images.uncertainty
    assert numbers["text_to_image_mAP@R"] == pytest.approx(slow_map_at_r(cosine, truth.fits_MN), abs=1e-6)
    assert numbers["image_to_text_mAP@R"] == pytest.approx(slow_map_at_r(cosine.T, truth.fits_MN.T), abs=1e-6)
    assert numbers["text_to_image_csd_mAP@R"] == pytest.approx(slow_map_at_r(distance, truth.fits_MN), abs=1e-6)
    assert numbers["image_to_text_csd_mAP@R"] == pytest.approx(slow_map_at_r(distance.T, truth.fits_MN.T), abs=1e-6)
    first = cosine.argmax(dim=1)
    assert numbers["text_to_image_own_R@1"] == pytest.approx((first == truth.own_M).float().mean().item())
    assert numbers["text_to_image_any_match_R@1"] == pytest.approx(
        truth.fits_MN[range(50), first].float().mean().item()
    )
    hit = (distance.argmax(dim=1) == truth.own_M).float()
    shares = [hit[part].mean() for part in texts.uncertainty.argsort().tensor_split(10)]
    assert numbers["text_to_image_csd_bins"] == pytest.approx(np.corrcoef(range(10), shares)[0, 1], abs=1e-5)
    first = cosine.argmax(dim=0)
    assert numbers["image_to_text_own_R@1"] == pytest.approx((truth.own_M[first] == torch.arange(20)).float().mean())
    number = truth.fits_MN.sum(dim=1)
    assert numbers["caption_uncertainty_spearman"] == pytest.approx(stats.spearmanr(texts.uncertainty, number)[0])
    assert numbers["caption_shortness_spearman"] == pytest.approx(stats.spearmanr(-truth.words_M, number)[0])
    by_condition = {c: images.uncertainty[[x == c for x in truth.condition_N]] for c in ("clean", "blurred")}
    odd = {c: [x == c and i % 2 == 0 for i, x in enumerate(truth.condition_N)] for c in by_condition}
    u = stats.mannwhitneyu(images.uncertainty[odd["blurred"]], images.uncertainty[odd["clean"]]).statistic
    assert numbers["blurred_auroc_of_1"] == pytest.approx(u / sum(odd["blurred"]) / sum(odd["clean"]))
    u = stats.mannwhitneyu(by_condition["blurred"], by_condition["clean"]).statistic
    assert numbers["blurred_auroc"] == pytest.approx(u / len(by_condition["blurred"]) / len(by_condition["clean"]))


def test_a_model_that_knows_what_it_cannot_know():
    """Means that are the facts themselves, and variances that are the truth."""
    rng, n = np.random.default_rng(0), 200
    fits = torch.from_numpy(rng.random((n, n)) < np.linspace(0, 0.9, n)[:, None])  # later captions fit more images
    fits.fill_diagonal_(True)
    texts = Gaussian(torch.nn.functional.normalize(fits.float(), dim=1), fits.sum(dim=1, keepdim=True).log() - 9)
    bad = torch.arange(n) % 4 == 0
    eye = torch.eye(n)
    eye[bad] = eye[bad].roll(1, dims=1)  # what cannot be seen is taken for something else
    images = Gaussian(eye, bad.float()[:, None] - 20)
    condition = ["clean" if not b else ("blurred", "covered")[i % 8 == 0] for i, b in enumerate(bad)]
    each, things = torch.arange(n), 1 + torch.arange(n) // 4 % 2
    numbers = dict(m.measure(images, texts, m.Truth(fits, each, each, torch.ones(n), things, condition)))
    assert numbers["caption_uncertainty_spearman"] > 0.99 and numbers["blurred_auroc"] == numbers["covered_auroc"] == 1
    assert numbers["text_to_image_bins"] < -0.3
    assert numbers["text_to_image_any_match_bins"] > 0.3  # a vague caption finds something true: no failure to predict


def test_targets():
    up, down = m.Goal("x", 0.8, ""), m.Goal("x", -0.8, "", below=True)
    assert up.reached(0.8) and not up.reached(0.79) and down.reached(-0.8) and not down.reached(-0.79)
    assert not up.reached(math.nan) and not down.reached(math.nan)


def test_ties():
    score = torch.tensor([[1.0, 1.0, 0.0]])
    assert m.first_is(score, torch.tensor([[False, True, False]])).tolist() == [0.5]
    assert m.first_is(score, torch.tensor([[False, False, True]])).tolist() == [0]


def test_a_wording_counts_once_in_the_rank_correlation(case):
    images, texts, truth = case
    wording = torch.arange(50) % 30  # the last 20 captions repeat the first
    texts, fits = Gaussian(texts.mean[wording], texts.logvar[wording]), truth.fits_MN[wording]
    repeated = dataclasses.replace(truth, fits_MN=fits, text_M=wording)
    numbers = dict(m.measure(images, texts, repeated))
    each = stats.spearmanr(texts.uncertainty[:30], fits[:30].sum(dim=1))[0]
    assert numbers["caption_uncertainty_spearman"] == pytest.approx(each)
    assert abs(stats.spearmanr(texts.uncertainty, fits.sum(dim=1))[0] - each) > 0.01


def test_captions_of_the_same_words_are_one(case):
    """Image 0's first caption is written for image 1 too: whichever comes first, it is image 0's own."""
    images, texts, truth = case
    texts.mean[0], texts.mean[1] = images.mean[0], images.mean[0]
    cosine = texts.mean @ images.mean.T
    assert cosine[:2, 0].min() >= cosine[2:, 0].max()
    apart = dict(m.measure(*case))["image_to_text_own_R@1"]
    same = torch.arange(50)
    same[1] = 0
    as_one = dict(m.measure(images, texts, dataclasses.replace(truth, text_M=same)))
    assert as_one["image_to_text_own_R@1"] == pytest.approx(apart + 0.5 / 20)
