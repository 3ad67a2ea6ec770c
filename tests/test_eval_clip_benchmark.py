"""clip_benchmark, run through the plugin on the same folders and weights, finds the same numbers by the mean."""

import json

import open_clip
import pytest
import torch
from drawn_shards import SCENES, draw
from eval_data import captions, write_retrieval, write_zeroshot
from helpers import REPO, run_python

import pcmepp_openclip
from pcmepp_openclip import cli
from pcmepp_openclip.reports import report


def train_a_little(steps: int = 150):
    """A model that has learnt something: the numbers of a random one are all near chance."""
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny", output_dict=True)
    tokens = open_clip.get_tokenizer("PCMEpp-tiny")([captions(scene)[i % 2] for i, scene in enumerate(SCENES)])
    pixels = torch.stack([preprocess(draw(*scene)) for scene in SCENES])
    loss, optimizer = pcmepp_openclip.PCMEppLoss(), torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(steps):
        rows = torch.randperm(len(SCENES))[:32]
        optimizer.zero_grad()
        sum(loss(**model(pixels[rows], tokens[rows, :16]), output_dict=True).values()).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """(theirs, ours) for a folder of each kind. Theirs takes a task by the name of its data, so one is flickr30k."""
    folder = tmp_path_factory.mktemp("benchmark")
    # Captions that are all different: theirs breaks ties by the order in the file, ours by a fixed random one.
    write_retrieval(folder / "flickr30k", SCENES, captions=lambda scene: captions(scene)[:2])
    write_zeroshot(folder / "shapes")
    torch.save(train_a_little().state_dict(), folder / "model.pt")
    model = ["--model", "PCMEpp-tiny", "--pretrained", str(folder / "model.pt")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")
        data = ["--retrieval", str(folder / "flickr30k"), "--zeroshot", str(folder / "shapes")]
        assert cli.main(["eval", *model, *data, "--out", str(folder / "out"), "--workers", "0"]) == 0
    ours = json.loads((folder / "out/results.json").read_text())

    command = ["-m", "pcmepp_openclip", str(REPO / "tests/support/benchmark_cli.py"), "eval", *model, "--no_amp"]
    command += ["--dataset", "wds/flickr30k", "wds/shapes", "--dataset_root", str(folder / "{dataset}")]
    command += ["--num_workers", "0", "--recall_k", "1", "5", "10", "--output", str(folder / "{dataset}.json")]
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    theirs = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("flickr30k", "shapes")}
    return theirs, ours


def test_retrieval(numbers):
    theirs, ours = numbers
    got, own = theirs["flickr30k"]["metrics"], ours["retrieval"]["flickr30k"]["metrics"]
    expected = {}
    for k in (1, 5, 10):
        expected[f"image_retrieval_recall@{k}"] = own[f"text_to_image_R@{k}"]
        expected[f"text_retrieval_recall@{k}"] = own[f"image_to_text_R@{k}"]
    assert got == pytest.approx(expected, abs=1e-6)
    assert 0.1 < got["image_retrieval_recall@5"] < 0.99 and len(set(got.values())) > 3


def test_zeroshot(numbers):
    theirs, ours = numbers
    got, own = theirs["shapes"]["metrics"], ours["zeroshot"]["shapes"]["metrics"]
    names = {"acc1": "all_prompts", "acc5": "all_prompts_top5", "mean_per_class_recall": "all_prompts_mean_per_class"}
    assert got == pytest.approx({name: own[key] for name, key in names.items()}, abs=1e-6)
    assert 0.1 < got["acc1"] < 0.99
