"""`python -m research.photos` on random features: every model trains, and every estimator is asked every question."""

import sys
from random import Random

import pytest
import torch

from pcmepp_openclip import DISTANCES
from research.photos import __main__ as command
from research.photos import estimators, features, heads, pairs, questions, tables

IMAGES, CAPTIONS = 60, 2
TEXTS = ["a dog on a red sofa", "dog"]


def make(seed, images=IMAGES):
    g = torch.Generator().manual_seed(seed)
    views = {v: torch.randn(images, 1280, generator=g) for v in ("clean", features.TRAIN_CROP, *features.DEGRADED)}
    texts, cut = torch.randn(2, images * CAPTIONS, 384, generator=g)
    own = torch.arange(images).repeat_interleave(CAPTIONS)
    return features.Photos(views, TEXTS * images, texts, ["a dog", "dog"] * images, cut, own)


@pytest.fixture(scope="module")
def photos():
    return make(0)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(heads, "HELD_OUT", 20)
    monkeypatch.setattr(heads, "BATCH", 16)
    monkeypatch.setattr(estimators, "BANK_SIZES", (5, 20))


def test_decoupled_models_have_the_means_of_plain_clip(photos):
    plain = heads.train("plain", photos, seed=0, steps=3).state_dict()
    means = [name for name in plain if name.startswith(("image.", "text.")) or name == "logit_scale"]
    for method in heads.METHODS:
        found = heads.train(method, photos, seed=0, steps=3).state_dict()
        assert all(torch.equal(plain[name], found[name]) for name in means) == (method != "paper")
        assert torch.equal(plain["image_logvar.second.weight"], found["image_logvar.second.weight"]) == (
            method == "plain"
        )


def test_known_and_held_out_photographs_are_apart(photos):
    known, held_out = heads.split_rows(photos, seed=1)
    assert sorted([*known.tolist(), *held_out.tolist()]) == list(range(IMAGES)) and len(held_out) == 20


def test_the_command_asks_every_estimator_every_question(photos, tmp_path, monkeypatch, capsys):
    splits = {"train": photos, **{name: make(i, 30) for i, name in enumerate(command.SPLITS)}}
    splits["graded"].captions[:] = ["dog", "a dog on a red sofa"] * 30
    monkeypatch.setattr(command, "read_photos", lambda data, split, views, cache: splits[split])
    monkeypatch.setattr(command, "empty_caption", lambda cache: torch.zeros(1, 384))
    some = torch.arange(20)
    true = [features.TrueMatches(of, some, [[0, i + 1] for i in range(20)], some % 7) for of in ("texts", "images")]
    monkeypatch.setattr(command, "true_matches", lambda data, split: true)
    argv = ["photos", f"--data={tmp_path}", f"--out={tmp_path}", "--seeds=1", "--steps=1", "--resamples=2"]
    monkeypatch.setattr(sys, "argv", argv)
    command.main()
    text = (tmp_path / "tables.md").read_text()
    assert text in capsys.readouterr().out
    for question in ("Multiplicity", "Confusion", "Vagueness", "Pairs", "Calibration"):
        assert f"## {question}" in text
    for row in (
        "a random number",
        "number of words",
        "**`multiplicity`**",
        "bank of 20",
        "cosine, corrected by 0.75 h",
    ):
        assert f"| {row} |" in text
    assert all(f"| {heads.METHODS[name].words} |" in text for name in heads.METHODS if name != "plain")
    assert "nan" not in text.split("## Pairs")[1]


def test_an_oracle_answers_each_question(photos):
    """One that knows the truth has 1 where a random number has 0 or 1/2."""
    model = heads.train("plain", photos, seed=0, steps=1)
    with torch.inference_mode():
        data = questions.encode(model, photos)
    number = torch.arange(IMAGES) % 7 + 1
    true = features.TrueMatches("images", torch.arange(IMAGES), [[0] * n for n in number.tolist()], 2 * number)
    oracle = estimators.Estimator("oracle", lambda query, _: 3 * number.float(), is_number=True)
    found = {name: value(torch.arange(count)) for name, count, value in questions.multiplicity(oracle, data, [true])}
    assert found["images"] == pytest.approx(1) and found["size, images"] == pytest.approx(3)
    oracle = estimators.Estimator("oracle", lambda query, _: 1 - data.hits[query.of])
    found = {name: value(torch.arange(count)) for name, count, value in questions.confusion(oracle, data)}
    assert found["miss i2t"] == found["miss t2i"] == 1


def test_captions_of_equal_length_are_compared_with_each_other_alone():
    words = torch.tensor([3.0, 3, 5, 5])
    value, level = torch.tensor([1.0, 2, 0, 1]), torch.tensor([0, 1, 0, 1])
    assert questions._equal_tau(value, level, words) == 1
    assert questions._equal_tau(-words, level, words) == 0
    assert questions._equal_words(value, level, words) == 1 and questions._equal_words(words, level, words) == 0.5


def test_short_texts_count_the_photographs_that_mention_them():
    graded, photos = make(1, 2), make(2, 3)
    graded.captions[:] = ["Dog", "a dog on a red sofa", "red cat", "sofa"]
    photos.captions[:] = ["A dog.", "two cats", "a hotdog", "a cat", "my dog on a sofa", "a sofa"]
    rows, number = questions.short_texts(graded, photos)
    assert [graded.captions[i] for i in rows] == ["Dog", "sofa"] and number.tolist() == [2, 1]


def test_average_precision_at_r():
    assert pairs._average_precision(torch.tensor([0.1, 0.3, 0.2, 0.4]), [0, 1]) == pytest.approx(0.5)
    assert pairs._average_precision(torch.tensor([0.1, 0.3, 0.2, 0.4]), [1, 2]) == pytest.approx(0.25)


def test_pairs_of_known_matches(photos):
    model = heads.train("plain", photos, seed=0, steps=1)
    with torch.inference_mode():
        data = questions.encode(model, photos)
        own = torch.arange(len(photos.captions))
        true = [features.TrueMatches("texts", own, [[i] for i in photos.image_of_text.tolist()], torch.ones(len(own)))]
        found = {n: value(torch.arange(count)) for n, count, value in pairs.pairs(data, DISTANCES["cosine"], true)}
    assert found["mAP@R t2i"] == pytest.approx(found["R@1 t2i"]) and "mAP@R i2t" not in found


def test_a_cell_is_the_mean_and_the_interval_over_seeds():
    assert tables.cell([[0.4, 0.0, 0.2], [0.6, 0.6, 0.8]], 3) == "0.500 (0.015 to 0.785)"


def test_cut_words_is_a_run_of_the_caption():
    words = "a small dog on a red sofa"
    found = {features.cut_words(words + ".", Random(seed)) for seed in range(50)}
    assert all(cut in words and cut for cut in found) and len(found) > 10
