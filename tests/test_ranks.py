"""On any number of ranks, with any accumulation, the loss and every gradient are those of one process.

Real processes over gloo, through `compute_gradients` of the training loop."""

import functools
import json

import pytest
import torch
from rank_worker import BATCH, CFG, build_labels, build_model
from slow import slow_calibration, slow_difficulty, slow_labels, slow_soft_terms, slow_terms

from pcmepp_openclip.models.pcmepp import is_pcmepp_parameter

WEIGHTS = {
    "contrastive_weight": 1.5,
    "match_weight": 2.0,
    "pp_weight": 0.1,
    "vib_weight": 1e-2,
    "difficulty_weight": 0.3,
}
WORLDS, ACCUMS = (1, 2, 3, 4), (1, 2, 4)


SIGLIP_WEIGHTS = {
    "contrastive_weight": 0.0,
    "match_weight": 1.0,
    "pp_weight": 0.0,
    "vib_weight": 1e-6,
    "difficulty_weight": 0.0,
}


def cases():
    for case in csd_cases():
        yield {"form": "paper", **case}
    for form, distance in (("paper", "csd"), ("decoupled", "csd"), ("paper", "wasserstein")):
        for world, accum in ((1, 1), (2, 1), (2, 2), (3, 1)):
            name = f"logged-{form}-{distance}-w{world}-k{accum}"
            case = {"name": name, "world": world, "accum": accum, "distance": distance, "form": form}
            yield {**case, "weights": WEIGHTS, "logged": True}
    for form, weights, distance in (
        ("siglip", SIGLIP_WEIGHTS, "csd"),
        ("decoupled", WEIGHTS, "csd"),
        ("decoupled", WEIGHTS, "wasserstein"),
        ("gpo", WEIGHTS, "csd"),
    ):
        for world, accum in ((1, 1), (2, 2), (3, 1), (4, 1)):
            name = f"{form}-{distance}-w{world}-k{accum}"
            case = {"name": name, "world": world, "accum": accum, "distance": distance, "form": form}
            yield {**case, "weights": weights}


def csd_cases():
    for world in WORLDS:
        for accum in ACCUMS:
            name = f"w{world}-k{accum}"
            yield {"name": name, "world": world, "accum": accum, "distance": "csd", "weights": WEIGHTS}
    for distance in ("cosine", "wasserstein", "manhattan"):
        for world, accum in ((1, 1), (1, 2), (2, 2), (3, 1)):
            name = f"{distance}-w{world}-k{accum}"
            yield {"name": name, "world": world, "accum": accum, "distance": distance, "weights": WEIGHTS}
    for world, accum in ((2, 2), (3, 1)):  # each rank sees its own share, as in a step that is not logged
        name = f"shares-w{world}-k{accum}"
        yield {"name": name, "world": world, "accum": accum, "distance": "csd", "weights": WEIGHTS, "shares": True}
    # ablations, which DDP refuses if a parameter gets no gradient
    ablations = {f"no-{off}": {**WEIGHTS, off: 0.0} for off in WEIGHTS}
    ablations |= {f"only-{on}": {name: w * (name == on) for name, w in WEIGHTS.items()} for on in WEIGHTS}
    for name, weights in ablations.items():
        yield {"name": name, "world": 2, "accum": 1, "distance": "csd", "weights": weights}


def label_cases():
    weights = {"contrastive_weight": 0.0, "match_weight": 2.0, "pp_weight": 0.1, "vib_weight": 0.0}
    for kind, distance, form, worlds in (
        ("mixed", "csd", "paper", ((1, 1), (1, 4), (2, 2), (3, 1), (4, 1), (4, 3))),
        ("several", "csd", "paper", ((2, 1), (3, 2))),
        ("both", "csd", "siglip", ((1, 2), (2, 3), (4, 2))),
        ("both", "wasserstein", "paper", ((1, 1), (2, 2), (3, 1))),
    ):
        for world, accum in worlds:
            name = f"labels-{kind}-{distance}-w{world}-k{accum}"
            case = {"name": name, "world": world, "accum": accum, "distance": distance, "form": form}
            case |= {"weights": weights, "labels": kind, "logged": True}
            yield case
            if kind == "both" and world > 1:
                yield {**case, "name": f"smooth-{name}", "settings": {"label_smoothing": 0.02}}


CASES, LABEL_CASES = list(cases()), list(label_cases())


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES + LABEL_CASES))
    assert ranks.run(max(WORLDS), [folder], module="rank_worker") == [0] * max(WORLDS)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in CASES + LABEL_CASES}


@pytest.fixture(scope="module")
def slow():
    """Terms and, for given weights, gradients of the whole batch in one process by the slow form."""

    @functools.cache
    def terms(distance, form):
        model, images, texts = build_model(form)
        out = model(images, texts)
        gaussians = [out[key] for key in ("image_features", "text_features", "image_logvar", "text_logvar")]
        scalars = [out[key].mean() for key in ("clip_scale", "match_scale", "match_shift")]
        found = slow_terms(*gaussians, *scalars, distance=distance, reduction=model.pcmepp_cfg.reduction)
        return model, (*found, slow_difficulty(*gaussians, scalars[0]))

    def gradients(distance, form, weights):
        model, found = terms(distance, form)
        weighted = [w * term for w, term in zip(weights.values(), found, strict=True)]
        names = [name for name, _ in model.named_parameters()]
        options = {"retain_graph": True, "materialize_grads": True}
        grads = dict(zip(names, torch.autograd.grad(sum(weighted), list(model.parameters()), **options), strict=True))
        if form == "decoupled":  # the towers and the logit scale learn from InfoNCE alone
            alone = dict(zip(names, torch.autograd.grad(weighted[0], list(model.parameters()), **options), strict=True))
            grads |= {name: grad for name, grad in alone.items() if not is_pcmepp_parameter(name)}
        return grads

    return terms, gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_loss_and_gradients_equal_one_process(case, results, slow):
    assert BATCH % (case["world"] * case["accum"]) == 0 and CFG["init_match_scale"] == 2.0
    terms, gradients = slow
    distance, form = case["distance"], case["form"]
    got = results[case["name"]]
    names = ("contrastive_loss", "match_loss", "pp_loss", "vib_loss", "difficulty_loss")
    for name, value, weight in zip(names, terms(distance, form)[1], case["weights"].values(), strict=True):
        if weight == 0:
            assert name not in got["terms"]
        else:
            assert got["terms"][name].item() == pytest.approx(weight * value.item(), rel=1e-5), name
    want = gradients(distance, form, case["weights"])
    for name, grad in got["grads"].items():
        error = (grad - want[name]).norm() / want[name].norm().clamp(min=1e-9)
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", [case for case in CASES if case.get("logged")], ids=lambda case: case["name"])
def test_the_log_says_of_a_batch_what_one_process_would(case, results):
    model, images, texts = build_model(case["form"])
    out = model(images, texts)
    expected = slow_calibration(
        *(out[key].double() for key in ("image_features", "text_features", "image_logvar", "text_logvar")),
        *(out[key].double().mean() for key in ("clip_scale", "match_scale", "match_shift")),
        distance=case["distance"],
    )
    found = results[case["name"]]["seen"]
    assert set(expected) < set(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


@functools.cache
def slow_labelled(kind, distance, form, smoothing):
    """Terms, gradients by name, raised labels and mean sum of labels of the whole batch in one process."""
    model, images, texts = build_model(form)
    out = model(images, texts)
    gaussians = [out[key].double() for key in ("image_features", "text_features", "image_logvar", "text_logvar")]
    m = slow_labels(*build_labels(kind))
    scalars = [out[key].double().mean() for key in ("match_scale", "match_shift")]
    smooth = smoothing + (1 - 2 * smoothing) * m
    match, pp, raised = slow_soft_terms(*gaussians, *scalars, smooth, model.pcmepp_cfg.reduction, distance)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(2.0 * match + 0.1 * pp, list(model.parameters()), materialize_grads=True)
    return (
        {"match_loss": 2.0 * match, "pp_loss": 0.1 * pp},
        dict(zip(names, grads, strict=True)),
        raised,
        m.sum() / BATCH,
    )


@pytest.mark.parametrize("case", LABEL_CASES, ids=lambda case: case["name"])
def test_soft_labels_equal_one_process(case, results):
    got = results[case["name"]]
    terms, grads, raised, matches = slow_labelled(
        *(case["labels"], case["distance"], case["form"], case.get("settings", {}).get("label_smoothing", 0.0))
    )
    assert got["terms"].keys() == terms.keys()
    for name, value in terms.items():
        assert got["terms"][name].item() == pytest.approx(value.item(), rel=1e-5), name
    for name, grad in got["grads"].items():
        error = (grad - grads[name]).norm() / grads[name].norm().clamp(min=1e-9)
        assert error < 1e-5, f"{name}: {error:.1e}"
    assert got["seen"]["pseudo_positives"] == raised > BATCH
    plain = results[f"logged-paper-{case['distance']}-w1-k1"]["seen"]["expected_matches"]
    if case["form"] == "paper":
        assert got["seen"]["expected_matches"] == pytest.approx(plain / matches.item(), rel=1e-4)


def test_accumulated_gradients_are_reduced_once(results):
    parameters = sum(grad.numel() for grad in results["w2-k1"]["grads"].values())
    for accum in ACCUMS:
        assert results[f"w2-k{accum}"]["reduced"] == parameters
