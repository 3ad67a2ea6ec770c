"""What uncertainty is held against, by hand and by scipy-free slow forms."""

import math

import pytest
import torch

from pcmepp_openclip.evaluation import uncertainty
from pcmepp_openclip.evaluation.metric import as_dict


def samples(n=200, ties=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=g)
    hit = (torch.rand(n, generator=g) > u).float()
    return (u * 20).round() / 20 if ties else u, hit


def slow_mean_ranks(x):
    return [sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def pearson(a, b):
    ma, mb = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    return covariance / math.sqrt(sum((x - ma) ** 2 for x in a) * sum((y - mb) ** 2 for y in b))


def test_spearman():
    u, _ = samples()
    number = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(1))
    expected = pearson(slow_mean_ranks(u.tolist()), slow_mean_ranks(number.tolist()))
    assert uncertainty.spearman(u, number) == pytest.approx(expected)
    assert uncertainty.spearman(u, u.exp()) == pytest.approx(1)
    assert uncertainty.spearman(u, -u) == pytest.approx(-1)
    assert math.isnan(uncertainty.spearman(u, torch.zeros(200)))


def test_auroc():
    u, hit = samples()
    wins = [(a > b) + (a == b) / 2 for a in u[hit == 1].tolist() for b in u[hit == 0].tolist()]
    assert uncertainty.auroc(u, hit) == pytest.approx(sum(wins) / len(wins))
    assert uncertainty.auroc(u, hit) < 0.4 and uncertainty.auroc(torch.ones(200), hit) == 0.5
    assert math.isnan(uncertainty.auroc(u, torch.ones(200)))


def test_rejection_without_ties():
    u, hit = samples(ties=False)
    order = u.argsort().tolist()
    expected = [sum(hit[i].item() for i in order[:k]) / k for k in range(1, 201)]
    assert uncertainty.rejection(u, hit).tolist() == pytest.approx(expected)


def test_rejection_does_not_depend_on_the_order_of_equally_uncertain_samples():
    hit = torch.tensor([1.0, 1, 0, 0])
    assert uncertainty.rejection(torch.ones(4), hit).tolist() == [0.5] * 4
    assert uncertainty.rejection(torch.tensor([1.0, 1, 1, 0]), hit).tolist() == pytest.approx([0, 1 / 3, 4 / 9, 0.5])


def test_bins():
    u, hit = samples(ties=False)
    order = u.argsort().tolist()
    for i, (mean, share, number) in enumerate(uncertainty.bins(u, hit)):
        inside = order[20 * i : 20 * i + 20]
        assert number == 20
        assert mean == pytest.approx(sum(u[j].item() for j in inside) / 20)
        assert share == pytest.approx(sum(hit[j].item() for j in inside) / 20)
    assert [number for *_, number in uncertainty.bins(u[:4], hit[:4])] == [1, 1, 1, 1]


def test_reliability():
    confidence = torch.tensor([0.0, 0.05, 0.55, 0.55, 0.59, 1.0])
    hit = torch.tensor([0.0, 1, 1, 0, 1, 1])
    found, error = uncertainty.reliability(confidence, hit)
    assert [number for *_, number in found] == [2, 3, 1]
    assert found[1][:2] == pytest.approx((1.69 / 3, 2 / 3))
    assert error == pytest.approx((2 * abs(0.025 - 0.5) + 3 * abs(1.69 / 3 - 2 / 3) + 0) / 6)


def test_against_hits():
    u, hit = samples(1000, ties=False)
    got = as_dict(uncertainty.against_hits(u, hit, "images", "R@1"))
    assert got["images/R@1/bin_correlation"] < -0.9
    got = {key.rpartition("/")[2]: value for key, value in got.items()}
    order = u.argsort()
    assert got["hits_at_80%_coverage"] == pytest.approx(hit[order[:800]].mean().item())
    assert got["hits_at_50%_coverage"] > got["hits_at_90%_coverage"] > got["hits_of_all"]
    assert got["hits_of_all"] == pytest.approx(hit.mean().item())


def test_against_facts():
    u = torch.tensor([1.0, 2, 3, 4])
    facts = [{"key": str(i), "kind": "b" if i == 2 else "a", "size": i, "some": "x"} for i in range(4)]
    del facts[0]["some"]  # not known of all
    got = as_dict(uncertainty.against_facts(u, facts, "images"))
    assert {name.partition("=")[0] for name in got} == {"images/kind"}
    assert got["images/kind=a/mean"] == pytest.approx(7 / 3) and got["images/kind=b/mean"] == 3
    assert got["images/kind=b/AUROC"] == pytest.approx(2 / 3) and got["images/kind=a/AUROC"] == pytest.approx(1 / 3)


def test_a_caption_that_occurs_often_counts_once():
    captions = ["a b", "a b", "a b", "a", "a b c"]
    u = torch.tensor([2.0, 2, 2, 3, 1])
    got = as_dict(uncertainty.of_captions(u, captions, [5, 5, 5, 9, 2]))
    assert got == {"captions/spearman_caption_length": pytest.approx(-1), "captions/spearman_matches": pytest.approx(1)}
    assert "captions/spearman_matches" not in as_dict(uncertainty.of_captions(u, captions, None))


def test_another_score_has_the_same_numbers_under_its_own_key():
    u, hit = samples(100)
    facts, texts = [{"kind": "ab"[i % 2]} for i in range(100)], [f"a {'b ' * (i % 7)}{i}" for i in range(100)]
    for function, given in (
        (uncertainty.against_hits, (u, hit, "images", "R@1")),
        (uncertainty.against_facts, (u, facts, "images")),
        (uncertainty.of_captions, (u, texts, list(range(100)))),
    ):
        own, other = (as_dict(function(*given, **score)) for score in ({}, {"score": "bank"}))
        assert {key.replace("bank/", ""): value for key, value in other.items()} == own and len(own) > 1
        assert all("/bank/" in key for key in other)


def test_bin_correlation():
    u = torch.arange(100.0)
    falling = (torch.arange(100) % 10 >= torch.arange(100) // 10).float()  # 10, 9, ... 1 hits of 10 in the bins
    assert uncertainty.bin_correlation(u, falling) == pytest.approx(-1)
    assert uncertainty.bin_correlation(u.flip(0), falling) == pytest.approx(1)
    assert math.isnan(uncertainty.bin_correlation(u, torch.ones(100)))
