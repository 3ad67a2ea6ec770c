"""`pcmepp train` with GPO: two ranks and accumulation from the weights of a plain model, resumed, staged, evaluated."""

import json
import re
import shutil

import open_clip
import pytest
import torch
from drawn_shards import SCENES, write_shards
from eval_data import write_retrieval
from helpers import plain_config
from hub_helpers import assert_same_outputs

from pcmepp_openclip import cli
from pcmepp_openclip.hub.staging import stage
from pcmepp_openclip.runs import checkpoints


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """The folder of a run of 2 epochs, where a parameter without a gradient would be an error, and another one that was
    resumed from its first epoch."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_shards(folder / "shards", shards=2, samples=32)
    torch.manual_seed(0)
    torch.save(open_clip.CLIP(**plain_config("PCMEpp-tiny")).state_dict(), folder / "plain.pt")
    flags = ["--model", "PCMEpp-GPO-tiny", "--train-data", data, "--train-num-samples", "64", "--workers", "0"]
    flags += ["--dataset-type", "webdataset", "--batch-size", "8", "--accum-freq", "2", "--epochs", "2"]
    flags += ["--precision", "fp32", "--lr", "1e-3", "--pretrained", str(folder / "plain.pt"), "--resume", "latest"]
    flags += ["--warmup", "1", "--log-every-n-steps", "1", "--logs", str(folder)]
    assert ranks.run(2, [*flags, "--name", "run"]) == [0, 0], ranks.log.read_text()[-3000:]
    (folder / "resumed/checkpoints").mkdir(parents=True)
    shutil.copy(folder / "run/checkpoints/epoch_1.pt", folder / "resumed/checkpoints")
    assert ranks.run(2, [*flags, "--name", "resumed"]) == [0, 0], ranks.log.read_text()[-3000:]
    return folder / "run"


def test_it_learns_from_the_weights_of_a_plain_model(run):
    log = (run / "out.log").read_text()
    losses = [float(x) for x in re.findall(r"\bLoss: ([.\d]+) \(", log)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "the log-variance branch and the pooling of the means" in log
    plain = torch.load(run.parent / "plain.pt")
    trained = checkpoints.load(run / "checkpoints/epoch_2.pt")["state_dict"]
    name = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    assert 0 < (trained[name] - plain[name]).abs().max() < 0.02


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(run):
    ends = [checkpoints.load(folder / "checkpoints/epoch_2.pt") for folder in (run, run.with_name("resumed"))]
    assert "Start epoch 1" in (run.with_name("resumed") / "out.log").read_text()
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name


def test_it_is_staged_for_the_hub_and_evaluated(run, tmp_path):
    path = str(run / "checkpoints/epoch_2.pt")
    stage(run, "me/gpo", tmp_path / "staged")
    staged = open_clip.create_model(f"local-dir:{tmp_path / 'staged'}")
    assert_same_outputs(staged, open_clip.create_model("PCMEpp-GPO-tiny", pretrained=path))
    data = write_retrieval(tmp_path / "drawn", SCENES[:12])
    model = ["--model", "PCMEpp-GPO-tiny", "--pretrained", path]
    assert cli.main(["eval", *model, "--retrieval", str(data), "--out", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert results["notes"] == [] and "csd" in json.dumps(results["retrieval"])
