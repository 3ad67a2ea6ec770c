"""The loss on one rank: against the slow form, over dtypes, at extremes, in its parts and as a whole."""

import pytest
import torch
import torch.nn.functional as F
from largest import LargestTensor
from slow import slow_distances, slow_terms

import pcmepp_openclip as pp
from pcmepp_openclip.distances import tiles
from pcmepp_openclip.losses import cross_fit, pair_difficulty
from pcmepp_openclip.losses.batch import PairBatch

WEIGHTS = {"contrastive_weight": 1.5, "match_weight": 2.0, "pp_weight": 0.1, "vib_weight": 1e-2}


def batch(n=13, dim=8, seed=0, dtype=torch.float64, logvar=-1.0):
    """Leaf tensors (v, t, lv, lt, s, a, b) with captions near their images, so that some are pseudo-positives."""
    g = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, dim, generator=g, dtype=torch.float64)
    v, t = (F.normalize(shared + torch.randn(n, dim, generator=g, dtype=torch.float64), dim=-1) for _ in range(2))
    lv, lt = (logvar + torch.randn(n, dim, generator=g, dtype=torch.float64) for _ in range(2))
    scalars = [torch.tensor(x, dtype=torch.float64) for x in (14.0, 3.0, 2.0)]
    return [x.to(dtype).requires_grad_() for x in (v, t, lv, lt, *scalars)]


def call(loss, leaves, dtype=None):
    v, t, lv, lt, s, a, b = (x if dtype is None else x.to(dtype) for x in leaves)
    n = len(v)
    return loss(v, t, s, lv, lt, s.repeat(n), a.repeat(n), b.repeat(n), output_dict=True)


def grads(total, leaves):
    return torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [13, 60, 10**6])
def test_values_and_gradients_equal_the_slow_form(monkeypatch, chunk, reduction):
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)  # one row, some rows that do not divide the batch, all
    leaves = batch(dtype=torch.float32)
    fast = call(pp.PCMEppLoss(**WEIGHTS, reduction=reduction), leaves)
    exact = batch()
    slow = slow_terms(*exact, reduction=reduction)
    weighted = [w * term for w, term in zip(WEIGHTS.values(), slow, strict=True)]
    assert list(fast) == ["contrastive_loss", "match_loss", "pp_loss", "vib_loss"]
    for name, value in zip(fast, weighted, strict=True):
        assert relative(fast[name], value) < 1e-6, name
    for x, y in zip(grads(sum(fast.values()), leaves), grads(sum(weighted), exact), strict=True):
        assert relative(x, y) < 1e-5
    # each term alone, weighed by the caller: the gradients are not bound to the sum
    for name, value in zip(fast, weighted, strict=True):
        for x, y in zip(grads(3 * fast[name], leaves), grads(3 * value, exact), strict=True):
            assert relative(x, y) < 1e-5, name


@pytest.mark.parametrize("dim", [8, 512])
def test_equal_captions_and_equal_images_are_pseudo_positives_of_each_other(dim):
    """The rule is "at least as close": ties count, however the matrix product is rounded."""
    n = 101
    exact = [x.detach().float() for x in batch(n, dim, logvar=-5.0)]
    for means, logvars in (exact[0::2][:2], exact[1::2][:2]):
        originals = torch.randint(n, (40,), generator=torch.Generator().manual_seed(1))
        means[-40:], logvars[-40:] = means[originals], logvars[originals]
    leaves = [x.clone().requires_grad_() for x in exact]
    exact = [x.double().requires_grad_() for x in exact]
    loss = pp.PCMEppLoss(contrastive_weight=0.0, match_weight=0.0, pp_weight=1.0, vib_weight=0.0)
    loss.diagnose = True
    (value,) = call(loss, leaves).values()
    slow = slow_terms(*exact)[2]
    assert relative(value, slow) < 1e-5
    for x, y in zip(grads(value, leaves), grads(slow, exact), strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()
    y_NN = (-exact[5] * slow_distances(*exact[:4]) + exact[6]).detach()
    own_N = y_NN.diagonal()
    number = (y_NN >= own_N[:, None]).sum() + (y_NN >= own_N).sum() - 2 * n
    assert loss.read_diagnostics()["pseudo_positives"] == number > 40


def test_the_parts_add_up_to_the_loss():
    v, t, lv, lt, s, a, b = leaves = batch(dtype=torch.float32)
    images, texts = pp.Gaussian(v, lv), pp.Gaussian(t, lt)
    y, m = pp.matching_logits(pp.csd(images, texts), a, b), torch.eye(len(v))
    terms = call(pp.PCMEppLoss(**WEIGHTS), leaves)
    assert relative(terms["match_loss"], 2 * pp.matching_loss(y, m)) < 1e-6
    both = sum(pp.matching_loss(y, targets) for targets in pp.pseudo_positive_targets(y, m))
    assert relative(terms["pp_loss"], 0.1 * both) < 1e-6
    assert relative(terms["vib_loss"], 1e-2 * (pp.vib(images) + pp.vib(texts))) < 1e-6
    assert call(pp.PCMEppLoss(**WEIGHTS), leaves).keys() == terms.keys()
    total = pp.PCMEppLoss(**WEIGHTS)(v, t, s, lv, lt, s.repeat(13), a.repeat(13), b.repeat(13))
    assert relative(total, sum(terms.values())) < 1e-6


def test_soft_targets_and_pseudo_positives_by_hand():
    y = torch.tensor([[2.0, 3.0], [-1.0, 0.0]])
    m = torch.tensor([[0.7, 0.0], [0.3, 1.0]])
    expected = F.binary_cross_entropy_with_logits(y, m)
    assert torch.isclose(pp.matching_loss(y, m), expected)
    assert torch.isclose(pp.matching_loss(y, m, "sum"), expected * 2)
    rows, columns = pp.pseudo_positive_targets(y, m)
    assert torch.equal(rows, torch.tensor([[0.7, 0.7], [0.3, 1.0]]))  # caption 1 is closer to image 0 than its own
    assert torch.equal(columns, torch.tensor([[0.7, 1.0], [0.3, 1.0]]))  # and image 0 closer to it than its own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_input_is_computed_in_fp32(dtype, autocast):
    low = [x.detach().to(dtype) for x in batch()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = call(pp.PCMEppLoss(**WEIGHTS), [x.requires_grad_() for x in low])
    want = call(pp.PCMEppLoss(**WEIGHTS), [x.detach().float() for x in low])
    for name in got:
        assert got[name].dtype == torch.float32
        assert relative(got[name], want[name]) < 1e-6
    assert all(torch.isfinite(g).all() for g in grads(sum(got.values()), low))


@pytest.mark.parametrize("logvar", [-20.0, 0.0, 10.0])
@pytest.mark.parametrize("scale", [1.0, 5e3])
def test_extreme_logits_and_variances_stay_finite_and_right(logvar, scale):
    def extreme(dtype):
        leaves = [x.detach().to(dtype) for x in batch(logvar=logvar)]
        leaves[4] = leaves[4] * scale  # InfoNCE's logits up to 7e4
        leaves[5] = leaves[5] * scale  # matching logits of 1e4 and far beyond
        return [x.requires_grad_() for x in leaves]

    low, exact = extreme(torch.float32), extreme(torch.float64)
    fast = call(pp.PCMEppLoss(**WEIGHTS), low)
    slow = slow_terms(*exact)
    for name, value, weight in zip(fast, slow, WEIGHTS.values(), strict=True):
        assert torch.isfinite(fast[name]) and relative(fast[name], weight * value) < 1e-4, name
    for x in grads(sum(fast.values()), low):
        assert torch.isfinite(x).all()


def test_a_weight_of_zero_drops_the_term_but_not_the_gradient():
    for off in WEIGHTS:
        name = off.replace("_weight", "_loss")
        leaves = batch(dtype=torch.float32)
        terms = call(pp.PCMEppLoss(**{**WEIGHTS, off: 0.0}), leaves)
        assert name not in terms and len(terms) == 3
        assert all(g is not None for g in grads(sum(terms.values()), leaves))


def test_infonce_is_open_clips():
    import open_clip

    leaves = batch(dtype=torch.float32)
    v, t, s = *leaves[:2], leaves[4]
    ours = call(pp.PCMEppLoss(), leaves)["contrastive_loss"]
    theirs = open_clip.ClipLoss()(v, t, s)
    assert relative(ours, theirs) < 1e-6
    for x, y in zip(grads(ours, leaves[:2]), grads(theirs, leaves[:2]), strict=True):
        assert relative(x, y) < 1e-5


def test_diagnostics_are_what_they_say():
    leaves = batch(dtype=torch.float32)
    v, t, lv, lt = leaves[:4]
    loss = pp.PCMEppLoss()
    loss.diagnose = True
    call(loss, leaves)
    seen = loss.read_diagnostics()
    d = pp.csd(pp.Gaussian(v, lv), pp.Gaussian(t, lt))
    rows, columns = pp.pseudo_positive_targets(-d, torch.eye(len(v)))
    u = lv.exp().sum(1).mean() + lt.exp().sum(1).mean()
    assert seen["image_uncertainty"] == pytest.approx(lv.exp().sum(1).mean().item(), rel=1e-5)
    assert seen["variance_share"] == pytest.approx((u / d.mean()).item(), rel=1e-5)
    assert seen["pseudo_positives"] == (rows.sum() + columns.sum() - 2 * len(v)).item() > 0
    assert (seen["match_scale"], seen["match_shift"]) == (3.0, 2.0)


def test_memory_does_not_grow_with_the_square(monkeypatch):
    """The largest tensor that a step makes is a chunk or an [N, D], never an [N, N]."""
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**14)
    leaves = batch(n=1024, dim=16, dtype=torch.float32)
    with LargestTensor() as largest:
        sum(call(pp.PCMEppLoss(), leaves).values()).backward()
    assert 2**14 <= largest.elements < 1024 * 1024 / 16


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"no loss term with the weight 'matching_weight'; known .* match_weight"):
        pp.PCMEppLoss(matching_weight=1.0)
    with pytest.raises(ValueError, match="Unknown distance 'l2'; known distances: cosine, csd"):
        pp.PCMEppLoss(distance="l2")
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        pp.PCMEppLoss(reduction="none")


def test_the_infonce_of_each_pair_is_a_constant():
    """The regression on it must not train what it is computed from."""
    v, t, scale = torch.randn(4, 8).requires_grad_(), torch.randn(4, 8), torch.tensor(2.0, requires_grad=True)
    images, texts = pp.Gaussian(v, torch.zeros(4, 8)), pp.Gaussian(t, torch.zeros(4, 8))
    pairs = PairBatch(images, texts, scale, scale, scale).pairs
    assert pairs.contrastive.requires_grad
    assert not pairs.image_difficulty.requires_grad and not pairs.text_difficulty.requires_grad


@pytest.mark.parametrize("folds", [2, 3, 13])
def test_each_pair_is_judged_by_a_model_that_has_not_seen_it(folds):
    v, t, *_ = batch()
    rows = torch.randperm(13, generator=torch.Generator().manual_seed(1)) + 100
    parts = cross_fit(lambda seen: set(seen.tolist()), rows, folds)
    assert len(parts) == folds and torch.equal(torch.cat([fold for _, fold in parts]).sort().values, rows.sort().values)
    for seen, fold in parts:
        assert seen == set(rows.tolist()) - set(fold.tolist())
    for difficulties, (own, others) in zip(pair_difficulty(v, t, 14.0), ((v, t), (t, v)), strict=True):
        slow = [sum((14 * own[i] @ (x - others[i])).exp() for x in others).log() for i in range(13)]
        torch.testing.assert_close(difficulties, torch.stack(slow))
    for count in (1, 14):
        with pytest.raises(ValueError, match=f"folds must be between 2 and the 13 pairs, not {count}"):
            cross_fit(len, rows, count)
