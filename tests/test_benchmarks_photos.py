"""`python -m benchmarks.photos` on random features: every method trains, decoupled ones leave the means alone."""

import pytest
import torch

from benchmarks.photos import heads, judge
from benchmarks.photos.__main__ import tables
from benchmarks.photos.estimators import VARIANCE, make_bank, of_means
from benchmarks.photos.features import DEGRADED, Photos, cut_words

IMAGES, CAPTIONS = 60, 2


@pytest.fixture(scope="module")
def photos():
    g = torch.Generator().manual_seed(0)
    views = {view: torch.randn(IMAGES, 1280, generator=g) for view in ("clean", "rrc", *DEGRADED)}
    texts, cut = torch.randn(2, IMAGES * CAPTIONS, 384, generator=g)
    own = torch.arange(IMAGES).repeat_interleave(CAPTIONS)
    return Photos(views, ["a dog on a red sofa"] * len(own), texts, cut, own)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(heads, "HELD_OUT", 20)
    monkeypatch.setattr(heads, "BATCH", 16)


def state(method, photos):
    return heads.train(heads.METHODS[method], photos, seed=0, steps=3).state_dict()


@pytest.mark.parametrize("method", [name for name in heads.METHODS if not name.startswith("plain")])
def test_decoupled_methods_have_the_means_of_plain_clip(method, photos):
    plain, found = state("plain_cut" if method.endswith("_cut") else "plain", photos), state(method, photos)
    of_means = [name for name in plain if name.startswith(("image.", "text.")) or name == "logit_scale"]
    same = all(torch.equal(plain[name], found[name]) for name in of_means)
    assert same == (method not in ("paper", "coupled")) and len(of_means) > 15
    assert not torch.equal(plain["image_logvar.second.weight"], found["image_logvar.second.weight"])


def test_known_and_held_out_photographs_are_apart(photos):
    known, held_out = heads.split_rows(photos, seed=1)
    assert sorted([*known.tolist(), *held_out.tolist()]) == list(range(IMAGES)) and len(held_out) == 20


def test_every_estimator_is_judged_and_printed(photos):
    model = heads.train(heads.METHODS["plain"], photos, seed=0, steps=1)
    data, about = judge.encode(model, photos), {"method": "plain", "seed": 0, "split": "test"}
    with torch.inference_mode():
        bank = make_bank(model, photos, 0, 20)
        rows = [{**about, "R@1": judge.retrieval(data, bank), "k": 0.1}]
        estimators = [None, VARIANCE, *of_means(model, photos, 0)]
        for estimator in estimators:
            found = judge.judge(data, estimator, resamples=2)
            assert set(found) == set(judge.COLUMNS) and all(len(values) == 3 for values in found.values())
            rows.append({**about, "estimator": "oracle" if estimator is None else estimator.name, **found})
    text = tables(rows)
    assert all(f"| {row['estimator']} |" in text for row in rows[1:]) and "| plain CLIP | test |" in text


def test_a_degraded_view_of_larger_uncertainty_is_told(photos):
    """An oracle for whom the right caption is the closest has no loss, and blurred images that are other images do."""
    model = heads.train(heads.METHODS["plain"], photos, seed=0, steps=1)
    data = judge.encode(model, photos)
    means = {view: gaussian.mean for view, gaussian in data.views.items()}
    texts = data.texts._replace(mean=means["clean"][photos.image_of_text])
    data = judge.Encoded(data.views, texts, data.cut, data.image_of_text, 50.0)
    found = judge.judge(data, None, resamples=0)
    assert found["blur"][0] > 0.95 and judge.retrieval(data, None)["mean_i2t"] == 1.0


def test_cut_words_is_a_run_of_the_caption():
    from random import Random

    words = "a small dog on a red sofa"
    found = {cut_words(words + ".", Random(seed)) for seed in range(50)}
    assert all(cut in words and cut for cut in found) and len(found) > 10
