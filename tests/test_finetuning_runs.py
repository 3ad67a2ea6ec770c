"""Runs with all flags for fine-tuning at once, on two ranks and with accumulation, and what they leave behind."""

import itertools
import json
import os
import re
import signal

import open_clip
import pytest
import torch
from drawn_shards import write_shards
from watching import in_middle, log_of, wait_for

from pcmepp_openclip import cli
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train
from pcmepp_openclip.training import loop
from pcmepp_openclip.training.checkpoint import NotSaved
from pcmepp_openclip.training.monitor import Monitor

EPOCHS = 4
RECIPE = [
    *("--opt", "timm/adamp", "--opt-kwargs", "wd_ratio=0.1", "nesterov=false", "--grad-clip-norm", "0.5"),
    *("--layer-decay", "0.7", "--image-lr-multiplier", "0.5", "--text-lr-multiplier", "0.8", "--accum-freq", "2"),
    *("--freeze-image-epochs", "2", "--freeze-text-epochs", "1", "--warm-up-after-freeze", "--lr-scheduler", "const"),
    *("--lr-drop-epochs", "2", "--swa-start-epoch", "2", "--save-best", "--wd", "0.1"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    shards = write_shards(tmp_path_factory.mktemp("shards"), shards=4, samples=12)
    assert cli.main(["data", "count", shards]) == 0
    return shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def flags(data, folder):
    def flags(*more, name):
        out = ["--model", "PCMEpp-tiny", "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "4"]
        out += ["--epochs", str(EPOCHS), "--workers", "1", "--precision", "fp32", "--warmup", "0", "--lr", "1e-3"]
        out += ["--val-data", data, "--val-num-samples", "48", "--log-every-n-steps", "1", "--resume", "latest"]
        return [*out, "--logs", str(folder), "--name", name, *RECIPE, *more]

    return flags


@pytest.fixture(scope="module")
def whole(ranks, flags, folder):
    """The folder of a run that was never interrupted: 3 steps in each of 4 epochs."""
    assert ranks.run(2, flags(name="whole")) == [0, 0], ranks.log.read_text()[-3000:]
    return folder / "whole"


def load(run, epoch):
    return checkpoints.load(run / f"checkpoints/epoch_{epoch}.pt")


def part_of(name):
    """The part of PCMEpp-tiny that a parameter belongs to, by its name."""
    tower = "image" if name.startswith("visual.") else "text"
    own = "uncertainty_" in name or name in ("visual.proj", "text_projection", "logit_scale", "shift")
    return "heads" if own else tower


def test_a_frozen_tower_stays_as_it_is_and_so_does_the_state_of_the_optimizer(whole):
    ends = [load(whole, epoch) for epoch in range(1, EPOCHS + 1)]
    names = [name for name in ends[0]["state_dict"] if name != "attn_mask"]
    changed = {"image": [], "text": [], "heads": []}
    for before, after in itertools.pairwise(ends):
        same = {name: torch.equal(before["state_dict"][name], after["state_dict"][name]) for name in names}
        for part, found in changed.items():
            found.append({not same[name] for name in names if part_of(name) == part})
    assert changed == {"image": [{False}, {True}, {True}], "text": [{True}] * 3, "heads": [{True}] * 3}
    model = open_clip.create_model("PCMEpp-tiny")
    sizes = {part: sum(part_of(n) == part for n, _ in model.named_parameters()) for part in changed}
    trained = [len(end["optimizer"]["state"]) for end in ends]
    assert trained == [sizes["heads"], sizes["heads"] + sizes["text"], *[sum(sizes.values())] * 2]


def test_learning_rates_are_logged_and_drop(whole):
    log = log_of(whole)
    rates = [float(rate) for rate in re.findall(r"Train Epoch: .* LR: ([\d.]+) ", log)]
    assert rates == [1e-3] * 6 + [1e-4] * 6
    logged = dict(re.findall(r"Learning rate of ([\w -]+): ([\d.e-]+), ", log))
    assert logged["heads"] == "0.001" and logged["image block 1"] == "0.000245" and len(logged) == 11
    groups = load(whole, EPOCHS)["optimizer"]["param_groups"]
    assert {(group["wd_ratio"], group["nesterov"]) for group in groups} == {(0.1, False)}
    assert {group["lr"] for group in groups if group["name"] == "image block 1"} == {1e-4 * 0.5 * 0.7**2}


def test_the_averaged_weights_are_validated_and_can_be_used(whole, data, capsys, tmp_path):
    path = whole / "checkpoints/swa.pt"
    saved, ends = checkpoints.load(path), [load(whole, epoch)["state_dict"] for epoch in (3, 4)]
    for name, tensor in saved["state_dict"].items():
        torch.testing.assert_close(tensor, (ends[0][name] + ends[1][name]) / 2, rtol=1e-6, atol=1e-7)
    results = [json.loads(line) for line in (whole / "checkpoints/results.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in results] == [1, 2, 3, 4]  # those of the average are in its own file
    argv = ["eval", "--model", "PCMEpp-tiny", "--pretrained", str(path), "--workers", "0", "--retrieval", f"d={data}"]
    assert cli.main([*argv, "--out", str(tmp_path / "eval")]) == 0
    found = json.loads((tmp_path / "eval/results.json").read_text())["retrieval"]["d"]["metrics"]
    for key in ("csd/RSUM", "image_to_text_mean_rank", "csd/text_to_image_mean_rank"):
        assert saved["metrics"][key] == pytest.approx(found[key])
    assert saved["metrics"]["image_to_text_mean_rank"] != results[-1]["image_to_text_mean_rank"]
    cli.main(["push", str(path), "me/averaged", "--dry-run"])
    assert "Step 12: 4 epochs" in capsys.readouterr().out
    assert checkpoints.newest_good(whole / "checkpoints").name == f"epoch_{EPOCHS}.pt"


def test_the_best_checkpoint_is_that_of_the_best_validation(whole):
    results = [json.loads(line) for line in (whole / "checkpoints/results.jsonl").read_text().splitlines()]
    best = max(results, key=lambda line: (line["csd/RSUM"], -line["epoch"]))
    saved = checkpoints.load(whole / "checkpoints/best.pt")
    assert saved["epoch"] == best["epoch"] and saved["rsum"] == pytest.approx(best["csd/RSUM"])
    expected = load(whole, best["epoch"])["state_dict"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved["state_dict"].items())


def flat(value, path=""):
    """The tensors and plain values of a checkpoint by their path."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value}


def test_a_run_that_is_stopped_and_killed_ends_as_one_that_was_not(ranks, flags, folder, whole):
    """Stopped after the first step, with frozen towers, and killed in the last epoch, with averaged weights."""
    run = folder / "broken"
    run.mkdir()
    (run / "stop").touch()
    assert ranks.run(2, flags(name="broken")) == [75, 75]
    assert checkpoints.position(checkpoints.newest_good(run / "checkpoints")) == (0, 2)
    pids = ranks.start(2, flags(name="broken"))
    wait_for(lambda: in_middle(run, epoch=3, samples=16))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert set(ranks.wait(pids)) == {-9} and not (run / "done").exists()
    assert ranks.run(2, flags(name="broken")) == [0, 0]
    for name in (f"epoch_{EPOCHS}.pt", "swa.pt", "best.pt"):
        ours, theirs = (flat(checkpoints.load(each / "checkpoints" / name)) for each in (run, whole))
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"/name"}:
            if isinstance(ours[key], torch.Tensor):
                assert torch.equal(ours[key], theirs[key]), (name, key)
            elif not key.startswith(("/training/rng", "/training/epoch_rng")):
                assert ours[key] == theirs[key], (name, key)


def test_a_resumed_run_keeps_its_groups_and_refuses_weights_alone(flags, whole, capfd):
    best = str(whole / "checkpoints/best.pt")
    more = ("--epochs", "5", "--resume")
    assert train.main(flags(*more, "latest", "--layer-decay", "0.9", name="whole")) == 2
    assert "was trained with --layer-decay 0.7, not with --layer-decay 0.9" in capfd.readouterr().err
    assert train.main(flags(*more, "latest", "--swa-start-epoch", "1", name="whole")) == 2
    assert "--swa-start-epoch 1: the checkpoint to resume has an average that starts" in capfd.readouterr().err
    assert train.main(flags(*more, best, name="other")) == 2
    assert f"--resume {best} holds weights alone" in capfd.readouterr().err


def test_freezing_is_the_same_as_no_gradients(data, tmp_path, monkeypatch):
    """With clipping, whose norm depends on which gradients there are."""
    common = ["--model", "PCMEpp-tiny", "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "8"]
    common += ["--epochs", "2", "--workers", "0", "--precision", "fp32", "--warmup", "0", "--lr", "1e-3"]
    common += ["--grad-clip-norm", "0.1", "--logs", str(tmp_path), "--lr-scheduler", "const", "--name"]
    assert train.main([*common, "ours", "--freeze-image-epochs", "1"]) == 0
    stock = open_clip.create_model_and_transforms

    def frozen(*args, **kwargs):
        model, *transforms = stock(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = part_of(name) != "image"
        return model, *transforms

    monkeypatch.setattr(open_clip, "create_model_and_transforms", frozen)
    assert train.main([*common, "slow"]) == 0
    ours, slow = (load(tmp_path / name, 1)["state_dict"] for name in ("ours", "slow"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in slow.items())
    ends = [load(tmp_path / name, 2)["state_dict"]["visual.conv1.weight"] for name in ("ours", "slow")]
    assert not torch.equal(*ends)  # the second epoch trains the tower


def test_the_loss_is_warmed_up_after_the_freeze(data, tmp_path, monkeypatch):
    """What is differentiated, as a share of the loss, in every pass: three make a step, and four steps an epoch."""
    shares, full, forward = [], [], Monitor.forward
    backward = loop.backward

    def noted_loss(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        full.append(sum(value.item() for value in out.values()))
        return out

    def noted_backward(loss, scaler):
        shares.append(loss.item() / full[-1])
        backward(loss, scaler)

    monkeypatch.setattr(Monitor, "forward", noted_loss)
    monkeypatch.setattr(loop, "backward", noted_backward)
    argv = ["--model", "PCMEpp-tiny", "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "4"]
    argv += ["--epochs", "3", "--workers", "0", "--precision", "fp32", "--warmup", "0", "--accum-freq", "3"]
    argv += ["--freeze-text-epochs", "1", "--warm-up-after-freeze", "--logs", str(tmp_path), "--name", "run"]
    assert train.main(argv) == 0
    expected = [1.0] * 12 + [share for share in (0.25, 0.5, 0.75, 1.0) for _ in range(3)] + [1.0] * 12
    assert shares == pytest.approx(expected, rel=1e-5)


def test_a_full_disk_fails_the_run_and_the_resumed_one_saves(data, tmp_path, monkeypatch):
    """Only the averaged weights cannot be written."""
    argv = ["--model", "PCMEpp-tiny", "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "16"]
    argv += ["--epochs", "1", "--workers", "0", "--precision", "fp32", "--warmup", "0", "--logs", str(tmp_path)]
    argv += ["--val-data", data, "--val-num-samples", "48", "--swa-start-epoch", "0", "--resume", "latest"]
    stock = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda checkpoint, path: path.name != "swa.pt" and stock(checkpoint, path))
    with pytest.raises(NotSaved, match=r"swa\.pt could not be saved, .* start again with --resume latest"):
        train.main([*argv, "--name", "run"])
    assert not (tmp_path / "run/done").exists() and not (tmp_path / "run/checkpoints/swa.pt").exists()
    monkeypatch.undo()
    assert train.main([*argv, "--name", "run"]) == 0 and (tmp_path / "run/done").exists()
    saved, end = checkpoints.load(tmp_path / "run/checkpoints/swa.pt"), load(tmp_path / "run", 1)
    assert all(torch.equal(tensor, end["state_dict"][name]) for name, tensor in saved["state_dict"].items())
