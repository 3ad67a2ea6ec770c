"""Every registered distance against loops over pairs: matrix, pairs, factors, dtypes, gradients, bad input."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from helpers import REPO
from slow import SLOW

from pcmepp_openclip import DISTANCES, Distance, Gaussian
from pcmepp_openclip.distances import Entailment, get_distance

NAMES = (*DISTANCES, "manhattan")


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
    if name == "manhattan":
        assert factors is None
        return
    offset_M = 0 if factors.offset_M is None else factors.offset_M
    score_NM = factors.query_NE @ factors.gallery_ME.T - offset_M
    assert torch.equal(score_NM.argsort(dim=1, descending=True), slow(a, b, name).argsort(dim=1))
    torch.testing.assert_close(
        factors.row_N[:, None] - factors.scale * score_NM, slow(a, b, name).float(), rtol=0, atol=1e-5
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
        torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-5)


def test_bad_input():
    with pytest.raises(ValueError, match=r"of the same D; got \[3, 6\] and \[3, 5\]"):
        DISTANCES["wasserstein"].matrix(gaussians(3), gaussians(3, dims=5))
    with pytest.raises(
        ValueError, match="Unknown distance 'kl'; known distances: cosine, csd, entailment, wasserstein"
    ):
        get_distance("kl")
    with pytest.raises(NotImplementedError, match="Distance must define `factors`, or both"):
        Distance().paired(gaussians(3), gaussians(3))


@pytest.mark.parametrize("name", NAMES)
def test_the_transposed_distance_takes_its_arguments_in_the_other_order(name):
    a, b = gaussians(7), gaussians(7, seed=1)
    distance = DISTANCES[name]
    torch.testing.assert_close(distance.transposed.matrix(b, a), distance.matrix(a, b).T)
    torch.testing.assert_close(distance.transposed.paired(b, a), distance.paired(a, b))
    assert distance.transposed.transposed is distance
    assert (distance.transposed is distance) == (name != "entailment")


def test_the_weight_of_the_entailment_score_follows_from_the_scales():
    assert Entailment.of_scales(match_scale=5.0, clip_scale=20.0).weight == Entailment().weight == 0.5
    assert Entailment.of_scales(1.0, 20.0).weight == pytest.approx(0.1 / 1.8)
    assert Entailment.of_scales(10.0, 20.0).weight == Entailment.of_scales(30.0, 20.0).weight == pytest.approx(4.5)
