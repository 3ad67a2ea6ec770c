"""The demo's numbers, against plain loops, and on cases where they are known."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.demo import goals
from pcmepp_openclip.demo import measure as m
from pcmepp_openclip.demo.scenes import COVERS
from pcmepp_openclip.gaussian import Gaussian

SCALE, MATCH_SCALE = 10.0, 2.5


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
    kind = [("clean", "blurred", f"covered_by_{COVERS[i // 3 % 3]}")[i % 3] for i in range(20)]
    images, texts = gaussians(20), gaussians(50)
    texts = Gaussian(torch.nn.functional.normalize(texts.mean + images.mean[own], dim=1), texts.logvar)
    words, things = torch.arange(50) % 7, 1 + torch.arange(20) % 2
    visible = things - torch.tensor([k.startswith("covered") for k in kind]).int()
    truth = m.Truth(fits, own, torch.arange(50), words, things, visible, kind)
    return images, texts, truth, Bank(gaussians(30).mean, gaussians(30).mean, SCALE), MATCH_SCALE


def test_against_plain_loops_and_scipy(case):
    images, texts, truth, _, _ = case
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
    assert numbers["caption_matches_spearman"] == pytest.approx(stats.spearmanr(texts.uncertainty, number)[0])
    assert numbers["caption_shortness_spearman"] == pytest.approx(stats.spearmanr(-truth.words_M, number)[0])
    for name, kinds, step in (
        ("blurred_auroc", ["blurred"], 1),
        ("blurred_auroc_of_1", ["blurred"], 2),  # every second image shows one thing
        ("covered_auroc", [kind for kind in truth.kind_N if kind.startswith("covered")], 1),
        ("covered_by_paper_auroc", ["covered_by_paper"], 1),
    ):
        lost, clean = (
            [float(u) for u, kind in zip(images.uncertainty[::step], truth.kind_N[::step], strict=True) if kind in some]
            for some in (kinds, ["clean"])
        )
        u = stats.mannwhitneyu(lost, clean).statistic
        assert numbers[name] == pytest.approx(u / len(lost) / len(clean)), name


def test_the_bank_s_numbers_against_plain_loops(case):
    images, texts, truth, bank, _ = case
    numbers = dict(m.measure(*case))

    def hubness(item, references):
        return math.log(sum(math.exp(SCALE * float(item @ r)) for r in references) / len(references))

    def own_hubness(i, own, references):
        return hubness(own[i], [r for j, r in enumerate(references) if j != i])

    def confusion(query, references, offsets, order=2):
        logits = torch.stack([SCALE * query @ r - h for r, h in zip(references, offsets, strict=True)])
        p = logits.softmax(dim=0)
        return 1 / float((p * p).sum()) if order == 2 else math.exp(-(p * p.log()).sum())

    of_images = [own_hubness(i, bank.images_BD, bank.texts_BD) for i in range(len(bank))]
    text_confusion = torch.tensor([confusion(t, bank.images_BD, of_images) for t in texts.mean])
    share = torch.tensor([confusion(t, bank.images_BD, of_images, order=1) for t in texts.mean]) / len(bank)
    number = truth.fits_MN.sum(dim=1)
    expected = stats.spearmanr(bank.multiplicity(texts.mean, "texts"), number)[0]
    assert numbers["bank/caption_matches_spearman"] == pytest.approx(expected, abs=1e-4)
    text_hubness = torch.tensor([hubness(t, bank.images_BD) for t in texts.mean])
    cosine_NM = images.mean @ texts.mean.T
    entailment = cosine_NM - (text_hubness - share.log()) / SCALE
    assert numbers["bank/wording_entailment_mAP@R"] == pytest.approx(slow_map_at_r(entailment, truth.fits_MN.T))
    by_mean = slow_map_at_r(cosine_NM, truth.fits_MN.T)
    assert numbers["bank/entailment_gain_mAP@R"] == pytest.approx(numbers["bank/wording_entailment_mAP@R"] - by_mean)
    prior = bank.multiplicity(texts.mean, "texts").expand(20, 50)
    assert numbers["bank/wording_prior_mAP@R"] == pytest.approx(slow_map_at_r(prior, truth.fits_MN.T))
    image_hubness = torch.tensor([hubness(v, bank.texts_BD) for v in images.mean])
    to_image = (cosine_NM.T - 0.5 * image_hubness / SCALE).argmax(dim=1)
    to_text = (cosine_NM - 0.5 * text_hubness / SCALE).argmax(dim=1)
    found = (to_image == truth.own_M, truth.own_M[to_text] == torch.arange(20))
    hits = [hit.float().mean().item() for hit in found]
    assert [numbers[f"bank/{n}_csd_own_R@1"] for n in ("text_to_image", "image_to_text")] == pytest.approx(hits)
    assert numbers["bank/csd_gain_R@1"] == pytest.approx(sum(hits) / 2 - numbers["own_R@1"])
    missed = cosine_NM.argmax(dim=0) != truth.own_M
    gallery = torch.tensor([confusion(t, images.mean, image_hubness.tolist()) for t in texts.mean])
    for name, score in (
        ("bank/text_to_image_gallery_miss_auroc", gallery),
        ("bank/text_to_image_miss_auroc", text_confusion),
        ("text_to_image_miss_auroc", texts.uncertainty),
        ("text_to_image_cosine_miss_auroc", -cosine_NM.amax(dim=0)),
    ):
        u = stats.mannwhitneyu(score[missed], score[~missed]).statistic
        assert numbers[name] == pytest.approx(u / missed.sum().item() / (~missed).sum().item()), name


def test_the_entailment_score_of_the_variance_its_prior_and_the_oracle(case):
    images, texts, truth, _, _ = case
    numbers, fits = dict(m.measure(*case)), truth.fits_MN.T
    cosine_NM, k = images.mean @ texts.mean.T, 2 * MATCH_SCALE / SCALE
    scores = {
        "wording_mAP@R": cosine_NM,
        "wording_entailment_mAP@R": cosine_NM + k / (2 * (1 - k)) * texts.uncertainty,
        "wording_prior_mAP@R": texts.uncertainty.expand(20, 50),
        "wording_oracle_mAP@R": SCALE * cosine_NM + (fits.sum(dim=0) / 20).log(),
    }
    for name, score in scores.items():
        assert numbers[name] == pytest.approx(slow_map_at_r(score, fits)), name
        u = stats.mannwhitneyu(score[fits], score[~fits]).statistic
        assert numbers[name.replace("mAP@R", "auroc")] == pytest.approx(u / fits.sum().item() / (~fits).sum().item())


def test_the_best_that_can_be_done_where_a_cover_is_invisible(case):
    """An image of one thing in sight may be a clean scene of one: they tie."""
    truth = case[2]
    covered, clean = (
        [v for v, each in zip(truth.visible_N.tolist(), truth.kind_N, strict=True) if each == kind]
        for kind in ("covered_by_paper", "clean")
    )
    better = sum((a < b) + 0.5 * (a == b) for a in covered for b in clean) / len(covered) / len(clean)
    assert dict(m.measure(*case))["covered_by_paper_auroc_ceiling"] == pytest.approx(better) and better < 1


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
    kind = ["clean" if not b else ("blurred", "covered_by_grey")[i % 8 == 0] for i, b in enumerate(bad)]
    each, things = torch.arange(n), 1 + torch.arange(n) // 4 % 2
    truth = m.Truth(fits, each, each, torch.ones(n), things, things, kind)
    numbers = dict(m.measure(images, texts, truth, Bank(eye, texts.mean, SCALE), MATCH_SCALE))
    assert numbers["caption_matches_spearman"] > 0.99 and numbers["blurred_auroc"] == numbers["covered_auroc"] == 1
    assert numbers["text_to_image_bins"] < -0.3
    assert numbers["text_to_image_any_match_bins"] > 0.3  # a vague caption finds something true: no failure to predict


def test_only_what_every_seed_reaches_is_reached():
    up, down = goals.Goal("x", 0.8, ""), goals.Goal("x", -0.8, "", below=True)
    assert up.reached(0.8) and not up.reached(0.79) and down.reached(-0.8) and not down.reached(-0.79)
    assert not up.reached(math.nan) and not down.reached(math.nan)
    goal = goals.GOALS[0]
    runs = [{name: 0.0 for g in goals.GOALS for name in (g.name, f"bank/{g.name}")} for _ in range(3)]
    for numbers, variance, bank in zip(runs, (0.9, 0.7, 0.8), (0.8, 0.8, 0.95), strict=True):
        numbers |= {goal.name: variance, f"bank/{goal.name}": bank}
    variance, bank = goals.targets(runs)[:2]
    assert (variance["estimator"], variance["reached"]) == ("variance", 2)
    assert (bank["name"], bank["reached"]) == ("bank/caption_matches_spearman", 3)
    assert (variance["mean"], variance["min"], variance["max"]) == (pytest.approx(0.8), 0.7, 0.9)
    assert goal.verdict([0.9, 0.7, 0.8]) == "not reached (2 of 3 seeds)"
    assert goal.verdict([0.8, 0.8, 0.95]) == "reached in 3 of 3 seeds"
    assert goals.spread([0.9, 0.7, 0.8]) == "0.800 (0.700 to 0.900)" and goals.spread([0.25]) == "0.250"


def test_ties():
    score = torch.tensor([[1.0, 1.0, 0.0]])
    assert m.first_is(score, torch.tensor([[False, True, False]])).tolist() == [0.5]
    assert m.first_is(score, torch.tensor([[False, False, True]])).tolist() == [0]


def test_a_wording_counts_once_in_the_rank_correlation(case):
    images, texts, truth, bank, _ = case
    wording = torch.arange(50) % 30  # the last 20 captions repeat the first
    texts, fits = Gaussian(texts.mean[wording], texts.logvar[wording]), truth.fits_MN[wording]
    repeated = dataclasses.replace(truth, fits_MN=fits, text_M=wording)
    numbers = dict(m.measure(images, texts, repeated, bank, MATCH_SCALE))
    each = stats.spearmanr(texts.uncertainty[:30], fits[:30].sum(dim=1))[0]
    assert numbers["caption_matches_spearman"] == pytest.approx(each)
    assert abs(stats.spearmanr(texts.uncertainty, fits.sum(dim=1))[0] - each) > 0.01


def test_captions_of_the_same_words_are_one(case):
    """Image 0's first caption is written for image 1 too: whichever comes first, it is image 0's own."""
    images, texts, truth, bank, _ = case
    texts.mean[0], texts.mean[1] = images.mean[0], images.mean[0]
    cosine = texts.mean @ images.mean.T
    assert cosine[:2, 0].min() >= cosine[2:, 0].max()
    apart = dict(m.measure(*case))["image_to_text_own_R@1"]
    same = torch.arange(50)
    same[1] = 0
    as_one = dict(m.measure(images, texts, dataclasses.replace(truth, text_M=same), bank, MATCH_SCALE))
    assert as_one["image_to_text_own_R@1"] == pytest.approx(apart + 0.5 / 20)
