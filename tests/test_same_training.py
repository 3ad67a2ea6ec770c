"""`pcmepp train` and open_clip's own program are the same training: the same weights and optimizer, to the bit."""

import json

import open_clip
import pytest
import torch
from drawn_shards import write_csv
from helpers import run_python
from open_clip_train.main import main as stock_main

from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train

CASES = {
    "20 steps": [],
    "accumulation": ["--accum-freq", "2"],
    "clipping": ["--grad-clip-norm", "0.1", "--lr-scheduler", "const"],
    "cooldown": ["--lr-scheduler", "const-cooldown", "--epochs-cooldown", "1", "--lr-cooldown-power", "2"],
    "no schedule, timm": ["--skip-scheduler", "--opt", "timm/lamb", "--eps", "1e-6", "--grad-checkpointing"],
    "locked": ["--lock-image", "--lock-text", "--lock-text-freeze-layer-norm", "--precision", "bf16"],
    "validated": ["--val-data", "rows.csv"],
}
# A validation does not move the random numbers of a PCME++ model on, and those of open_clip's it does.
BOTH = [*(("PCME++", name) for name in CASES if name != "validated"), ("plain", "20 steps"), ("plain", "validated")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("rows"), 80)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Register the plain twin of PCMEpp-tiny."""
    config = open_clip.get_model_config("PCMEpp-tiny")
    del config["pcmepp_cfg"]
    path = tmp_path_factory.mktemp("configs") / "plain-tiny.json"
    path.write_text(json.dumps(config))
    open_clip.add_model_config(path)
    return "plain-tiny"


def flags_of(model, rows, folder, more):
    out = ["--model", model, "--dataset-type", "csv", "--train-data", rows, "--csv-separator", ",", "--batch-size", "8"]
    out += ["--epochs", "2", "--workers", "0", "--precision", "fp32", "--warmup", "3", "--lr", "1e-3"]
    return [*out, *(rows if flag == "rows.csv" else flag for flag in more), "--logs", str(folder), "--name"]


def check_same(ours, theirs):
    """Check that two nested values of a checkpoint are equal, tensors to the bit."""
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            check_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        for mine, other in zip(ours, theirs, strict=True):
            check_same(mine, other)
    else:
        assert ours == theirs


def check_runs(folder):
    ours = checkpoints.load(folder / "ours/checkpoints/epoch_2.pt")
    theirs = torch.load(folder / "stock/checkpoints/epoch_2.pt", weights_only=True)
    weights = {name.removeprefix("module."): tensor for name, tensor in theirs["state_dict"].items()}
    check_same(ours["state_dict"], weights)
    check_same(ours["optimizer"], theirs["optimizer"])
    assert ours["epoch"] == theirs["epoch"] == 2


@pytest.mark.parametrize("kind, case", BOTH)
def test_the_same_weights_and_optimizer(rows, plain, tmp_path, kind, case):
    flags = flags_of("PCMEpp-tiny" if kind == "PCME++" else plain, rows, tmp_path, CASES[case])
    assert train.main([*flags, "ours"]) == 0
    assert not stock_main([*flags, "stock"])
    check_runs(tmp_path)


def test_the_same_on_two_ranks(ranks, rows, tmp_path):
    flags = flags_of("PCMEpp-tiny", rows, tmp_path, [])
    assert ranks.run(2, [*flags, "ours"]) == [0, 0], ranks.log.read_text()[-3000:]
    assert ranks.run(2, [*flags, "stock"], module="stock_train") == [0, 0], ranks.log.read_text()[-3000:]
    check_runs(tmp_path)


def test_stock_main_trains_pcmepp_through_torchrun_and_the_launcher(rows, tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "--", "pcmepp_openclip"]
    flags = flags_of("PCMEpp-tiny", rows, tmp_path, ["--epochs", "1"])
    done = run_python("-m", *torchrun, "-m", "open_clip_train.main", *flags, "stock")
    assert done.returncode == 0, done.stderr
    assert "Match_loss" in done.stderr and (tmp_path / "stock/checkpoints/epoch_1.pt").exists()
    assert "RuntimeWarning" not in done.stderr
