"""S, R^2 and -S R^2 over levels of uncertainty, against scipy and plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pcmepp_openclip.evaluation import uncertainty
from pcmepp_openclip.evaluation.levels import interval, level_hits, level_statistics, levels, ordered_hits
from pcmepp_openclip.evaluation.metric import as_dict


def samples(n, steps=None, seed=0):
    """Uncertain samples fail more often; with `steps`, many are equally uncertain."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=g)
    hit = (torch.rand(n, generator=g) > u).float()
    return u if steps is None else (u * steps).round() / steps, hit


def ordered(u, hit):
    return ordered_hits(u.unique(return_inverse=True)[1][None], hit[None])


def slow_level_hits(u, hit, count):
    """The mean hit of equally uncertain samples in place of each; the first n % L levels have one sample more."""
    n = len(u)
    order = sorted(range(n), key=lambda i: u[i])
    shared = []
    for i in order:
        equal = [hit[j] for j in range(n) if u[j] == u[i]]
        shared.append(sum(equal) / len(equal))
    sizes = [n // count + (k < n % count) for k in range(count)]
    return [sum(shared[sum(sizes[:k]) : sum(sizes[: k + 1])]) / sizes[k] for k in range(count)]


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("n, count", [(203, 10), (100, 5), (10, 10)])
def test_levels_against_scipy(n, count, steps):
    u, hit = samples(n, steps)
    expected = slow_level_hits(u.tolist(), hit.tolist(), count)
    got = level_hits(ordered(u, hit), count)
    assert got[0].tolist() == pytest.approx(expected)
    s, r2, composite = level_statistics(got)[0].tolist()
    assert s == pytest.approx(stats.spearmanr(range(count), got[0].tolist()).statistic)
    assert r2 == pytest.approx(stats.linregress(range(count), expected).rvalue ** 2)
    assert composite == pytest.approx(-s * r2)


def test_the_best_and_the_worst_case():
    falling = torch.stack([torch.linspace(1, 0, 5), torch.linspace(0, 1, 5), torch.tensor([1, 0.5, 0.2, 0.1, 0.05])])
    best, worst, uneven = level_statistics(falling).tolist()
    assert best == pytest.approx([-1, 1, 1]) and worst == pytest.approx([1, 1, -1])
    assert uneven[0] == pytest.approx(-1) and uneven[1] < 0.9 and uneven[2] == pytest.approx(uneven[1])


@pytest.mark.parametrize("hit", [torch.ones(50), torch.zeros(50)])
def test_without_hits_or_misses_there_is_no_number(hit):
    got = as_dict(levels(torch.rand(50), hit, "images", "R@1", resamples=20))
    assert len(got) == 18 and all(math.isnan(value) for value in got.values())


def test_equal_uncertainties_give_no_number():
    got = as_dict(levels(torch.ones(50), samples(50)[1], "images", "R@1", resamples=20))
    assert math.isnan(got["images/R@1/S_10_levels"]) and math.isnan(got["images/R@1/-SR2_5_levels"])


def test_fewer_samples_than_levels():
    u, hit = samples(7, seed=3)
    got = as_dict(levels(u, hit, "images", "R@1", resamples=20))
    assert math.isnan(got["images/R@1/S_10_levels"]) and "images/R@1/S_5_levels_low" in got
    assert all(math.isnan(value) for value in as_dict(levels(u[:0], hit[:0], "images", "R@1")).values())


def test_metrics_and_their_interval():
    u, hit = samples(2000)
    got = as_dict(levels(u, hit, "captions", "csd_R@1", resamples=300))
    assert got == as_dict(levels(u, hit, "captions", "csd_R@1", resamples=300))  # the seed is fixed
    r = uncertainty.bin_correlation(u, hit)
    assert got["captions/csd_R@1/R2_10_levels"] == pytest.approx(r**2)
    for count in (10, 5):
        for name in ("S", "R2", "-SR2"):
            key = f"captions/csd_R@1/{name}_{count}_levels"
            assert got[f"{key}_low"] <= got[key] + 1e-9 and got[f"{key}_low"] <= got[f"{key}_high"]
    assert got["captions/csd_R@1/-SR2_10_levels_low"] > 0.9


def test_no_resamples_give_the_same_numbers_without_an_interval():
    u, hit = samples(200)
    whole, plain = (as_dict(levels(u, hit, "images", "R@1", resamples=number)) for number in (5, 0))
    assert len(plain) == 6 and all(whole[name] == value for name, value in plain.items())
    assert len(as_dict(levels(u[:7], hit[:7], "images", "R@1", resamples=0))) == 6


def test_another_score_has_the_same_numbers_under_its_own_key():
    u, hit = samples(100)
    own, other = (as_dict(levels(u, hit, "images", "R@1", score, resamples=20)) for score in ("", "bank"))
    assert {key.replace("/bank/", "/"): value for key, value in other.items()} == own
    assert all(key.startswith("images/R@1/bank/") for key in other)


def test_the_interval_against_a_slow_bootstrap(monkeypatch):
    """The same draws, one set at a time."""
    u, hit = samples(40, steps=15)
    g, drawn = torch.Generator().manual_seed(0), []
    for _ in range(30):
        chosen = torch.randint(40, (1, 40), generator=g)[0]
        shares = slow_level_hits(u[chosen].tolist(), hit[chosen].tolist(), 5)
        drawn.append(stats.linregress(range(5), shares).rvalue ** 2)
    monkeypatch.setattr("pcmepp_openclip.evaluation.levels.CHUNK", 40)  # one set at a time here too
    got = as_dict(levels(u, hit, "images", "R@1", resamples=30))
    ends = [got[f"images/R@1/R2_5_levels_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx(np.percentile(drawn, [2.5, 97.5]).tolist())


def test_interval_leaves_out_nan():
    values = torch.cat([torch.arange(101.0), torch.tensor([math.nan])])
    assert interval(values) == pytest.approx((2.5, 97.5))
    assert all(math.isnan(end) for end in interval(torch.tensor([math.nan])))


def test_the_order_of_equal_samples_does_not_matter():
    u, hit = samples(300, steps=9)
    other = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    first, second = (level_hits(ordered(u[o], hit[o]), 10) for o in (slice(None), other))
    assert torch.allclose(first, second)
    first, second = uncertainty.bins(u, hit), uncertainty.bins(u[other], hit[other])
    assert all(a == pytest.approx(b) for a, b in zip(first, second, strict=True))
