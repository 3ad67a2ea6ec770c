"""What the log says of a batch: against slow forms in double precision, and without any effect on the loss."""

import math

import pytest
import torch
from largest import LargestTensor
from slow import slow_calibration
from test_loss import WEIGHTS, batch, call, grads

import pcmepp_openclip as pp
from pcmepp_openclip.distances import tiles
from pcmepp_openclip.losses import diagnostics


def diagnosed(leaves, **options):
    loss = pp.PCMEppLoss(**options)
    loss.diagnose = True
    call(loss, leaves)
    return loss.read_diagnostics()


@pytest.mark.parametrize("chunk", [13, 60, 10**6])
@pytest.mark.parametrize("distance", ["csd", "wasserstein"])
@pytest.mark.parametrize("means_by", ["all", "contrastive"])
def test_the_numbers_equal_the_slow_form(monkeypatch, chunk, distance, means_by):
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)  # one row, some rows that do not divide the batch, all
    found = diagnosed(batch(dtype=torch.float32), distance=distance, train_means_by=means_by)
    expected = slow_calibration(*batch(), distance=distance)
    assert set(expected) < set(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    assert abs(expected["image_agreement"]) < 0.99 and expected["image_slope"] != expected["text_slope"]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_entropies_of_columns_survive_extreme_logits(scale):
    x_NM = scale * 30 * torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_NM[0] = -torch.inf
    x_NM[1, 3] = -torch.inf
    columns = diagnostics.ColumnEntropy(torch.zeros(7, 2))
    for part in x_NM.float().split(3):
        columns.add(part)
    p_NM = x_NM.softmax(dim=0)
    torch.testing.assert_close(columns.entropy().double(), torch.special.entr(p_NM).sum(dim=0), rtol=1e-3, atol=1e-3)


def test_variances_of_the_theory_have_its_slope():
    """Images and captions of groups, each true of all of its group and of nothing else, with a u = (1 - k) log p."""
    sizes, s, a = (8, 16, 32, 64), 100.0, 20.0
    group_N = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    mean_ND = torch.eye(len(sizes))[group_N]
    k = 2 * a / s
    uncertainty_N = 1 + (1 - k) / a * (torch.tensor(sizes)[group_N] / sum(sizes)).log()
    logvar_ND = (uncertainty_N / len(sizes)).log()[:, None].expand_as(mean_ND)
    found = diagnosed([mean_ND, mean_ND, logvar_ND, logvar_ND, *(torch.tensor(x) for x in (s, a, 5.0))])
    assert found["match_ratio"] == pytest.approx(k)
    for side in ("image", "text"):
        assert found[f"{side}_agreement"] > 0.99 and found[f"{side}_slope"] == pytest.approx(1 - k, rel=0.05)


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_batch_too_small_to_tell_is_nan_and_no_error(pairs):
    found = diagnosed(batch(n=pairs, dtype=torch.float32))
    assert math.isnan(found["image_slope"]) and math.isnan(found["text_agreement"])
    assert found["match_ratio"] == pytest.approx(6 / 14) and found["expected_matches"] > 0


@pytest.mark.parametrize("distance", ["csd", "wasserstein"])
@pytest.mark.parametrize("means_by", ["all", "contrastive"])
def test_a_logged_step_has_the_values_and_gradients_of_any_other(distance, means_by):
    found = []
    for diagnose in (False, True):
        loss = pp.PCMEppLoss(**WEIGHTS, distance=distance, train_means_by=means_by)
        loss.diagnose = diagnose
        leaves = batch(dtype=torch.float32)
        terms = call(loss, leaves)
        assert bool(loss.diagnostics) == diagnose
        found.append([*terms.values(), *grads(sum(terms.values()), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_diagnostics_hold_no_matrix_of_all_pairs(monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**14)
    leaves = batch(n=1024, dim=16, dtype=torch.float32)
    loss = pp.PCMEppLoss()
    loss.diagnose = True
    with LargestTensor(torch.ops.aten._local_scalar_dense.default) as largest:  # which waits for the device
        call(loss, leaves)
    assert 2**14 <= largest.elements < 1024 * 1024 / 16
