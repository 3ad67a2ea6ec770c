"""Ranks and correlations against a plain computation, and the memory of a large validation set."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from pcmepp_openclip import Gaussian, csd
from pcmepp_openclip.evaluation.ranking import bin_correlation, ranks, retrieval_metrics


def gaussians(n, dim, seed):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(n, dim, generator=g), dim=-1), torch.randn(n, dim, generator=g) - 2)


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
def test_ranks_equal_a_sort(chunk):
    images, texts = gaussians(37, 6, 0), gaussians(37, 6, 1)
    got = ranks(images, texts, chunk)
    distance = csd(images, texts)
    cosine = images.mean @ texts.mean.T
    for i in range(37):
        assert got["csd"][i] == distance[i].argsort().tolist().index(i)
        assert got["mean"][i] == cosine[i].argsort(descending=True).tolist().index(i)
    assert not torch.equal(got["csd"], got["mean"])


def test_a_collapsed_model_is_not_a_perfect_one():
    one = gaussians(1, 6, 0)
    collapsed = Gaussian(one.mean.expand(50, -1), one.logvar.expand(50, -1))
    metrics = dict(retrieval_metrics(collapsed, collapsed))
    assert metrics["image_to_text_R@10"] == 0 and metrics["csd_text_to_image_R@1"] == 0
    assert metrics["image_to_text_mean_rank"] == 25.5


def test_metrics_by_hand():
    images = Gaussian(torch.eye(3), torch.tensor([[-3.0] * 3, [-2.0] * 3, [-1.0] * 3]))
    texts = Gaussian(torch.eye(3)[[0, 2, 1]], images.logvar)  # captions 1 and 2 are swapped
    metrics = dict(retrieval_metrics(images, texts))
    assert metrics["image_to_text_R@1"] == pytest.approx(1 / 3)
    assert metrics["image_to_text_R@5"] == 1
    assert metrics["image_to_text_median_rank"] == 2  # with 0 and two ties at 1.5, floored


def test_uncertainty_is_held_against_what_each_distance_finds():
    images, texts = gaussians(200, 6, 0), gaussians(200, 6, 1)
    texts = Gaussian(F.normalize(images.mean + 0.4 * texts.mean, dim=-1), texts.logvar)
    bins = {}
    metrics = dict(retrieval_metrics(images, texts, bins))
    for prefix, matrix in (("", -images.mean @ texts.mean.T), ("csd_", csd(images, texts))):
        sides = ("image_to_text", images.uncertainty, matrix), ("text_to_image", texts.uncertainty, matrix.T)
        for name, unc, own in sides:
            hit = (own.argmin(dim=1) == torch.arange(200)).float()
            shares = [hit[part].mean().item() for part in unc.argsort().tensor_split(10)]
            assert bins[f"{prefix}{name}"][1] == pytest.approx(shares)
            expected = torch.corrcoef(torch.tensor([list(range(10)), shares]))[0, 1].item()
            assert metrics[f"{prefix}{name}_uncertainty_R@1_correlation"] == pytest.approx(expected, abs=1e-5)
    assert bins["image_to_text"] != bins["csd_image_to_text"]


def test_bin_correlation():
    uncertainty = torch.arange(100.0)
    falling = (torch.arange(100) % 10 >= torch.arange(100) // 10).float()  # 10, 9, ... 1 hits of 10 in the bins
    assert bin_correlation(uncertainty, falling) == pytest.approx(-1)
    assert bin_correlation(uncertainty.flip(0), falling) == pytest.approx(1)
    assert math.isnan(bin_correlation(uncertainty, torch.ones(100)))


def test_a_large_validation_set_takes_no_square_matrix():
    """In a process of its own: the matrix of 20,000 pairs alone would be 1.6 GB."""
    code = """
import resource, torch
from pcmepp_openclip import Gaussian
from pcmepp_openclip.retrieval import retrieval_metrics
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
images, texts = (Gaussian(torch.nn.functional.normalize(torch.randn(20_000, 16), dim=-1), torch.randn(20_000, 16))
                 for _ in range(2))
before = peak()
metrics = dict(retrieval_metrics(images, texts))
assert len(metrics) == 24, len(metrics)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 400  # MB
