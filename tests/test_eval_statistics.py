"""What uncertainties and confidences are held against: scikit-learn, scipy and plain loops, with ties and constants."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn import metrics

from pcmepp_openclip.evaluation import uncertainty
from pcmepp_openclip.evaluation.failure import aurc, average_precision, best_aurc, confidences, failure, fpr95
from pcmepp_openclip.evaluation.levels import interval, level_hits, level_statistics, levels, ordered_hits
from pcmepp_openclip.evaluation.metric import as_dict, labelled


def samples(n=200, steps=None, seed=0, errors=0.5):
    """Uncertain samples fail more often; with `steps`, many are equally uncertain."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, generator=g)
    hit = (torch.rand(n, generator=g) > 2 * errors * u).float()
    return u if steps is None else (u * steps).round() / steps, hit


# --- Correlations, bins and rejection ---------------------------------------------------------------------


def test_spearman_against_scipy():
    u, _ = samples(steps=20)
    number = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(1))
    assert uncertainty.spearman(u, number) == pytest.approx(stats.spearmanr(u, number).statistic)
    assert uncertainty.spearman(u, u.exp()) == pytest.approx(1)
    assert uncertainty.spearman(u, -u) == pytest.approx(-1)
    assert math.isnan(uncertainty.spearman(u, torch.zeros(200)))


def test_rejection():
    u, hit = samples()
    order = u.argsort().tolist()
    expected = [sum(hit[i].item() for i in order[:k]) / k for k in range(1, 201)]
    assert uncertainty.rejection(u, hit).tolist() == pytest.approx(expected)
    hit = torch.tensor([1.0, 1, 0, 0])  # the order of equally uncertain samples does not matter
    assert uncertainty.rejection(torch.ones(4), hit).tolist() == [0.5] * 4
    assert uncertainty.rejection(torch.tensor([1.0, 1, 1, 0]), hit).tolist() == pytest.approx([0, 1 / 3, 4 / 9, 0.5])


def test_bins():
    u, hit = samples()
    order = u.argsort().tolist()
    for i, (mean, share, number) in enumerate(uncertainty.bins(u, hit)):
        inside = order[20 * i : 20 * i + 20]
        assert number == 20
        assert mean == pytest.approx(sum(u[j].item() for j in inside) / 20)
        assert share == pytest.approx(sum(hit[j].item() for j in inside) / 20)
    assert [number for *_, number in uncertainty.bins(u[:4], hit[:4])] == [1, 1, 1, 1]


def test_bin_correlation():
    u = torch.arange(100.0)
    falling = (torch.arange(100) % 10 >= torch.arange(100) // 10).float()  # 10, 9, ... 1 hits of 10 in the bins
    assert uncertainty.bin_correlation(u, falling) == pytest.approx(-1)
    assert uncertainty.bin_correlation(u.flip(0), falling) == pytest.approx(1)
    assert math.isnan(uncertainty.bin_correlation(u, torch.ones(100)))


def test_reliability():
    confidence = torch.tensor([0.0, 0.05, 0.55, 0.55, 0.59, 1.0])
    hit = torch.tensor([0.0, 1, 1, 0, 1, 1])
    curve, error = uncertainty.reliability(confidence, hit)
    assert [number for *_, number in curve] == [2, 3, 1]
    assert curve[1][:2] == pytest.approx((1.69 / 3, 2 / 3))
    assert error == pytest.approx((2 * abs(0.025 - 0.5) + 3 * abs(1.69 / 3 - 2 / 3) + 0) / 6)


def test_against_hits():
    u, hit = samples(1000)
    got = as_dict(uncertainty.against_hits(u, hit))
    assert got["bin_correlation"] < -0.9
    order = u.argsort()
    assert got["hits_at_80%_coverage"] == pytest.approx(hit[order[:800]].mean().item())
    assert got["hits_at_50%_coverage"] > got["hits_at_90%_coverage"] > got["hits_of_all"]
    assert got["hits_of_all"] == pytest.approx(hit.mean().item())


def test_against_facts():
    u = torch.tensor([1.0, 2, 3, 4])
    facts = [{"key": str(i), "kind": "b" if i == 2 else "a", "size": i, "some": "x"} for i in range(4)]
    del facts[0]["some"]  # not known of all
    got = as_dict(labelled(uncertainty.against_facts(u, facts), samples="images", score="bank"))
    assert {name.partition("=")[0] for name in got} == {"images/kind"}
    assert got["images/kind=a/bank/mean"] == pytest.approx(7 / 3) and got["images/kind=b/bank/mean"] == 3
    assert [got[f"images/kind={kind}/bank/AUROC"] for kind in "ab"] == pytest.approx([1 / 3, 2 / 3])


def test_a_caption_that_occurs_often_counts_once():
    captions = ["a b", "a b", "a b", "a", "a b c"]
    u = torch.tensor([2.0, 2, 2, 3, 1])
    got = as_dict(uncertainty.of_captions(u, captions, [5, 5, 5, 9, 2]))
    assert got == {"spearman_caption_length": pytest.approx(-1), "spearman_matches": pytest.approx(1)}
    assert list(as_dict(uncertainty.of_captions(u, captions, None))) == ["spearman_caption_length"]


# --- Levels -----------------------------------------------------------------------------------------------


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


def test_the_best_and_the_worst_case_of_levels():
    falling = torch.stack([torch.linspace(1, 0, 5), torch.linspace(0, 1, 5), torch.tensor([1, 0.5, 0.2, 0.1, 0.05])])
    best, worst, uneven = level_statistics(falling).tolist()
    assert best == pytest.approx([-1, 1, 1]) and worst == pytest.approx([1, 1, -1])
    assert uneven[0] == pytest.approx(-1) and uneven[1] < 0.9 and uneven[2] == pytest.approx(uneven[1])


def test_levels_that_are_not_defined():
    for u, hit in (
        (torch.rand(50), torch.ones(50)),
        (torch.rand(50), torch.zeros(50)),
        (torch.ones(50), samples(50)[1]),
    ):
        got = as_dict(levels(u, hit, resamples=20))
        assert len(got) == 18 and all(math.isnan(got[f"{name}_{n}_levels"]) for name in ("S", "-SR2") for n in (5, 10))
    u, hit = samples(7, seed=3)  # fewer than levels
    got = as_dict(levels(u, hit, resamples=20))
    assert math.isnan(got["S_10_levels"]) and not math.isnan(got["S_5_levels"]) and "S_5_levels_low" in got
    assert all(math.isnan(value) for value in as_dict(levels(u[:0], hit[:0])).values())


def test_levels_and_their_interval():
    u, hit = samples(2000)
    got = as_dict(levels(u, hit, resamples=300))
    assert got == as_dict(levels(u, hit, resamples=300))  # the seed is fixed
    assert got["R2_10_levels"] == pytest.approx(uncertainty.bin_correlation(u, hit) ** 2)
    for key in (f"{name}_{count}_levels" for count in (10, 5) for name in ("S", "R2", "-SR2")):
        assert got[f"{key}_low"] <= got[key] + 1e-9 and got[f"{key}_low"] <= got[f"{key}_high"]
    assert got["-SR2_10_levels_low"] > 0.9
    plain = as_dict(levels(u, hit, resamples=0))
    assert len(plain) == 6 and all(got[name] == value for name, value in plain.items())


def test_the_interval_against_a_slow_bootstrap(monkeypatch):
    """The same draws, one set at a time."""
    u, hit = samples(40, steps=15)
    g, drawn = torch.Generator().manual_seed(0), []
    for _ in range(30):
        chosen = torch.randint(40, (1, 40), generator=g)[0]
        shares = slow_level_hits(u[chosen].tolist(), hit[chosen].tolist(), 5)
        drawn.append(stats.linregress(range(5), shares).rvalue ** 2)
    monkeypatch.setattr("pcmepp_openclip.evaluation.levels.CHUNK", 40)  # one set at a time here too
    got = as_dict(levels(u, hit, resamples=30))
    ends = [got[f"R2_5_levels_{end}"] for end in ("low", "high")]
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


# --- Failure prediction -----------------------------------------------------------------------------------


def slow_aurc(confidence, hit, order):
    order = sorted(order, key=lambda i: -confidence[i])  # stable: equal ones stay as they are in `order`
    risks = [sum(1 - hit[i] for i in order[:k]) / k for k in range(1, len(order) + 1)]
    return sum(risks) / len(risks)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [None, 12, 3])
def test_failure_against_scikit_learn(steps, seed):
    u, hit = samples(150, steps, seed, errors=(0.1, 0.3, 0.5, 0.9)[seed])
    values = as_dict(failure(-u, hit))
    assert list(values) == ["miss_AUROC", "FPR95", "AUPR_error", "AURC_x1000", "E-AURC_x1000"]
    c, h = -u.numpy(), hit.numpy()
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


def test_aurc_against_a_loop_and_of_ties_against_drawn_orders():
    u, hit = samples()
    assert aurc(-u, hit) == pytest.approx(slow_aurc((-u).tolist(), hit.tolist(), range(200)))
    u, hit = samples(40, steps=3)
    rng, drawn = random.Random(0), []
    for _ in range(1000):
        drawn.append(slow_aurc((-u).tolist(), hit.tolist(), rng.sample(range(40), 40)))
    assert aurc(-u, hit) == pytest.approx(sum(drawn) / len(drawn), abs=3e-3)
    turned = torch.arange(39, -1, -1)
    assert aurc(-u, hit) == pytest.approx(aurc(-u[turned], hit[turned]))


def test_the_best_order_is_the_best_aurc():
    hit = (torch.arange(20_000) < 14_000).float()
    assert aurc(-torch.arange(20_000.0), hit) == pytest.approx(best_aurc(0.3), abs=1e-4)
    values = as_dict(failure(-torch.arange(20_000.0), hit))
    assert [values[name] for name in ("miss_AUROC", "FPR95", "AUPR_error")] == [1, 0, 1]
    assert abs(values["E-AURC_x1000"]) < 0.1


def test_fpr95_by_hand():
    """20 hits and 4 misses; the 19th hit comes after two misses."""
    order = [1] * 18 + [0, 0, 1, 0, 1, 0]
    assert fpr95(-torch.arange(24.0), torch.tensor(order).float()) == 0.5
    tied = -torch.tensor([0.0] * 10 + [1.0] * 14)  # of 10 hits, then of 10 hits and 4 misses at once
    assert fpr95(tied, torch.tensor([1.0] * 20 + [0.0] * 4)) == pytest.approx(0.9)


def test_all_hits_all_misses_and_equal_confidences():
    u, hit = samples(30)
    all_hits, all_misses, equal = (
        as_dict(failure(*case)) for case in ((u, torch.ones(30)), (u, torch.zeros(30)), (torch.ones(30), hit))
    )
    for name in ("miss_AUROC", "FPR95"):
        assert math.isnan(all_hits[name]) and math.isnan(all_misses[name])
    assert math.isnan(all_hits["AUPR_error"]) and all_misses["AUPR_error"] == 1
    assert (all_hits["AURC_x1000"], all_hits["E-AURC_x1000"]) == (0, 0)
    assert all_misses["AURC_x1000"] == pytest.approx(1000) and all_misses["E-AURC_x1000"] == pytest.approx(0)
    error = 1 - hit.mean().item()
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
