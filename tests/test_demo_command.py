"""`pcmepp demo` at its smallest: real training in a process of its own, twice. The full size is test_system_demo.py."""

import json
import math
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
from pcmepp_openclip.demo import command, dataset, figure, measure, pages
from pcmepp_openclip.demo.drawing import render


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders and the output of two runs with the same seed."""
    folder = tmp_path_factory.mktemp("demo")
    patch = pytest.MonkeyPatch()
    patch.setattr(command, "HELD_OUT", 60)
    patch.setattr(command, "ZEROSHOT", 24)
    try:
        for name in ("one", "two"):
            assert cli.main(["demo", "--size", "256", "--steps", "2", "--seed", "3", "--out", str(folder / name)]) == 0
    finally:
        patch.undo()
    return folder / "one", folder / "two"


def test_the_same_seed_gives_the_same_numbers(runs):
    one, two = (json.loads((folder / "demo.json").read_text()) for folder in runs)
    assert one == two and one["seed"] == 3 and one["steps"] == 2
    assert set(one["reached"]) == {target.name for target in measure.GOALS}
    for name, reached in one["reached"].items():
        target = next(target for target in measure.GOALS if target.name == name)
        assert reached == target.reached(one["numbers"][name])


def test_the_exported_folder_is_the_trained_model(runs):
    out = runs[0]
    model = open_clip.create_model(f"local-dir:{out / 'model'}").eval()
    assert isinstance(model, pp.PCMEppCLIP)
    trained = torch.load(out / "run/checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_the_report_says_what_was_reached(runs):
    page = (runs[0] / "report/index.html").read_text()
    result = json.loads((runs[0] / "demo.json").read_text())
    for target in measure.GOALS:
        assert target.words in page and f"{result['numbers'][target.name]:.2f}" in page
    assert page.count("<td>not reached</td>") == sum(not reached for reached in result["reached"].values())
    for name in ("captions", "images", "bins"):
        assert (runs[0] / "report" / f"{name}.png").stat().st_size > 1000


def test_the_figure_shows_numbers_of_the_model(runs):
    """Every image and caption in it stands beside the uncertainty that the exported model gives it."""
    held_out = dataset.draw_held_out(60, 3)
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{runs[0] / 'model'}")
    tokenizer, model = open_clip.get_tokenizer("PCMEpp-tiny"), model.eval()
    with torch.inference_mode():
        images = model.encode_image_gaussian(torch.stack([preprocess(render(s)) for s in held_out.scenes]))
        texts = model.encode_text_gaussian(tokenizer(list(map(str, held_out.captions))))
    fits_MN = torch.tensor([[caption.fits(scene) for scene in held_out.scenes] for caption in held_out.captions])
    drawn = figure.draw(held_out, images, texts, SimpleNamespace(fits_MN=fits_MN))
    *shown, bars = drawn.findobj(Axes)
    by_value = {}
    for scene, u in zip(held_out.scenes, images.uncertainty.tolist(), strict=True):
        by_value.setdefault(f"{u:.3f}", []).append(np.asarray(render(scene)))
    assert len(shown) == figure.IMAGES
    for axes in shown:
        pixels = axes.images[0].get_array()
        assert any(np.array_equal(pixels, scene) for scene in by_value[axes.get_xlabel()])
    labels = [axes.get_xlabel() for axes in shown]
    assert labels == sorted(labels) and {labels[0], labels[-1]} == {
        f"{images.uncertainty.min():.3f}",
        f"{images.uncertainty.max():.3f}",
    }
    captions = [label.get_text() for label in bars.get_yticklabels()]
    assert len(set(captions)) == figure.CAPTIONS
    words = [text.get_text() for text in bars.texts]
    for caption, value, number in zip(captions, words[::2], words[1::2], strict=True):
        i = [str(c) for c in held_out.captions].index(caption)
        assert value == f"{texts.uncertainty[i]:.3f}" and number == f"fits {int(fits_MN[i].sum())}"
    assert Image.open(runs[0] / "uncertainty.png").size == (1400, 602)


def test_the_figure_of_the_readme_is_light():
    path = REPO / "docs/images/uncertainty.png"
    assert path.stat().st_size < 150_000 and Image.open(path).size == (1400, 602)
    assert (REPO / "README.md").read_text().count("docs/images/uncertainty.png") == 1


def test_training_ran_as_pcmepp_train_does(runs):
    log = (runs[0] / "run/out.log").read_text()
    assert "Match_loss" in log and "256 usable samples" in log
    assert (runs[0] / "run/done").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--size", "10"], "--size 10 is smaller than a batch"),
        (["--out", "{used}"], "already holds a demo: remove it, or choose another folder with --out"),
    ],
)
def test_a_mistake_is_one_sentence(runs, args, words, capsys):
    assert cli.main(["demo", *(arg.format(used=runs[0]) for arg in args)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pcmepp demo: ") and error.count("\n") == 1 and words in error


def test_a_training_that_fails_is_said(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(command, "train_flags", lambda args, shards: ["--model", "no-such-model"])
    monkeypatch.setattr(command, "HELD_OUT", 10)
    assert cli.main(["demo", "--size", "128", "--steps", "1", "--out", str(tmp_path / "out")]) == 2
    assert "training failed with exit code" in capfd.readouterr().err


def test_the_report_survives_numbers_that_do_not_exist():
    section = pages._targets({target.name: math.nan for target in measure.GOALS})
    assert all(row[-1] == "not reached" and row[1] == "nan" for row in section.rows)
