"""Soft labels on one rank: the loss against the slow form, and a model that passes them on. Ranks: test_ranks.py."""

import open_clip
import pytest
import torch
from helpers import make_batch, make_model, objective
from largest import LargestTensor
from slow import slow_labels, slow_soft_terms
from test_loss import batch, grads, relative

import pcmepp_openclip as pp
from pcmepp_openclip.distances import tiles
from pcmepp_openclip.losses import TermSettings
from pcmepp_openclip.models.batches import LabelledImages

WEIGHTS = {"contrastive_weight": 0.0, "match_weight": 2.0, "pp_weight": 0.1, "vib_weight": 0.0}


def labels(kind, n=13):
    """(own_id, partner_id, own_share): ids that say nothing but whether they are equal."""
    g = torch.Generator().manual_seed(3)
    own_id = torch.randperm(n, generator=g) + 10**12
    if kind == "several":
        own_id = own_id % 5
    share = torch.ones(n)
    if kind != "unmixed":
        share[2:] = torch.rand(n - 2, generator=g)
        share[2:4] = torch.tensor([0.5, 0.0])
    return own_id, own_id.roll(5), share


def call(loss, leaves, given):
    v, t, lv, lt, s, a, b = leaves
    n, names = len(v), ("own_id", "partner_id", "own_share")
    scalars = (x.repeat(n) for x in (s, a, b))
    return loss(v, t, s, lv, lt, *scalars, **dict(zip(names, given, strict=True)), output_dict=True)


@pytest.mark.parametrize("kind", ["mixed", "several"])
@pytest.mark.parametrize(
    "distance, reduction, chunk",
    [("csd", "mean", 13), ("csd", "sum", 60), ("csd", "mean", 10**6), ("cosine", "sum", 60)],
)
def test_values_and_gradients_equal_the_slow_form(monkeypatch, kind, distance, reduction, chunk):
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)  # one row, some rows that do not divide the batch, all
    leaves, exact, given = batch(dtype=torch.float32), batch(), labels(kind)
    for tensors in (leaves, exact):
        with torch.no_grad():
            for x in tensors[:4]:
                x[9:] = x[1:5]  # equal images and equal captions, which are ties
    loss = pp.PCMEppLoss(**WEIGHTS, distance=distance, reduction=reduction)
    loss.diagnose = True
    fast = call(loss, leaves, given)
    v, t, lv, lt, _, a, b = exact
    match, pseudo, raised = slow_soft_terms(v, t, lv, lt, a, b, slow_labels(*given), reduction, distance)
    assert list(fast) == ["match_loss", "pp_loss"]
    for got, want in zip(fast.values(), (2 * match, 0.1 * pseudo), strict=True):
        assert relative(got, want) < 1e-6
        for x, y in zip(grads(got, leaves), grads(want, exact), strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm().clamp(min=1e-6)
    assert loss.read_diagnostics()["pseudo_positives"] == raised > 13


@pytest.mark.parametrize(
    "kind, distance, chunk",
    [(None, "csd", 60), ("mixed", "csd", 10**6), ("several", "cosine", 60)],
)
def test_smoothed_labels_equal_the_slow_form(monkeypatch, kind, distance, chunk):
    """e + (1 - 2e) m in place of m, values and all gradients, with pseudo-positives and without."""
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)
    smoothing, leaves, exact = 0.03, batch(dtype=torch.float32), batch()
    given, m = (None,) * 3, torch.eye(13, dtype=torch.float64)
    if kind is not None:
        given = labels(kind)
        m = slow_labels(*given)
    v, t, lv, lt, _, a, b = exact
    slow = slow_soft_terms(v, t, lv, lt, a, b, smoothing + (1 - 2 * smoothing) * m, distance=distance)
    loss = pp.PCMEppLoss(**WEIGHTS, distance=distance, settings=TermSettings(label_smoothing=smoothing))
    fast = call(loss, leaves, given)
    pairs = list(zip(fast.values(), (2 * slow[0], 0.1 * slow[1]), strict=True))
    for got, want in [*pairs, (sum(x for x, _ in pairs), sum(x for _, x in pairs))]:
        assert relative(got, want) < 1e-6
        for x, y in zip(grads(got, leaves), grads(want, exact), strict=True):
            assert (x - y).norm() <= 1e-5 * y.norm().clamp(min=1e-6)


def test_labels_that_say_nothing_new_change_nothing():
    leaves, given = batch(dtype=torch.float32), labels("unmixed")
    got, want = (call(pp.PCMEppLoss(**WEIGHTS), leaves, x) for x in (given, (None, None, None)))
    for name in want:
        assert relative(got[name], want[name]) < 1e-6
        for x, y in zip(grads(got[name], leaves), grads(want[name], leaves), strict=True):
            assert relative(x, y) < 1e-5 or y.norm() < 1e-9


def test_several_captions_of_an_image_share_its_pseudo_positives():
    """A caption that lies between two true ones is a pseudo-positive: it is as close as one of them."""
    y = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    rows, _ = pp.pseudo_positive_targets(y, torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
    assert torch.equal(rows, torch.tensor([[1.0, 1.0, 1.0, 0.0]]))


def test_memory_does_not_grow_with_the_square(monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**14)
    leaves = batch(n=1024, dim=16, dtype=torch.float32)
    with LargestTensor() as largest:
        sum(call(pp.PCMEppLoss(**WEIGHTS), leaves, labels("mixed", 1024)).values()).backward()
    assert 2**14 <= largest.elements < 1024 * 1024 / 16


def test_terms_that_take_no_labels_are_refused():
    with pytest.raises(ValueError, match=r"'contrastive' takes no soft labels.* set contrastive_weight to 0"):
        call(pp.PCMEppLoss(), batch(dtype=torch.float32), labels("mixed"))
    with pytest.raises(ValueError, match="set difficulty_weight to 0"):
        call(pp.PCMEppLoss(**WEIGHTS, difficulty_weight=1.0), batch(dtype=torch.float32), labels("mixed"))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_passes_labels_on_and_sees_the_pixels(compiled):
    model = make_model("PCMEpp-tiny")
    image, text = make_batch(model)
    given = labels("mixed", len(image))
    run = torch.compile(model, backend="eager") if compiled else model
    out, plain = run(LabelledImages(image, *given), text), model(image, text)
    for name, x in zip(("own_id", "partner_id", "own_share"), given, strict=True):
        assert torch.equal(out.pop(name), x)
    assert out.keys() == plain.keys() and objective(out).item() == pytest.approx(objective(plain).item(), rel=1e-5)
    only_seeds = LabelledImages(image, token_seed_N=torch.arange(len(image)))
    assert run(only_seeds, text).keys() == plain.keys()  # no labels: InfoNCE is not refused
    assert torch.equal(model.encode_image_gaussian(LabelledImages(image)).mean, plain["image_features"])


def test_a_batch_moves_as_the_loop_asks():
    moved = LabelledImages(torch.ones(4, 3, 4, 4), *labels("mixed", 4)).to(device="cpu", dtype=torch.bfloat16)
    assert len(moved) == 4 and moved.image_NCHW.dtype == torch.bfloat16
    assert (moved.own_id_N.dtype, moved.own_share_N.dtype, moved.token_seed_N) == (torch.int64, torch.float32, None)
    kept = moved.to(device="cpu", dtype=open_clip.get_input_dtype("fp32"))  # which is None
    assert kept.image_NCHW.dtype == torch.bfloat16
