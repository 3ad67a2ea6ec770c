"""The warnings of a run: each is given once, when it is due, and names the flag to change."""

import math

import pytest
import torch

from pcmepp_openclip.config import PCMEppCfg
from pcmepp_openclip.training.health import HealthCheck

STEPS = 1000
FINE = {
    "variance_share": 0.1,
    "match_ratio": 0.5,
    "expected_matches": 1.0,
    "image_miscalibration": 0.5,
    "image_agreement": 0.4,
    "text_agreement": 0.4,
}
WORDS = {
    "variance_share": "The variances dominate the means",
    "match_ratio": "about to lose its meaning",
    "agreement": "says the opposite of the means",
    "expected_matches": "not calibrated",
}


def given(changes, batch=256, warmup=50, every=10, steps=STEPS, **cfg):
    """(step, warning) of a whole run; `changes` are numbers, or functions of the step."""
    block = PCMEppCfg.parse({"head_layers": 1, "init_logvar_bias": -5.0, **cfg}).as_json()
    check, found = HealthCheck(block, batch, warmup), []
    for step in range(0, steps, every):
        seen = {**FINE, **{name: x(step) if callable(x) else x for name, x in changes.items()}}
        found += [(step, text) for text in check.warnings(step, steps, seen)]
    return found


def test_a_healthy_run_has_no_warning():
    assert given({}) == []


@pytest.mark.parametrize(
    "name, changes, first, flags",
    [
        ("variance_share", {"variance_share": 0.95}, 0, ["--init-logvar-bias (now -5.0)", "--vib-weight (now 1e-06)"]),
        ("match_ratio", {"match_ratio": 0.86}, 0, ["0.86.", "--match-logit tied", "--match-ratio", "--pretrained"]),
        ("match_ratio", {"match_ratio": lambda t: 0.6 + 0.0005 * t}, 240, ["and reaches 1", "--match-logit tied"]),
        (
            "agreement",
            {"text_agreement": -0.3},
            240,
            ["texts (correlation -0.30)", "--match-logit tied", "pcmepp bank"],
        ),
        ("agreement", {"image_agreement": -0.3}, 240, ["images (", "--train-means-by contrastive"]),
        ("expected_matches", {"expected_matches": 3.2}, 240, ["expects 3.2", "Lower --init-match-shift (now 1)"]),
        ("expected_matches", {"expected_matches": 0.3}, 240, ["Raise --init-match-shift", "--match-weight (now 1)"]),
    ],
)
def test_each_is_given_once(name, changes, first, flags):
    ((step, text),) = given(changes)
    assert step == first and WORDS[name] in text
    assert all(flag in text for flag in flags), text


def test_all_at_once_are_four_warnings():
    found = given({"variance_share": 1.0, "match_ratio": 0.99, "text_agreement": -0.5, "expected_matches": 50.0})
    assert len(found) == 4 and all(any(words in text for _, text in found) for words in WORDS.values())


# Correlations of nothing in batches of 256 and of 16.
NOISE = (torch.randn(STEPS, generator=torch.Generator().manual_seed(0)) / 256**0.5).tolist()
MORE_NOISE = (torch.randn(STEPS, generator=torch.Generator().manual_seed(1)) / 16**0.5).tolist()


FINE_RUNS = [
    # before the run has settled
    ({"image_agreement": lambda t: -0.9 if t < 200 else 0.1}, {}),
    ({"expected_matches": lambda t: 100.0 if t < 200 else 1.0}, {}),
    ({"text_agreement": lambda t: -0.9 if t < 900 else 0.1}, {"warmup": 900}),
    # noise, a short dip, and a value that is hardly negative
    ({"image_agreement": lambda t: NOISE[t], "text_agreement": lambda t: -NOISE[t]}, {}),
    ({"image_agreement": lambda t: MORE_NOISE[t], "text_agreement": lambda t: -MORE_NOISE[t]}, {"batch": 16}),
    ({"image_agreement": lambda t: -0.9 if 500 <= t < 540 else 0.1}, {}),
    ({"image_agreement": lambda t: -0.9 if 500 <= t < 509 else 0.1}, {"every": 1}),
    ({"image_agreement": -0.05}, {}),
    ({"image_agreement": -0.3}, {"batch": 16}),
    ({"expected_matches": lambda t: 1.0 if t % 30 else 9.0}, {}),
    # a ratio that rises too slowly, falls, or rises from a low value
    ({"match_ratio": lambda t: 0.7 + 0.0001 * t}, {}),
    ({"match_ratio": lambda t: 0.84 - 0.0002 * t}, {}),
    ({"match_ratio": lambda t: 0.1 + 0.0005 * t}, {}),
    # not defined
    ({"image_agreement": math.nan, "text_agreement": math.nan, "expected_matches": math.nan}, {}),
    ({"match_ratio": math.nan, "variance_share": math.nan}, {}),
    # not what the theory is about
    ({"match_ratio": 1.0}, {"match_logit": "siglip"}),
    ({"match_ratio": 1.0, "image_agreement": -0.5}, {"contrastive_weight": 0.0}),
    ({"match_ratio": 1.0, "image_agreement": -0.5, "variance_share": 0.99}, {"distance": "elk"}),
    ({"match_ratio": 1.0, "image_agreement": -0.5, "variance_share": 0.99}, {"match_weight": 0.0}),
    ({"expected_matches": 9.0}, {"match_weight": 0.0}),
    ({"expected_matches": 9.0}, {"pp_weight": 0.1}),
    # a run that ends before it can be told
    ({"image_agreement": -0.5, "expected_matches": 9.0}, {"steps": 0}),
    ({"image_agreement": -0.5, "expected_matches": 9.0}, {"steps": 4, "warmup": 2, "every": 1}),
]


def test_nothing_is_said_without_need():
    for changes, settings in FINE_RUNS:
        assert given(changes, **settings) == [], (changes, settings)


def test_the_flag_fits_the_run():
    ((_, text),) = given({"match_ratio": 0.9}, match_logit="tied", match_ratio=0.9)
    assert "Lower --match-ratio (now 0.9)" in text and "--match-logit" not in text
    ((_, text),) = given({"image_agreement": -0.5}, match_logit="tied")
    assert "Start a new run with --train-means-by contrastive, or use" in text
    ((_, text),) = given({"image_agreement": -0.5}, match_logit="tied", train_means_by="contrastive")
    assert "Use the estimate of `pcmepp bank`" in text and "--" not in text
    ((_, text),) = given({"expected_matches": 30.0}, match_logit="siglip")
    assert "Lower the logit bias" in text


SATURATED = [
    ("kl", "image_miscalibration", math.inf, "no pair of the batch is a match"),
    ("js", "image_miscalibration", 60.0, "raise --init-logvar-bias (now -5) or raise --init-match-shift (now 1)."),
    ("bhattacharyya", "expected_matches", 256.0, "raise --init-logvar-bias (now -5) or lower --init-match-shift"),
    ("elk", "expected_matches", 256.0, "raise --init-logvar-bias (now -5) or lower --init-match-shift (now 1)."),
]


@pytest.mark.parametrize("distance, name, value, words", SATURATED)
def test_a_distance_that_saturates_the_matching_loss_is_said_at_the_start(distance, name, value, words):
    first = {name: lambda t: value if t == 0 else FINE[name]}
    ((step, text),) = given(first, distance=distance)
    assert step == 0 and words in text and f"starts saturated: by --distance {distance} " in text
    later = {name: lambda t: FINE[name] if t == 0 else value}
    assert not [text for _, text in given(later, distance=distance) if "saturated" in text]
    assert not [text for _, text in given(first, distance="csd") if "saturated" in text]
    assert given(first, distance=distance, match_weight=0.0) == []


def test_a_long_run_settles_after_ten_thousand_steps():
    ((step, _),) = given({"image_agreement": -0.5}, steps=1_000_000, every=100)
    assert step == 10_000 + 4 * 10_000
