"""`pcmepp demo` at its smallest: real trainings in forked processes. The full size is test_system_demo.py."""

import json
import math
import subprocess
import sys
import tarfile
import threading
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from helpers import REPO
from matplotlib.axes import Axes
from PIL import Image

import pcmepp_openclip as pp
from pcmepp_openclip import cli
from pcmepp_openclip.ambiguity import renyi_entropy
from pcmepp_openclip.ambiguity.store import load_bank
from pcmepp_openclip.demo import command, dataset, figure, goals, measure, pages
from pcmepp_openclip.demo.drawing import render
from pcmepp_openclip.demo.scenes import fitting
from pcmepp_openclip.models.fingerprint import bank_fingerprint

SMALL = ["--size", "256", "--steps", "2"]
SIZES = [(command, "HELD_OUT", 60), (command, "ZEROSHOT", 24), (measure, "HELD_OUT", 60), (measure, "BANK", 200)]


@pytest.fixture(scope="module", autouse=True)
def _trainings_are_forked(ranks):
    """A training is started by a process that has imported everything; its output goes to the log of that process."""
    one_at_a_time = threading.Lock()

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "pcmepp_openclip.train"]
        with one_at_a_time:
            return SimpleNamespace(returncode=ranks.run(1, command[3:])[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
        yield


@pytest.fixture(scope="module")
def runs(_trainings_are_forked, tmp_path_factory):
    """The folders of two runs: of the seeds 3 and 4, and of seed 4 alone."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SIZES:
            patch.setattr(module, name, value)
        for name, flags in (("one", ["--seed", "3", "--seeds", "2"]), ("two", ["--seed", "4", "--seeds", "1"])):
            assert cli.main(["demo", *SMALL, *flags, "--out", str(folder / name)]) == 0
    return folder / "one", folder / "two"


def found(folder):
    return json.loads((folder / "demo.json").read_text())


def test_the_same_seed_gives_the_same_numbers(runs):
    one, two = map(found, runs)
    assert one["seeds"] == [3, 4] and two["seeds"] == [4] and one["steps"] == 2
    assert one["numbers"]["4"] == two["numbers"]["4"] != one["numbers"]["3"]


def test_each_target_has_its_spread_by_both_estimators(runs):
    one = found(runs[0])
    by_name = {target["name"]: target for target in one["targets"]}
    assert set(by_name) == {prefix + goal.name for goal in goals.GOALS for prefix in ("", "bank/")}
    for goal in goals.GOALS:
        for name in (goal.name, f"bank/{goal.name}"):
            values = [one["numbers"][seed][name] for seed in ("3", "4")]
            target = by_name[name]
            assert target["mean"] == pytest.approx(sum(values) / 2)
            assert (target["min"], target["max"]) == (min(values), max(values))
            assert target["reached"] == sum(map(goal.reached, values))


def test_the_exported_folder_is_the_trained_model_of_the_first_seed_with_its_bank(runs):
    out = runs[0]
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{out / 'model'}")
    assert isinstance(model, pp.PCMEppCLIP) and model.pcmepp_cfg.match_logit == "tied"
    trained = torch.load(out / "seed-3/run/checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    bank = load_bank(out / "model/bank.safetensors", bank_fingerprint(model, open_clip.get_tokenizer("PCMEpp-tiny")))
    assert len(bank) == 200 and bank.scale == pytest.approx(model.logit_scale.exp().item())
    with tarfile.open(out / "data/train/00000.tar") as tar:
        image, text = (tar.extractfile(f"000007.{suffix}") for suffix in ("png", "txt"))
        with torch.inference_mode():
            mean = model.eval().encode_image(preprocess(Image.open(image))[None], normalize=True)[0]
            words = model.encode_text(open_clip.get_tokenizer("PCMEpp-tiny")([text.read().decode()]), normalize=True)[0]
    torch.testing.assert_close(bank.images_BD[7], mean, rtol=0, atol=2e-3)  # the file has half precision
    torch.testing.assert_close(bank.texts_BD[7], words, rtol=0, atol=2e-3)


def test_a_bank_fits_the_same_means_with_other_variances(tiny):
    """What it is named by is what the means depend on."""
    before = bank_fingerprint(tiny, open_clip.tokenize)
    with torch.no_grad():
        tiny.visual.uncertainty_proj.add_(1)
    assert bank_fingerprint(tiny, open_clip.tokenize) == before
    with torch.no_grad():
        tiny.visual.proj.add_(1)
    assert bank_fingerprint(tiny, open_clip.tokenize) != before


def test_the_report_says_what_was_reached(runs):
    page, one = (runs[0] / "report/index.html").read_text(), found(runs[0])
    for goal in goals.GOALS:
        assert goal.words in page
    for target in one["targets"]:
        assert f"{target['mean']:.3f} ({target['min']:.3f} to {target['max']:.3f})" in page
    assert page.count("<td>not reached (") == sum(target["reached"] < 2 for target in one["targets"])
    for name in ("captions", "images", "bins"):
        for estimator in goals.ESTIMATORS:
            assert (runs[0] / "report" / f"{name}-{estimator}.png").stat().st_size > 1000


def test_the_figure_shows_numbers_of_the_bank(runs, monkeypatch):
    """Every image and caption in it stands beside the share that the exported model and its bank give it."""
    for module, name, value in SIZES:
        monkeypatch.setattr(module, name, value)
    result = measure.result_of(command.Seed(runs[0], 3, first=True))
    held_out, bank = dataset.draw_held_out(60, 3), result.bank

    def share(mean, references, own):
        logits = bank.scale * references @ own.T
        logits.fill_diagonal_(-math.inf)
        hubness = logits.logsumexp(dim=1) - math.log(199)
        return (renyi_entropy(bank.scale * mean @ references.T - hubness).exp() / 200).tolist()

    image_share = share(result.images.mean, bank.texts_BD, bank.images_BD)
    text_share = share(result.texts.mean, bank.images_BD, bank.texts_BD)
    *shown, bars = figure.draw(result).findobj(Axes)
    by_value = {}
    for scene, value in zip(held_out.scenes, image_share, strict=True):
        by_value.setdefault(figure.percent(value), []).append(np.asarray(render(scene)))
    assert len(shown) == figure.IMAGES
    for axes in shown:
        pixels = axes.images[0].get_array()
        assert any(np.array_equal(pixels, scene) for scene in by_value[axes.get_xlabel()])
    assert shown[0].get_xlabel() == figure.percent(min(image_share))
    assert shown[-1].get_xlabel() == figure.percent(max(image_share))
    captions = [label.get_text() for label in bars.get_yticklabels()]
    assert len(set(captions)) == figure.CAPTIONS
    words = [text.get_text() for text in bars.texts]
    fits = fitting(held_out.captions, held_out.scenes)
    for caption, value, true_share in zip(captions, words[: figure.CAPTIONS], words[figure.CAPTIONS :], strict=True):
        i = [str(c) for c in held_out.captions].index(caption)
        assert value == figure.percent(text_share[i]) and true_share == figure.percent(fits[i].sum() / 60)
    assert Image.open(runs[0] / "uncertainty.png").size == (1400, 602)


def test_the_figure_of_the_readme_is_light():
    path = REPO / "docs/images/uncertainty.png"
    assert path.stat().st_size < 150_000 and Image.open(path).size == (1400, 602)
    assert (REPO / "README.md").read_text().count("docs/images/uncertainty.png") == 1


def test_training_ran_as_pcmepp_train_does(runs):
    for seed in (3, 4):
        log = (runs[0] / f"seed-{seed}/run/out.log").read_text()
        assert "Match_loss" in log and "256 usable samples" in log
        assert (runs[0] / f"seed-{seed}/run/done").exists()
    assert (runs[0] / "seed-4/train.log").exists() and not (runs[0] / "seed-3/train.log").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--size", "10"], "--size must be at least 128, not 10"),
        (["--out", "{used}"], "already holds a demo: remove it, or choose another folder with --out"),
    ],
)
def test_a_mistake_is_one_sentence(runs, args, words, capsys):
    assert cli.main(["demo", *(arg.format(used=runs[0]) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pcmepp demo: ") and error.count("\n") == 1 and words in error


def test_a_training_that_fails_is_said(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(command, "MODEL", "no-such-model")
    monkeypatch.setattr(command, "HELD_OUT", 10)
    assert cli.main(["demo", *SMALL, "--seeds", "1", "--out", str(tmp_path / "out")]) == 2
    assert "the training of seed 0 failed with exit code" in capfd.readouterr().err


def test_the_report_survives_numbers_that_do_not_exist():
    numbers = {name: math.nan for goal in goals.GOALS for name, _ in goal.references}
    numbers |= {prefix + goal.name: math.nan for goal in goals.GOALS for prefix in ("", "bank/")}
    rows = [row for row in pages.goal_rows([numbers]) if not row[0].startswith("beside")]
    assert all(row[2:] == ["nan", "not reached (0 of 1 seeds)"] * 2 for row in rows) and len(rows) == len(goals.GOALS)
