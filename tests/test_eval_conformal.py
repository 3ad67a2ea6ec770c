"""Split-conformal lists and sets against plain loops, and their promise on many draws."""

import math

import pytest
import torch
import torch.nn.functional as F
from slow import SLOW

from pcmepp_openclip import Gaussian
from pcmepp_openclip.distances import get_distance
from pcmepp_openclip.evaluation.conformal import (
    conformal,
    conformal_levels,
    halves,
    level_lists,
    lists,
    sets,
    threshold,
)
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.retrieval import Ranking, match_ranks


def gaussians(n, seed):
    g = torch.Generator().manual_seed(seed)
    return Gaussian(F.normalize(torch.randn(n, 6, generator=g), dim=-1), torch.randn(n, 6, generator=g) - 2)


def slow_threshold(scores, coverage=0.9):
    """The smallest of the scores up to which there are at least coverage * (n + 1) of them."""
    for score in sorted(scores):
        if sum(other <= score for other in scores) >= coverage * (len(scores) + 1) - 1e-9:
            return score
    return math.inf


def slow_sets(score_NM, right):
    """`score_NM[i][j]` of item j for query i; (mean size, coverage)."""
    known, other = (part.tolist() for part in halves(len(right)))
    bound = slow_threshold([min(score_NM[i][j] for j in right[i]) for i in known])
    sizes = [sum(score <= bound for score in score_NM[i]) for i in other]
    inside = [any(score_NM[i][j] <= bound for j in right[i]) for i in other]
    return sum(sizes) / len(sizes), sum(inside) / len(inside)


def test_threshold():
    assert threshold(torch.arange(1.0, 10)) == 9 and threshold(torch.arange(1.0, 20)) == 18
    assert threshold(torch.arange(1.0, 9)) == math.inf and threshold(torch.zeros(0)) == math.inf
    for n in (5, 9, 10, 33, 99, 100):
        scores = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 8).round()
        assert threshold(scores) == slow_threshold(scores.tolist())


def test_halves():
    known, other = halves(101)
    assert sorted(known.tolist() + other.tolist()) == list(range(101)) and len(known) == 50


@pytest.mark.parametrize("distance", ["cosine", "csd", "wasserstein"])
def test_sets_and_lists_against_loops(distance):
    query, gallery = gaussians(60, 0), gaussians(25, 1)
    right = [[i % 25] if i % 2 else [i % 25, (i + 7) % 25] for i in range(60)]
    if distance == "cosine":
        score_NM = 1 - query.mean @ gallery.mean.T
    else:
        score_NM = SLOW[distance](query.mean, gallery.mean, query.logvar, gallery.logvar)
    assert sets(query, gallery, right, distance) == pytest.approx(slow_sets(score_NM.tolist(), right))
    ranks = score_NM.argsort(dim=1).argsort(dim=1)
    rank = match_ranks(query, gallery, right, distance)
    assert lists(rank, 25) == pytest.approx(slow_sets(ranks.tolist(), right))
    measure = get_distance(distance)
    ranking = Ranking(distance, "text_to_image", measure, rank, None, None, None)
    got = as_dict(conformal(ranking, query, gallery, right))
    prefix = "" if distance == "cosine" else f"{distance}/"
    assert list(got) == [
        f"{prefix}text_to_image_conformal_{name}" for name in ("list_size", "list_coverage", "set_size", "set_coverage")
    ]


def test_level_lists_against_a_loop():
    g = torch.Generator().manual_seed(0)
    u = torch.rand(400, generator=g)
    rank = (u * 30 * torch.rand(400, generator=g)).long()
    known, other = (part.tolist() for part in halves(400))
    edges = torch.quantile(u[known].double(), torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.double)).tolist()

    def level(i):
        return sum(edge < u[i].item() for edge in edges)

    sizes = [min(slow_threshold([rank[i].item() for i in known if level(i) == k]) + 1, 50) for k in range(5)]
    expected = [sizes[level(i)] for i in other]
    inside = [rank[i].item() < size for i, size in zip(other, expected, strict=True)]
    got = level_lists(rank, u, 50)
    assert got == pytest.approx((sum(expected) / 200, sum(inside) / 200))
    assert got[0] < lists(rank, 50)[0]  # this uncertainty knows which queries are hard
    assert as_dict(conformal_levels(rank, u, 50))["conformal_level_list_size"] == got[0]


def test_the_promise_holds_on_average():
    found = []
    for seed in range(100):
        rank = torch.randint(0, 1000, (200,), generator=torch.Generator().manual_seed(seed))
        found.append(lists(rank, 1000)[1])
    assert 0.885 < sum(found) / 100 < 0.925


@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_queries_get_the_whole_gallery(n):
    query, gallery = gaussians(n, 0), gaussians(4, 1)
    right = [[0]] * n
    rank = match_ranks(query, gallery, right, "csd")
    assert lists(rank, 4) == level_lists(rank, query.uncertainty, 4) == sets(query, gallery, right, "csd") == (4, 1)


def test_all_hits_and_equal_uncertainties():
    rank = torch.zeros(100, dtype=torch.long)
    assert lists(rank, 9) == (1, 1) and level_lists(rank, torch.rand(100), 9) == (1, 1)
    rank = torch.arange(100) % 9
    assert level_lists(rank, torch.ones(100), 9) == lists(rank, 9)
