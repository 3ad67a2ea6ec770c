"""Every registered distance against loops over pairs: matrix, pairs, factors, dtypes, gradients, bad input."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from helpers import REPO
from largest import LargestTensor, kept_for_backward
from slow import SLOW

from pcmepp_openclip import DISTANCES, Distance, Gaussian
from pcmepp_openclip.distances import Entailment, MatchProbability, by_name, get_distance, tiles

NAMES = (*DISTANCES, "manhattan")
TILED = {"elk", "bhattacharyya", "match_probability"}  # those that are no matrix product
SIDED = {"entailment", "kl", "match_probability"}  # those that differ if images and texts are exchanged


@pytest.fixture(scope="module", autouse=True)
def _manhattan(registries):
    """A distance without factors, registered for these tests alone."""
    runpy.run_path(str(REPO / "tests/support/own_terms.py"))


def gaussians(samples, dims=6, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(samples, dims, generator=g), dim=-1)
    return Gaussian(mean.to(dtype), torch.randn(samples, dims, generator=g) - 2)


def slow(a, b, name):
    return SLOW[name](a.mean.double(), b.mean.double(), a.logvar.double(), b.logvar.double())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_matrix_and_pairs_against_loops(name, dtype, autocast):
    a, b = gaussians(7, dtype=dtype), gaussians(9, seed=1, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        matrix = DISTANCES[name].matrix(a, b)
        paired = DISTANCES[name].paired(a, Gaussian(b.mean[:7], b.logvar[:7]))
    expected = slow(a, b, name).float()
    assert matrix.dtype == paired.dtype == torch.float32 and matrix.shape == (7, 9)
    torch.testing.assert_close(matrix, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(paired, expected.diagonal(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_factors_rank_as_the_distance_does(name):
    a, b = gaussians(7), gaussians(40, seed=1)
    factors = DISTANCES[name].factors(a, b)
    if name in TILED | {"manhattan"}:
        assert factors is None
        return
    offset_M = 0 if factors.offset_M is None else factors.offset_M
    score_NM = factors.query_NE @ factors.gallery_ME.T - offset_M
    assert torch.equal(score_NM.argsort(dim=1, descending=True), slow(a, b, name).argsort(dim=1))
    torch.testing.assert_close(
        (factors.row_N[:, None] - factors.scale * score_NM).float(), slow(a, b, name).float(), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_against_loops(name):
    gradients = []
    for exact in (False, True):
        leaves = [t.clone().requires_grad_() for g in (gaussians(3), gaussians(4, seed=1)) for t in g]
        a, b = Gaussian(*leaves[:2]), Gaussian(*leaves[2:])
        matrix = slow(a, b, name) if exact else DISTANCES[name].matrix(a, b).double()
        total = (matrix * torch.arange(12).reshape(3, 4)).sum()
        gradients.append(torch.autograd.grad(total, leaves, materialize_grads=True))
    for fast, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5 * max(1, exact.abs().max().item()))


def test_bad_input():
    with pytest.raises(ValueError, match=r"of the same D; got \[3, 6\] and \[3, 5\]"):
        DISTANCES["wasserstein"].matrix(gaussians(3), gaussians(3, dims=5))
    with pytest.raises(ValueError, match="Unknown distance 'l1'; known distances: cosine, csd, entailment, wass"):
        get_distance("l1")
    with pytest.raises(NotImplementedError, match="Distance must define `factors`, or both"):
        Distance().paired(gaussians(3), gaussians(3))


@pytest.mark.parametrize("name", NAMES)
def test_the_transposed_distance_takes_its_arguments_in_the_other_order(name):
    a, b = gaussians(7), gaussians(7, seed=1)
    distance = DISTANCES[name]
    torch.testing.assert_close(distance.transposed.matrix(b, a), distance.matrix(a, b).T)
    torch.testing.assert_close(distance.transposed.paired(b, a), distance.paired(a, b))
    assert distance.transposed.transposed is distance
    assert (distance.transposed is distance) == (name not in SIDED)
    assert distance.transposed.trainable == distance.trainable


def test_the_weight_of_the_entailment_score_follows_from_the_scales():
    assert Entailment.of_scales(match_scale=5.0, clip_scale=20.0).weight == Entailment().weight == 0.5
    assert Entailment.of_scales(1.0, 20.0).weight == pytest.approx(0.1 / 1.8)
    assert Entailment.of_scales(10.0, 20.0).weight == Entailment.of_scales(30.0, 20.0).weight == pytest.approx(4.5)


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("lowest, highest", [(-20, -20), (-20, -12), (-12, 0), (0, 10), (10, 10), (-20, 10)])
def test_values_and_gradients_in_fp32_for_any_variance(name, lowest, highest):
    """Log-variances from -20 to 10, with pairs that are equal, nearly equal and far apart."""
    g = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(6, 32, generator=g), dim=-1)
    near = F.normalize(mean + 1e-4 * torch.randn(6, 32, generator=g), dim=-1)
    logvar = lowest + (highest - lowest) * torch.rand(6, 32, generator=g)
    gallery = torch.cat([mean[:2], near]), torch.cat([logvar[:2], logvar])
    leaves = [x.clone().requires_grad_() for x in (mean, logvar, *gallery)]
    fast = DISTANCES[name].matrix(Gaussian(*leaves[:2]), Gaussian(*leaves[2:]))
    exact = SLOW[name](*(leaves[i].double() for i in (0, 2, 1, 3)))
    torch.testing.assert_close(fast.double(), exact, rtol=1e-5, atol=1e-5)
    weight = torch.arange(48).reshape(6, 8)
    ours, wanted = (torch.autograd.grad((d * weight).sum(), leaves, materialize_grads=True) for d in (fast, exact))
    for grad, expected in zip(ours, wanted, strict=True):
        assert grad.isfinite().all()
        error = (grad - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < (1e-2 if name == "match_probability" else 1e-4), error  # its samples are fp32


@pytest.mark.parametrize("name", sorted(TILED))
def test_tiles_bound_the_memory_of_both_passes(name, monkeypatch):
    """Nothing that a pass holds has N x M x D elements, or N x M x J^2; and tiles change nothing."""
    a, b = (Gaussian(*(x.requires_grad_() for x in gaussians(count, dims=16, seed=count))) for count in (40, 50))
    whole = DISTANCES[name].matrix(a, b)
    whole_grad = torch.autograd.grad(whole.square().sum(), [*a, *b])
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**12)
    with kept_for_backward() as kept, LargestTensor() as largest:
        tiled = DISTANCES[name].matrix(a, b)
        grad = torch.autograd.grad(tiled.square().sum(), [*a, *b])
    assert largest.elements <= 2**12 < 40 * 50 * 16
    assert sum(kept.values()) < 40 * 50 * 4
    torch.testing.assert_close(tiled, whole)
    for x, y in zip(grad, whole_grad, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


def test_the_match_probability_is_that_of_many_samples():
    """More samples come closer to PCME's definition, and the noise is the same in every call."""
    a, b = gaussians(4), gaussians(4, seed=1)
    torch.manual_seed(0)
    z_a, z_b = (x.mean[:, None] + (x.logvar / 2).exp()[:, None] * torch.randn(4, 20000, 6) for x in (a, b))
    p = (5 - 5 * (z_a - z_b).norm(dim=-1)).sigmoid().mean(dim=1)
    expected = ((1 - p) / p).log()
    many = MatchProbability(samples=600)
    torch.testing.assert_close(many.paired(a, b), expected, rtol=0, atol=0.15)
    assert torch.equal(many.matrix(a, b), MatchProbability(samples=600).matrix(a, b))
    first, second = many.noise(6)
    assert torch.equal(first[300:], -first[:300]) and not torch.equal(first, second)
    assert [len(noise) for noise in MatchProbability(samples=3).noise(6)] == [3, 3]


def test_what_is_ranked_by_default(registries):
    assert {"cosine", "csd", "entailment", "wasserstein", "manhattan"} == set(by_name())
    assert set(by_name(["kl"])) == {"kl"}
