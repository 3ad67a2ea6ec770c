"""Zero-shot accuracies against plain loops; Bayesian prompt re-weighting against its formulas and a known mixture."""

import math

import pytest
import torch
import torch.nn.functional as F
from slow import SLOW

from pcmepp_openclip import DISTANCES, Gaussian
from pcmepp_openclip.ambiguity import Bank, BankEntailment, HubnessCorrected
from pcmepp_openclip.evaluation import bprw
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.zeroshot import best_ks, zeroshot

CLASSES, PROMPTS, DIM, IMAGES = 7, 6, 8, 90


@pytest.fixture(scope="module")
def case():
    """Prompts around a direction of their class, the uncertain ones far from it; images likewise, in two splits."""
    g = torch.Generator().manual_seed(0)
    centre = F.normalize(torch.randn(CLASSES, DIM, generator=g), dim=-1)
    doubt = torch.rand(CLASSES, PROMPTS, 1, generator=g)
    mean = F.normalize(centre[:, None] + 1.2 * doubt * torch.randn(CLASSES, PROMPTS, DIM, generator=g), dim=-1)
    prompts = Gaussian(mean, 4 * doubt - 5 + 0.3 * torch.randn(CLASSES, PROMPTS, DIM, generator=g))
    splits = []
    for _ in range(2):
        labels = torch.randint(CLASSES, (IMAGES,), generator=g)
        noise = torch.randn(IMAGES, DIM, generator=g)
        images = Gaussian(F.normalize(centre[labels] + 0.5 * noise, dim=-1), noise - 4)
        splits.append((images, labels.tolist()))
    return prompts, *splits


def slow_accuracy(images, labels, weights, prompts, distance=None):
    """`weights[c][t]`; the class of the nearest direction, one image and one class at a time."""
    right = 0
    for i, label in enumerate(labels):
        scores = []
        for c in range(CLASSES):
            if distance:
                one = images.mean[i : i + 1], prompts.mean[c], images.logvar[i : i + 1], prompts.logvar[c]
                scores.append(-SLOW[distance](*one).sum().item())
            else:
                direction = sum(weights[c][t] * prompts.mean[c, t] for t in range(PROMPTS))
                scores.append((images.mean[i] @ direction / direction.norm()).item())
        right += scores.index(max(scores)) == label
    return right / len(labels)


def certain(prompts, ks):
    uncertainty = prompts.logvar.exp().sum(-1)
    chosen = [sorted(range(PROMPTS), key=lambda t: uncertainty[c, t].item())[: ks[c]] for c in range(CLASSES)]
    return [[float(t in chosen[c]) for t in range(PROMPTS)] for c in range(CLASSES)]


def slow_best_ks(prompts, images, labels):
    by_class, overall = [], []
    for k in range(1, PROMPTS + 1):
        weights = certain(prompts, [k] * CLASSES)
        own = []
        for c in range(CLASSES):
            numbers = [i for i, label in enumerate(labels) if label == c]
            part = Gaussian(images.mean[numbers], images.logvar[numbers])
            own.append(slow_accuracy(part, [c] * len(numbers), weights, prompts) if numbers else None)
        by_class.append(own)
        overall.append(slow_accuracy(images, labels, weights, prompts))
    k_all = max(k for k in range(1, PROMPTS + 1) if overall[k - 1] == max(overall))
    ks = []
    for c in range(CLASSES):
        best = [k for k in range(1, PROMPTS + 1) if by_class[k - 1][c] == max(row[c] for row in by_class)]
        ks.append(max(best))
    return k_all, ks, sum(max(row[c] for row in by_class) for c in range(CLASSES)) / CLASSES


def test_every_method_against_loops(case):
    prompts, (images, labels), (known, known_labels) = case
    got = as_dict(zeroshot(images, labels, prompts, one_prompt=2, validation=(known, known_labels)))
    uncertainty = prompts.logvar.exp().sum(-1)

    def by(weights):
        return slow_accuracy(images, labels, weights, prompts)

    k_all, ks, _ = slow_best_ks(prompts, known, known_labels)
    _, oracle_ks, oracle = slow_best_ks(prompts, images, labels)
    expected = {
        "one_prompt": by([[float(t == 2) for t in range(PROMPTS)]] * CLASSES),
        "all_prompts": by([[1.0] * PROMPTS] * CLASSES),
        "csd/all_prompts": slow_accuracy(images, labels, None, prompts, "csd"),
        "entailment/all_prompts": slow_accuracy(images, labels, None, prompts, "entailment"),
        "wasserstein/all_prompts": slow_accuracy(images, labels, None, prompts, "wasserstein"),
        "top_1_certain": by(certain(prompts, [1] * CLASSES)),
        "top_2_certain": by(certain(prompts, [2] * CLASSES)),
        "top_5_certain": by(certain(prompts, [5] * CLASSES)),
        "certainty_weighted": by((1 / uncertainty).tolist()),
        "top_K_chosen_on_validation": by(certain(prompts, [k_all] * CLASSES)),
        "best_K_per_class": by(certain(prompts, ks)),
        "oracle_best_K_per_class": by(certain(prompts, oracle_ks)),
        "oracle_best_accuracy_per_class": oracle,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    rest = {"all_prompts_top5", "all_prompts_mean_per_class", "bprw", "bprw_unlabelled"}
    assert set(got) - set(expected) == rest
    assert len(set(expected.values())) > 5  # the methods do differ here


def test_a_plain_model_has_the_distances_that_it_is_given(case):
    """By a bank's own matrix, one class at a time: the mean over its prompts decides."""
    prompts, (images, labels), (known, _) = case
    bank = Bank(known.mean, F.normalize(known.mean + 0.5 * images.mean, dim=-1), 9.0)
    distances = {"cosine": DISTANCES["cosine"], "bank": HubnessCorrected(bank), "bank_entailment": BankEntailment(bank)}
    got = as_dict(zeroshot(images, labels, prompts, probabilistic=False, distances=distances))
    plain = as_dict(zeroshot(images, labels, prompts, probabilistic=False))
    assert set(got) - set(plain) == {"bank/all_prompts", "bank_entailment/all_prompts"}
    for name in ("bank", "bank_entailment"):
        by_class = []
        for mean, logvar in zip(prompts.mean, prompts.logvar, strict=True):
            by_class.append(distances[name].matrix(images, Gaussian(mean, logvar)).mean(dim=1))
        right = torch.stack(by_class).argmin(dim=0) == torch.tensor(labels)
        assert got[f"{name}/all_prompts"] == pytest.approx(right.double().mean().item())
    assert len({got[key] for key in ("all_prompts", "bank/all_prompts", "bank_entailment/all_prompts")}) == 3


def test_top5_and_mean_per_class(case):
    prompts, (images, labels), _ = case
    got = as_dict(zeroshot(images, labels, prompts))
    direction = F.normalize(prompts.mean.mean(dim=1), dim=-1)
    ranking = (images.mean @ direction.T).argsort(dim=1, descending=True)
    assert got["all_prompts_top5"] == pytest.approx(
        sum(label in row[:5] for row, label in zip(ranking.tolist(), labels, strict=True)) / IMAGES
    )
    own = [
        [row[0] == c for row, label in zip(ranking.tolist(), labels, strict=True) if label == c] for c in range(CLASSES)
    ]
    assert got["all_prompts_mean_per_class"] == pytest.approx(sum(sum(x) / len(x) for x in own) / CLASSES)
    assert "bprw" not in got and "best_K_per_class" not in got  # without a validation split


def test_a_plain_clip_has_the_methods_of_the_mean(case):
    prompts, (images, labels), validation = case
    got = as_dict(zeroshot(images, labels, prompts, validation=validation, probabilistic=False))
    assert set(got) == {"one_prompt", "all_prompts", "all_prompts_top5", "all_prompts_mean_per_class"}


def test_a_class_without_validation_images_gets_the_k_for_all(case):
    prompts, _, (known, labels) = case
    rows = [i for i, label in enumerate(labels) if label != 3]
    part = known.mean[rows], torch.tensor([labels[i] for i in rows])
    k_all, k_C, right_C = best_ks(prompts, *part)
    assert k_C[3] == k_all and right_C[3].isnan()


def test_log_likelihood_is_the_density(case):
    """Against torch's own."""
    prompts, (images, _), _ = case
    own = Gaussian(prompts.mean[0], prompts.logvar[0])
    density = torch.distributions.Normal(own.mean, (own.logvar.exp() + bprw.EPS).sqrt())
    got = bprw.log_likelihood(images.mean[:5], own)
    assert torch.allclose(got.float(), density.log_prob(images.mean[:5, None]).sum(-1), rtol=1e-4)


def test_samples_are_those_of_the_images(case):
    _, (images, _), _ = case
    few = Gaussian(images.mean[:5], images.logvar[:5])
    points = bprw.draw(few, 20_000, torch.Generator().manual_seed(0)).reshape(5, 20_000, DIM)
    assert torch.allclose(points.mean(dim=1), few.mean, atol=0.05)
    assert torch.allclose(points.var(dim=1).log(), few.logvar, atol=0.1)


def slow_em(points, means, variances, start, alpha, steps):
    """EM in fp32 with an S x T x D tensor, as ProLIP's code has it, down to the update."""
    variances = variances + 0.02
    pi = start / start.sum()
    for _ in range(steps):
        exponent = -0.5 * ((points[:, None] - means) ** 2 / variances).sum(-1)
        joint = exponent - 0.5 * variances.log().sum(-1) - 0.5 * points.shape[1] * math.log(2 * math.pi) + pi.log()
        responsibility = (joint - joint.amax(dim=1, keepdim=True)).exp()
        responsibility /= responsibility.sum(dim=1, keepdim=True)
        pi = responsibility.sum(dim=0) + alpha - 1
        pi = pi / pi.sum()
    return pi


@pytest.mark.parametrize("setting, expected", [(bprw.FEW_SHOT, (5, 20, 2)), (bprw.NEIGHBOURS, (10, 10, 5))])
def test_bprw_is_that_of_prolip(case, setting, expected):
    """With the images per class, samples per image and alpha of the paper's table 3, on the same samples."""
    assert (setting.images, setting.samples, setting.alpha) == expected
    prompts, (images, _), _ = case
    chosen = [torch.arange(c, IMAGES, CLASSES) for c in range(CLASSES)]
    got = bprw.prompt_weights(prompts, images, chosen, setting)
    torch.manual_seed(0)
    for c in range(CLASSES):
        mean, logvar = (x[chosen[c]][: setting.images] for x in images)
        noise = torch.randn(len(mean), setting.samples, DIM)
        points = (noise * (logvar / 2).exp()[:, None] + mean[:, None]).reshape(-1, DIM)
        variances = prompts.logvar[c].exp()
        slow = slow_em(points, prompts.mean[c], variances, 1 / variances.mean(dim=1), setting.alpha, 1000)
        assert (got[c] - slow).abs().max() < 4e-4
    assert torch.allclose(got.sum(dim=1), torch.ones(CLASSES))


def test_bprw_s_classifier_is_the_plain_sum_of_the_prompts(case):
    prompts, (images, labels), (known, known_labels) = case
    got = as_dict(zeroshot(images, labels, prompts, validation=(known, known_labels)))
    labelled = [torch.tensor([i for i, label in enumerate(known_labels) if label == c]) for c in range(CLASSES)]
    centre = F.normalize(prompts.mean.mean(dim=1), dim=-1)
    nearest = [(centre[c] @ images.mean.T).argsort(descending=True)[:10] for c in range(CLASSES)]
    for name, by, chosen, setting in (
        ("bprw", known, labelled, bprw.FEW_SHOT),
        ("bprw_unlabelled", images, nearest, bprw.NEIGHBOURS),
    ):
        weights = bprw.prompt_weights(prompts, by, chosen, setting)
        classifier = [sum(weights[c, t] * prompts.mean[c, t] for t in range(PROMPTS)) for c in range(CLASSES)]
        right = [int(max(range(CLASSES), key=lambda c: image @ classifier[c])) for image in images.mean]
        assert got[name] == pytest.approx(sum(a == b for a, b in zip(right, labels, strict=True)) / len(labels))


def test_em_against_the_update_by_hand():
    likelihood = torch.tensor([[0.2, 0.5, 0.1], [0.3, 0.3, 0.3]], dtype=torch.double)
    start = torch.tensor([1.0, 2.0, 1.0], dtype=torch.double)
    pi = [0.25, 0.5, 0.25]
    for _ in range(2000):
        r = [[p * x for p, x in zip(pi, row, strict=True)] for row in likelihood.tolist()]
        r = [[x / sum(row) for x in row] for row in r]
        pi = [(r[0][t] + r[1][t] + 2 - 1) / (2 + 3 * (2 - 1)) for t in range(3)]
    assert bprw.mixing_proportions(likelihood.log(), start, 2.0).tolist() == pytest.approx(pi, abs=1e-6)
    assert bprw.mixing_proportions(torch.zeros(0, 3), start, 2.0).tolist() == [0.25, 0.5, 0.25]


def test_bprw_finds_the_prompts_that_the_images_are_near():
    g = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(1, 4, 16, generator=g), dim=-1)
    prompts = Gaussian(mean, torch.full((1, 4, 16), -5.0))
    images = Gaussian(
        F.normalize(mean[0, [1] * 30] + 0.1 * torch.randn(30, 16, generator=g), dim=-1), torch.full((30, 16), -6.0)
    )
    (weights,) = bprw.prompt_weights(prompts, images, [torch.arange(30)], bprw.FEW_SHOT)
    assert weights.argmax() == 1 and weights[1] > 0.85 and weights.sum() == pytest.approx(1)
    assert weights.min() > 0  # the prior keeps the others alive
