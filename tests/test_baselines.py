"""The losses of the baselines, and training with every distance: against slow forms, on ranks, and through the loop."""

import functools
import itertools
import json

import pytest
import torch
from drawn_shards import write_shards
from eval_data import write_retrieval
from largest import LargestTensor, kept_for_backward
from rank_worker import BATCH, build_model
from slow import slow_pcme, slow_terms, slow_triplet
from test_loss import batch, call, grads, relative

import pcmepp_openclip as pp
from pcmepp_openclip import cli
from pcmepp_openclip.distances import tiles
from pcmepp_openclip.evaluation.columns import columns
from pcmepp_openclip.losses import TermSettings, triplet_loss
from pcmepp_openclip.losses.pcme import pcme_noise
from pcmepp_openclip.losses.pcmepp import SEED_STRIDE
from pcmepp_openclip.reports import report

OFF = {"contrastive_weight": 0.0, "match_weight": 0.0, "vib_weight": 0.0}
TRIPLETS = {  # name: (settings, epoch, whether the hardest negative counts)
    "warm-up": ({}, 1, False),
    "hardest": ({"triplet_margin": 0.3}, 2, True),
    "no warm-up": ({"triplet_warmup_epochs": 0}, 0, True),
    "all": ({"triplet_negatives": "all"}, 9, False),
}


@pytest.mark.parametrize("name, chunk", [("warm-up", 13), ("hardest", 60), ("no warm-up", 10**6), ("all", 60)])
def test_triplets_against_the_slow_form(monkeypatch, name, chunk):
    settings, epoch, hardest = TRIPLETS[name]
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)
    leaves, exact = batch(dtype=torch.float32), batch()
    loss = pp.PCMEppLoss(**OFF, triplet_weight=2.0, settings=TermSettings(**settings))
    loss.epoch = epoch
    terms = call(loss, leaves)
    assert list(terms) == ["triplet_loss"]
    margin = settings.get("triplet_margin", 0.2)
    expected = 2 * slow_triplet(*exact[:2], margin, hardest)
    assert expected > 0.05 and relative(terms["triplet_loss"], expected) < 1e-6
    for x, y in zip(grads(terms["triplet_loss"], leaves), grads(expected, exact), strict=True):
        assert relative(x, y) < 1e-5 or y.norm() == x.norm() == 0
    readable = triplet_loss(exact[0] @ exact[1].T, margin, hardest)
    assert relative(2 * readable, expected) < 1e-12


@pytest.mark.parametrize("samples, chunk, reduction", [(8, 10**6, "mean"), (8, 13 * 64, "sum"), (3, 300, "sum")])
def test_pcme_against_the_slow_form(monkeypatch, samples, chunk, reduction):
    monkeypatch.setitem(tiles.CHUNK, "cpu", chunk)
    leaves, exact = batch(dtype=torch.float32), batch()
    loss = pp.PCMEppLoss(
        **OFF, pcme_weight=3.0, settings=TermSettings(pcme_samples=samples), reduction=reduction, seed=4
    )
    loss.step = 7
    value = call(loss, leaves)["pcme_loss"]
    noise = pcme_noise(4 * SEED_STRIDE + 7, 13, samples, leaves[0])
    expected = 3 * slow_pcme(*exact[:4], *exact[5:], noise, reduction)
    assert relative(value, expected) < 1e-5
    for x, y in zip(grads(value, leaves), grads(expected, exact), strict=True):
        assert relative(x, y) < 1e-4 or y.norm() == x.norm() == 0
    loss.step = 8
    assert call(loss, leaves)["pcme_loss"] != value  # new noise


def test_pcme_never_holds_the_distances_of_all_samples(monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**14)
    leaves, loss = batch(n=64, dtype=torch.float32), pp.PCMEppLoss(**OFF, pcme_weight=1.0)
    with kept_for_backward() as kept, LargestTensor() as largest:
        grads(call(loss, leaves)["pcme_loss"], leaves)
    assert largest.elements <= 2**14 < 64 * 64 * 64
    assert sum(kept.values()) < 64 * 64 * 64


def test_triplets_never_hold_all_cosines(monkeypatch):
    monkeypatch.setitem(tiles.CHUNK, "cpu", 2**12)
    leaves, loss = batch(n=512, dtype=torch.float32), pp.PCMEppLoss(**OFF, triplet_weight=1.0)
    with kept_for_backward() as kept, LargestTensor() as largest:
        grads(call(loss, leaves)["triplet_loss"], leaves)
    assert largest.elements <= 2 * 2**12 < 512 * 512  # of a chunk; the means are 512 x 8
    assert sum(kept.values()) < 512 * 512


def test_pcme_of_points_is_a_match_probability_of_their_distance():
    """Where all variances vanish, samples are the means: the loss is that of sigmoid(b - a |mu_v - mu_t|)."""
    v, t, lv, lt, s, a, b = batch(dtype=torch.float32)
    points = [v, t, lv.detach() - 40, lt.detach() - 40, s, a, b]
    value = call(pp.PCMEppLoss(**OFF, pcme_weight=1.0), points)["pcme_loss"]
    p = (b - a * torch.cdist(v, t)).sigmoid()
    expected = torch.nn.functional.binary_cross_entropy(p, torch.eye(13))
    assert relative(value, expected) < 1e-5


@pytest.mark.parametrize("variance", [-1.0, -200.0])
def test_the_means_only_are_csd_without_variances(variance):
    """Matching and pseudo-positives by `euclidean` are those of CSD for variances of zero, and train no variance."""
    leaves = batch(dtype=torch.float32, logvar=variance)
    weights = {**OFF, "match_weight": 1.0, "pp_weight": 0.1}
    only_means = call(pp.PCMEppLoss(distance="euclidean", **weights), leaves)
    zero = [*leaves[:2], leaves[2] - 200, leaves[3] - 200, *leaves[4:]]
    by_csd = call(pp.PCMEppLoss(**weights), zero)
    for name, value in by_csd.items():
        assert relative(only_means[name], value) < 1e-5, name
        for x, y in zip(grads(only_means[name], leaves), grads(value, leaves), strict=True):
            assert relative(x, y) < 1e-4 or y.norm() == x.norm() == 0
    assert all(x.norm() == 0 for x in grads(sum(only_means.values()), leaves)[2:4])


# Ranks and accumulation: real processes through the gradients of a step, see test_ranks.py.

BASELINES = {
    "triplet warm-up": {"weights": {**OFF, "triplet_weight": 2.0}},
    "triplet": {"weights": {**OFF, "triplet_weight": 2.0}, "epoch": 2},
    "pcme": {"weights": {**OFF, "pcme_weight": 1.5, "vib_weight": 1e-3}, "seed": 3, "step": 11},
    "both": {"weights": {"triplet_weight": 0.5, "pcme_weight": 0.5, "pp_weight": 0.1}, "epoch": 5},
    **{
        f"by {distance}": {"weights": {**OFF, "match_weight": 2.0, "pp_weight": 0.1}, "distance": distance}
        for distance in ("euclidean", "kl", "js", "elk", "bhattacharyya", "match_probability")
    },
}
CASES = [
    {"name": f"{name} w{world} k{accum}".replace(" ", "-"), "world": world, "accum": accum, **case}
    for name, given in BASELINES.items()
    for case in [{"distance": "csd", "form": "paper", **given, "baseline": name}]
    for world, accum in (((1, 2), (2, 1), (2, 2)) if name in ("triplet", "pcme") else ((2, 2),))
]


@pytest.fixture(scope="module")
def results(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    (folder / "cases.json").write_text(json.dumps(CASES))
    assert ranks.run(2, [folder], module="rank_worker") == [0, 0], ranks.log.read_text()[-3000:]
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in CASES}


@functools.cache
def one_process(baseline, world, accum):
    """The weighted terms of the whole batch by the slow forms, and their gradients by parameter."""
    parts = torch.arange(BATCH).reshape(accum, world, -1)
    order = parts.transpose(0, 1).flatten()  # of the batch of all ranks, by which noise is drawn
    case = {"distance": "csd", "epoch": 0, "seed": 0, "step": 0, **BASELINES[baseline]}
    model, images, texts = build_model("paper")
    out = model(images, texts)
    gaussians = [out[key] for key in ("image_features", "text_features", "image_logvar", "text_logvar")]
    s, a, b = (out[key].mean() for key in ("clip_scale", "match_scale", "match_shift"))
    four = slow_terms(*gaussians, s, a, b, distance=case["distance"])
    found = dict(zip(("contrastive", "match", "pp", "vib"), four, strict=True))
    found["triplet"] = slow_triplet(*gaussians[:2], 0.2, hardest=case["epoch"] >= 2)
    noise = pcme_noise(case["seed"] * SEED_STRIDE + case["step"], BATCH, 8, gaussians[0])[:, order.argsort()]
    found["pcme"] = slow_pcme(*gaussians, a, b, noise)
    weights = {**{name: term.weight for name, term in pp.LOSSES.items()}}
    weights |= {key.removesuffix("_weight"): weight for key, weight in case["weights"].items()}
    terms = {f"{name}_loss": weights[name] * value for name, value in found.items() if weights[name]}
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(sum(terms.values()), parameters, materialize_grads=True)
    return {name: value.item() for name, value in terms.items()}, dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ranks_and_accumulation_give_the_loss_of_one_process(case, results):
    terms, gradients = one_process(case["baseline"], case["world"], case["accum"])
    got = results[case["name"]]
    assert {name: value.item() for name, value in got["terms"].items()} == pytest.approx(terms, rel=2e-5)
    for name, grad in got["grads"].items():
        error = (grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-7)
        assert error < 1e-4, f"{name}: {error:.1e}"


# `pcmepp train` and `pcmepp eval`.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), shards=2, samples=16)


def train(data, folder, name, *flags):
    argv = """train --model PCMEpp-tiny --train-num-samples 32 --dataset-type webdataset --batch-size 8 --workers 0
    --precision fp32 --warmup 2 --lr 1e-3 --log-every-n-steps 1 --train-means-by all"""
    return cli.main([*argv.split(), "--train-data", data, "--logs", str(folder), "--name", name, *flags])


def history(folder, name):
    lines = (folder / name / "checkpoints/history.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def test_a_resumed_run_has_the_same_warm_up_and_noise(data, tmp_path):
    flags = ["--triplet-weight", "1", "--triplet-warmup-epochs", "1", "--pcme-weight", "1", "--match-weight", "0"]
    flags += ["--contrastive-weight", "0", "--accum-freq", "2", "--save-frequency", "1"]
    assert train(data, tmp_path, "run", *flags, "--epochs", "2") == 0
    whole = history(tmp_path, "run")
    (tmp_path / "run/checkpoints/epoch_2.pt").unlink()
    assert train(data, tmp_path, "run", *flags, "--epochs", "2", "--resume", "latest") == 0
    assert len((tmp_path / "run/checkpoints/history.jsonl").read_text().splitlines()) == 4 + 2
    resumed = history(tmp_path, "run")
    for step, term in itertools.product((2, 3), ("triplet_loss", "pcme_loss")):
        assert resumed[step][term] == pytest.approx(whole[step][term], rel=1e-6), (step, term)
    # 15 negatives of each sample count in the first epoch, and one in the second
    assert min(whole[step]["triplet_loss"] for step in (0, 1)) > 2 * whole[2]["triplet_loss"] > 0


MISTAKES = {
    "--triplet-weight 1 --train-means-by contrastive": "depends on the means only",
    "--triplet-weight 1 --triplet-margin 0": "--triplet-margin must be positive, not 0",
    "--triplet-weight 1 --triplet-negatives half": "--triplet-negatives must be 'hardest' or 'all'",
    "--triplet-weight 1 --triplet-warmup-epochs -1": "--triplet-warmup-epochs must be a whole number",
    "--triplet-margin 0.1": "--triplet-margin needs --triplet-weight, which is 0",
    "--label-smoothing 0.5": "--label-smoothing must be at least 0 and below 0.5, not 0.5",
    "--label-smoothing 1e-4 --match-weight 0": "--label-smoothing needs --match-weight or --pp-weight",
    "--pcme-samples 4": "--pcme-samples needs --pcme-weight, which is 0",
    "--pcme-weight 1 --pcme-samples 0": "--pcme-samples must be a whole number of at least 1, not 0",
    "--triplet-weight 1 --triplet-negatives all --triplet-warmup-epochs 1": "--triplet-warmup-epochs is for",
    "--head-only --match-weight 0 --vib-weight 0 --triplet-weight 1": "--head-only has nothing to train",
}


def test_mistakes_are_one_sentence(data, tmp_path, capsys):
    for flags, words in MISTAKES.items():
        assert train(data, tmp_path, "run", *flags.split()) == 2
        sentence = capsys.readouterr().err
        assert words in sentence and sentence.count("\n") == 1


@pytest.mark.parametrize("distance", ["kl", "elk", "pcme"])  # by factors, in tiles, by samples
def test_a_model_is_validated_and_evaluated_by_what_it_was_trained_with(data, tmp_path, distance, monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")
    flags = ["--distance", distance]
    if distance == "pcme":
        flags = ["--pcme-weight", "1", "--pcme-samples", "4", "--match-weight", "0", "--contrastive-weight", "0"]
    flags += ["--val-data", data, "--val-num-samples", "32", "--match-logit", "learned", "--epochs", "1"]
    assert train(data, tmp_path, "run", *flags) == 0
    column = "match_probability" if distance == "pcme" else distance
    validated = json.loads((tmp_path / "run/checkpoints/results.jsonl").read_text())
    assert 0 <= validated[f"{column}/image_to_text_R@1"] <= 1 and "image_to_text_R@1" in validated
    write_retrieval(tmp_path / "scenes")
    evaluated = ["eval", "--model", "PCMEpp-tiny", "--pretrained", str(tmp_path / "run/checkpoints/epoch_1.pt")]
    evaluated += ["--retrieval", str(tmp_path / "scenes"), "--workers", "0", "--out", str(tmp_path / "out")]
    assert not cli.main([*evaluated, "--distances", "euclidean"])
    metrics = json.loads((tmp_path / "out/results.json").read_text())["retrieval"]["scenes"]["metrics"]
    found = {name.split("/")[0] for name in metrics if name.endswith("/image_to_text_R@1")}
    entailment = {"entailment"} if distance != "pcme" else set()  # without InfoNCE its scale is not trained
    assert found == {"csd", "wasserstein", column, "euclidean"} | entailment
    assert any(name.startswith("entailment/") for name in validated) == bool(entailment)
    assert metrics["euclidean/image_to_text_R@1"] == metrics["image_to_text_R@1"]
    assert f"captions/{column}_R@1/miss_AUROC" in metrics


def test_the_match_probability_of_a_model_is_by_its_own_scale_and_shift():
    weights = {"pcme_weight": 1.0, "match_weight": 0.0}
    model = build_model()[0]
    model.pcmepp_cfg = pp.PCMEppCfg(1, None, pcme_samples=4, weights=weights)
    own = columns(model, 10.0)["match_probability"]
    assert (own.scale, own.shift, own.samples) == (2.0, 3.0, 4)
    model.pcmepp_cfg = pp.PCMEppCfg(1, None, distance="match_probability")  # whose a and b are of the logit of it
    assert columns(model, 10.0)["match_probability"] is pp.DISTANCES["match_probability"]


def test_a_model_is_ranked_by_what_it_was_trained_with_and_by_no_scale_that_is_not_trained():
    model, others = build_model()[0], [name for name, x in pp.DISTANCES.items() if not x.ranked_by_default]
    off = {"contrastive_weight": 0.0}
    for cfg, entailment in (
        *(({"distance": name}, True) for name in others),
        (off, False),
        ({**off, "match_logit": "siglip"}, True),
        ({**off, "match_weight": 0.0, "pcme_weight": 1.0}, False),
    ):
        model.pcmepp_cfg = pp.PCMEppCfg.parse({"head_layers": 1, "init_logvar_bias": None, **cfg})
        names = set(columns(model, 10.0))
        assert ("entailment" in names) == entailment, cfg
        assert {"cosine", "csd", "wasserstein", cfg.get("distance", "csd")} <= names, cfg
        assert "entailment" in columns(model, 10.0, ["entailment"])  # where it is asked for
    assert len(others) > 4


def test_evaluation_refuses_distances_that_it_cannot_rank_by(tmp_path, capsys):
    write_retrieval(tmp_path / "scenes")
    rest = ["--retrieval", str(tmp_path / "scenes"), "--out", str(tmp_path / "out"), "--distances"]
    assert cli.main(["eval", "--model", "PCMEpp-tiny", *rest, "kullback"]) == 2
    assert "--distances: Unknown distance 'kullback'" in capsys.readouterr().err
    assert cli.main(["eval", "--model", "PCMEpp-tiny", *rest, "kl"]) == 2
    assert "--distances needs trained log-variances, which PCMEpp-tiny lacks" in capsys.readouterr().err
