"""The closed-form sampled distance against loops over pairs and dimensions, and against sampling."""

import pytest
import torch
import torch.nn.functional as F
from helpers import slow_csd

from pcmepp_openclip import Gaussian, csd


def gaussians(samples: int, dims: int = 16, seed: int = 0, dtype=torch.float32) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = F.normalize(torch.randn(samples, dims, generator=generator), dim=-1)
    return Gaussian(mean.to(dtype), torch.randn(samples, dims, generator=generator) - 4)


def test_against_loops():
    a, b = gaussians(5), gaussians(7, seed=1)
    distance = csd(a, b)
    assert distance.shape == (5, 7) and distance.dtype == torch.float32
    torch.testing.assert_close(distance, slow_csd(a, b).float(), rtol=0, atol=1e-6)
    a, b = a._replace(mean=3 * a.mean), b._replace(mean=b.mean + 1)  # means need not be normalised
    torch.testing.assert_close(csd(a, b), slow_csd(a, b).float(), rtol=1e-6, atol=1e-5)


def test_it_is_the_mean_squared_distance_of_samples():
    a, b = gaussians(2, dims=4), gaussians(3, dims=4, seed=1)
    generator = torch.Generator().manual_seed(0)

    def draw(g):
        return g.mean + (0.5 * g.logvar).exp() * torch.randn(200_000, *g.mean.shape, generator=generator)

    x, y = draw(a), draw(b)
    sampled = (x[:, :, None] - y[:, None]).square().sum(dim=-1).mean(dim=0)
    torch.testing.assert_close(csd(a, b), sampled, rtol=0.01, atol=0)


def test_gradients_against_loops():
    grads = []
    for distance in (csd, slow_csd):
        leaves = [t.clone().requires_grad_() for g in (gaussians(3), gaussians(4, seed=1)) for t in g]
        out = distance(Gaussian(*leaves[:2]), Gaussian(*leaves[2:])).double()
        (out * torch.arange(12).reshape(3, 4)).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_itself_is_twice_its_uncertainty_away():
    a = gaussians(4)
    torch.testing.assert_close(csd(a, a).diagonal(), 2 * a.uncertainty, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_computed_in_fp32(dtype):
    a, b = gaussians(5, dtype=dtype), gaussians(7, seed=1, dtype=dtype)
    distance = csd(a, b)
    assert distance.dtype == torch.float32
    torch.testing.assert_close(distance, slow_csd(a, b).float(), rtol=0, atol=1e-6)


def test_autocast_does_not_round_it():
    a, b = gaussians(5), gaussians(7, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        distance = csd(a, b)
    assert torch.equal(distance, csd(a, b))


@pytest.mark.parametrize("shapes", [((3, 4), (3, 5)), ((4,), (4,)), ((2, 3, 4), (2, 3, 4))])
def test_wrong_shapes_are_named(shapes):
    a, b = (Gaussian(torch.zeros(s), torch.zeros(s)) for s in shapes)
    with pytest.raises(ValueError, match=r"means \[N, D\] and \[M, D\]") as error:
        csd(a, b)
    assert str(list(shapes[0])) in str(error.value) and str(list(shapes[1])) in str(error.value)
