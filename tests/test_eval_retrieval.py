"""Retrieval metrics against a sort and the definitions, pair by pair."""

import itertools
import math
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import slow_csd
from slow import SLOW

from pcmepp_openclip import Gaussian
from pcmepp_openclip.distances import DISTANCES, by_name
from pcmepp_openclip.evaluation import coco
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.retrieval import (
    first_rank,
    invert,
    match_ranks,
    nearest,
    rankings,
    retrieval_metrics,
    top_k,
)

IMAGES, TEXTS = 23, 61


def gaussians(n, dim=6, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    logvar = spread * torch.randn(n, dim, generator=g) - 2
    return Gaussian(F.normalize(torch.randn(n, dim, generator=g), dim=-1), logvar)


def slow_distance(a, b, distance):
    if distance == "csd":
        return slow_csd(a, b)
    if distance not in by_name():
        return SLOW[distance](a.mean.double(), b.mean.double(), a.logvar.double(), b.logvar.double())
    out = torch.zeros(len(a.mean), len(b.mean), dtype=torch.double)
    for i, j in itertools.product(range(len(a.mean)), range(len(b.mean))):
        out[i, j] = ((a.mean[i].double() - b.mean[j].double()) ** 2).sum()
        if distance == "wasserstein":
            sigma_a, sigma_b = (a.logvar[i].double() / 2).exp(), (b.logvar[j].double() / 2).exp()
            out[i, j] += ((sigma_a - sigma_b) ** 2).sum()
        if distance == "entailment":  # 2 - 2 cos - u_b, of the same order as 1 - cos - u_b / 2
            out[i, j] -= b.logvar[j].double().exp().sum()
    return out


def retrieval(*args):
    return as_dict(retrieval_metrics(rankings(*args)))


def key(distance, name):
    return name if distance == "cosine" else f"{distance}/{name}"


def slow_metrics(distance_NM, own, right):
    """By eccv_caption's words: lists and sets, one query at a time."""
    totals = {"R@1": 0, "R@5": 0, "R@10": 0, "any_match_R@1": 0, "mAP@R": 0, "R-Precision": 0}
    ranks = []
    for row, own_items, right_items in zip(distance_NM, own, right, strict=True):
        ranking = row.argsort().tolist()
        ranks.append(min(ranking.index(item) for item in own_items))
        for k in (1, 5, 10):
            totals[f"R@{k}"] += bool(set(ranking[:k]) & set(own_items))
        totals["any_match_R@1"] += ranking[0] in right_items
        r = len(right_items)
        totals["R-Precision"] += len(set(ranking[:r]) & set(right_items)) / r
        precision = [len(set(ranking[:i]) & set(right_items)) / i for i in range(1, r + 1)]
        totals["mAP@R"] += sum(p for i, p in enumerate(precision) if ranking[i] in right_items) / r
    means = {name: total / len(distance_NM) for name, total in totals.items()}
    return {**means, "mean_rank": statistics.mean(ranks) + 1, "median_rank": math.floor(statistics.median(ranks)) + 1}


@pytest.fixture(scope="module")
def case():
    """Texts near their image, with some that fit several; more matches a query than the ten of R@10."""
    images, g = gaussians(IMAGES), torch.Generator().manual_seed(2)
    image_of_text = torch.randint(IMAGES, (TEXTS,), generator=g).tolist()
    image_of_text[:IMAGES] = range(IMAGES)
    noise = gaussians(TEXTS, seed=1)
    texts = Gaussian(F.normalize(images.mean[image_of_text] + 0.8 * noise.mean, dim=-1), noise.logvar)
    matches = [
        sorted({own, *torch.randint(IMAGES, (i % 15,), generator=g).tolist()}) for i, own in enumerate(image_of_text)
    ]
    return images, texts, image_of_text, matches


@pytest.mark.parametrize("known", [True, False])
def test_every_metric_against_the_definitions(case, known):
    images, texts, image_of_text, matches = case
    got = retrieval(images, texts, image_of_text, matches if known else None)
    pairs = [[i] for i in image_of_text]
    right = matches if known else pairs
    expected = {}
    for distance in by_name():
        matrix = slow_distance(images, texts, distance)
        for name, rows, own, true in (
            ("image_to_text", matrix, invert(pairs, IMAGES), invert(right, IMAGES)),
            ("text_to_image", matrix.T, pairs, right),
        ):
            several = max(map(len, true)) > 1
            for what, value in slow_metrics(rows, own, true).items():
                if (known or what != "any_match_R@1") and (several or what not in ("mAP@R", "R-Precision")):
                    expected[key(distance, f"{name}_{what}")] = value
        expected[key(distance, "RSUM")] = 100 * sum(
            expected[key(distance, f"{name}_R@{k}")] for name in ("image_to_text", "text_to_image") for k in (1, 5, 10)
        )
    assert got == pytest.approx(expected)
    assert len({got[key(distance, "RSUM")] for distance in by_name()}) == 4  # the distances do differ here


@pytest.mark.parametrize("chunk", [1, 100, 10**6])
def test_chunks_change_nothing(case, chunk):
    images, texts, *_ = case
    top = torch.cat(list(nearest(texts, images, "csd", 5, chunk)))
    assert torch.equal(top, slow_distance(texts, images, "csd").argsort(dim=1)[:, :5])


def test_a_collapsed_model_finds_what_chance_finds():
    one = gaussians(1)
    collapsed = Gaussian(one.mean.expand(400, -1), one.logvar.expand(400, -1))
    got = retrieval(collapsed, collapsed, range(400))
    assert 0 < got["text_to_image_R@10"] < 0.06 and got["csd/image_to_text_R@1"] < 0.02
    assert 180 < got["csd/image_to_text_mean_rank"] < 220
    # nor does it help where the right answers lie: all of the first half, then all of the second half are right
    for half in (range(200), range(200, 400)):
        own = list(half) * 2
        got = retrieval(collapsed, collapsed, own, [list(half)] * 400)
        assert 0.4 < got["text_to_image_R-Precision"] < 0.6


@pytest.mark.parametrize("k", [1, 2, 7, 40, 50])
def test_top_k_is_the_start_of_a_stable_sort(k):
    score = torch.randint(6, (200, 40), generator=torch.Generator().manual_seed(k)).float()
    assert torch.equal(top_k(score, k), score.argsort(dim=1, descending=True, stable=True)[:, :k])


@pytest.mark.parametrize("levels", [3, 1000])  # with many ties, and with few
def test_the_first_rank_is_that_of_a_stable_sort(levels):
    g = torch.Generator().manual_seed(levels)
    score = torch.randint(levels, (200, 40), generator=g).float()
    counts = torch.randint(1, 6, (200,), generator=g).tolist()
    right = [torch.randperm(40, generator=g)[:count] for count in counts]
    padded = torch.nn.utils.rnn.pad_sequence(right, batch_first=True, padding_value=40)
    order = score.argsort(dim=1, descending=True, stable=True).tolist()
    expected = [min(row.index(int(i)) for i in items) for row, items in zip(order, right, strict=True)]
    assert first_rank(score, padded).tolist() == expected


def test_a_model_of_nans_finds_nothing():
    images = gaussians(30)
    broken = Gaussian(torch.full_like(images.mean, float("nan")), images.logvar)
    got = retrieval(broken, images, range(30))
    assert got["image_to_text_R@10"] == got["csd/text_to_image_R@10"] == 0 and got["image_to_text_mean_rank"] == 30


@pytest.mark.parametrize("unique, copies", [(60, 31), (3, 4)])  # a product rounds the last columns in its own way
@pytest.mark.parametrize("distance", DISTANCES)
def test_equal_items_tie_and_ties_do_not_depend_on_k(distance, unique, copies):
    """A gallery with copies of its items, against a stable sort in the order that breaks ties."""
    queries, few, size = gaussians(50), gaussians(unique, seed=1), unique + copies
    g = torch.Generator().manual_seed(2)
    rows = torch.cat([torch.arange(unique), torch.randint(unique, (copies,), generator=g)])
    rows = rows[torch.randperm(size, generator=g)]
    gallery = Gaussian(few.mean[rows], few.logvar[rows])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))  # the fixed random order
    exact = slow_distance(queries, few, distance)[:, rows][:, order]
    expected = order[exact.argsort(dim=1, stable=True)]
    for k in (1, 5, 10, size):
        assert torch.equal(torch.cat(list(nearest(queries, gallery, distance, k, chunk=1000))), expected[:, :k])


def test_points_are_gaussians_of_variance_zero(case):
    images, texts, image_of_text, _ = case
    bare = [Gaussian(x.mean, torch.full_like(x.logvar, float("-inf"))) for x in (images, texts)]
    got = retrieval(*bare, image_of_text)
    for name, value in got.items():
        assert value == got[name.partition("/")[2] or name], name


def test_hits(case):
    images, texts, own, matches = case
    cosine = texts.mean @ images.mean.T
    nearest_image = cosine.argmax(dim=1).tolist()
    hits = rankings(images, texts, own, matches, ["cosine"])[1].hits
    assert hits["cosine_R@1"].tolist() == [float(found == i) for found, i in zip(nearest_image, own, strict=True)]
    expected = [float(found in right) for found, right in zip(nearest_image, matches, strict=True)]
    assert hits["cosine_any_match_R@1"].tolist() == expected


def test_coco_through_the_package(case):
    """The package's own annotations of 30 images: its COCO 1K wants whole rankings, which is slow."""
    package = coco.load_eccv_caption.__wrapped__()
    ids = [int(i) for i in package.coco_ids]
    image_of = {caption: images[0] for caption, images in package.coco_gts["t2i"].items()}
    annotated = list(package.eccv_gts["i2t"])[:30]
    ids = [i for i in ids if image_of[i] in annotated]
    image_ids, kept = sorted(annotated), set(ids)
    for gts in (package.coco_gts, package.cxc_gts, package.eccv_gts):
        gts["i2t"] = {i: [c for c in gts["i2t"][i] if c in kept] for i in image_ids}
        gts["t2i"] = {c: [i for i in gts["t2i"].get(c, []) if i in set(image_ids)] or [image_of[c]] for c in ids}
    package.coco_ids = torch.tensor(ids).numpy()
    image_of_text = [image_ids.index(image_of[c]) for c in ids]
    images = gaussians(30, dim=8, spread=2.0)
    noise = gaussians(len(ids), dim=8, seed=1, spread=2.0)
    texts = Gaussian(F.normalize(images.mean[image_of_text] + noise.mean, dim=-1), noise.logvar)
    got = list(coco.coco(images, texts, image_ids, ids, image_of_text, package=package))
    for distance in by_name():
        matrix = slow_distance(images, texts, distance)
        i2t = {i: [ids[j] for j in row.argsort()] for i, row in zip(image_ids, matrix, strict=True)}
        t2i = {c: [image_ids[j] for j in row.argsort()] for c, row in zip(ids, matrix.T, strict=True)}
        wanted = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_r1", "eccv_map_at_r", "eccv_rprecision")
        expected = package.compute_all_metrics(i2t, t2i, target_metrics=wanted, Ks=(1, 5, 10))
        own = {metric.name: metric.value for metric in got if metric.distance == distance}
        flat = {f"{name}_{side}": value for name, sides in expected.items() for side, value in sides.items()}
        for size in ("1k", "5k"):
            flat[f"coco_{size}_rsum"] = 100 * sum(v for key, v in flat.items() if key.startswith(f"coco_{size}_r"))
        assert own == pytest.approx(flat) and len(own) == 26
        assert 0.0 < own["coco_5k_r1_i2t"] < 0.95 and own["coco_1k_r1_i2t"] > own["coco_5k_r1_i2t"]


def test_the_paper_s_uncertainty_bins_are_of_coco_1k_by_csd():
    """On five folds of 30 images, against a sort within each fold."""
    images, image_of_text = gaussians(150, dim=8, spread=2.0), [i // 5 for i in range(750)]
    noise = gaussians(750, dim=8, seed=1, spread=2.0)
    texts = Gaussian(F.normalize(images.mean[image_of_text] + noise.mean, dim=-1), noise.logvar)
    package = SimpleNamespace(coco_ids=torch.arange(1000, 1750).numpy())
    by_image, by_text = coco.first_hits_1k(images, texts, range(1000, 1750), image_of_text, "csd", package)
    matrix = slow_distance(images, texts, "csd")
    for i in range(150):
        first = i // 30 * 150
        assert by_image[i] == (image_of_text[first + int(matrix[i, first : first + 150].argmin())] == i)
    for j in range(750):
        first = j // 150 * 30
        assert by_text[j] == (first + int(matrix[first : first + 30, j].argmin()) == j // 5)
    assert 0.1 < by_text.mean() < by_image.mean() < 0.95
    whole = match_ranks(images, texts, invert([[i] for i in image_of_text], 150), "csd") < 1
    assert whole.float().mean() < by_image.mean()


def test_coco_that_is_not_the_test_split():
    package = coco.load_eccv_caption()
    with pytest.raises(ValueError, match="lacks 4998 images and 24999 captions of Karpathy's test split"):
        coco.check_ids(package, list(package.coco_gts["i2t"])[:2], [int(package.coco_ids[0])])


def test_a_large_validation_set_takes_no_square_matrix():
    """In a process of its own: the matrix of 12,000 pairs alone would be 576 MB."""
    code = """
import resource, torch
from pcmepp_openclip import Gaussian
from pcmepp_openclip.evaluation.retrieval import rankings
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
images, texts = (Gaussian(torch.nn.functional.normalize(torch.randn(12_000, 16), dim=-1), torch.randn(12_000, 16))
                 for _ in range(2))
before = peak()
assert len(rankings(images, texts, range(12_000), distances=("cosine", "csd"))) == 4
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 300  # MB
