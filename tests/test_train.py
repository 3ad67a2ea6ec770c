"""`pcmepp train`: real runs on small shards, one rank."""

import functools
import json
import math
import re

import open_clip
import pytest
import torch
from drawn_shards import write_shards

import pcmepp_openclip as pp
from pcmepp_openclip import cli
from pcmepp_openclip.training import command as train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def run(data, tmp_path, capfd):
    """Runs `pcmepp train` in this process; gives the exit code and what it logged."""

    def run(*flags, name="run", model="PCMEpp-tiny", samples=64, **options):
        options = {"batch-size": 16, "epochs": 1, "workers": 0, "precision": "fp32", "lr": 1e-3, **options}
        argv = ["--model", model, "--train-data", data, "--train-num-samples", str(samples), "--dataset-type"]
        argv += ["webdataset", "--logs", str(tmp_path), "--name", name, "--log-every-n-steps", "1", "--warmup", "2"]
        for flag, value in options.items():
            argv += [f"--{flag}", str(value)]
        code = train.main([*argv, *flags])
        return code, (tmp_path / name / "out.log").read_text() if (tmp_path / name).exists() else capfd.readouterr().err

    run.folder = tmp_path
    return run


def losses(log, term="Loss"):
    return [float(x) for x in re.findall(rf"\b{term}: ([-+.\deinfa]+) \(", log)]


FLAGS = {  # accumulation, clipping, locked towers and timm's optimizers are in test_same_training
    "compile": ["--torchcompile"],
    "amp_bf16": ["--precision", "amp_bf16", "--match-weight", "2", "--vib-weight", "0", "--pp-weight", "0.1"],
    "tensorboard": ["--report-to", "tensorboard", "--reduction", "sum", "--grad-checkpointing"],
    "fine-tuning": [
        *("--train-means-by", "all", "--contrastive-weight", "0", "--match-weight", "2"),
        *("--pp-weight", "0.1", "--vib-weight", "1e-4"),
    ],
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_flag_of_open_clips_works(run, flags, monkeypatch):
    """Machine code takes a minute to compile, and test_compilers compares it with what is compiled here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    code, log = run(*flags)
    assert code == 0 and ("Compiling the model" in log) == ("--torchcompile" in flags)
    assert len(losses(log)) == 4 and all(math.isfinite(x) for x in losses(log))
    assert len(re.findall("PCME\\+\\+ step .* match_scale: .* variance_share: ", log)) == 4
    if "--match-weight" in flags:
        assert losses(log, "Pp_loss")
        off = "Contrastive_loss" if "--contrastive-weight" in flags else "Vib_loss"
        assert {x for x in ("Contrastive_loss", "Match_loss", "Vib_loss") if not losses(log, x)} == {off}
    if "--report-to" in flags:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.folder / "run" / "tensorboard"))
        events.Reload()
        for tag in ("train/match_loss", "train/match_scale", "train/image_uncertainty", "train/image_agreement"):
            assert [event.step for event in events.Scalars(tag)] == [0, 1, 2, 3], tag


def test_initial_values_come_from_the_flags_else_the_config(run):
    flags = ["--match-logit", "learned", "--init-match-scale", "3", "--init-match-shift", "-2"]
    code, log = run(*flags, "--init-logvar-bias", "-6", lr=0)
    assert code == 0 and " match_scale: 3.0000 match_shift: -2.0000 " in log
    state = torch.load(run.folder / "run/checkpoints/epoch_1.pt", weights_only=True)["state_dict"]
    assert torch.equal(state["visual.uncertainty_bias"], torch.full((64,), -6.0))
    code, log = run(name="config", lr=0)
    assert code == 0 and " match_scale: 3.5714 match_shift: 7.1429 " in log  # a quarter of 1 / 0.07, and 2a


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--siglip"], "--siglip"),
        (["--distill-model", "ViT-B-32", "--distill-pretrained", "openai"], "--distill-model"),
        (["--remote-sync", "s3://x"], "does not serve --remote-sync: drop it, or train by open_clip's own program"),
        (["--vib-weight", "-1"], "--vib-weight"),
        (["--reduction", "max"], "reduction"),
        (["--model", "ViT-B-32", "--init-match-scale", "2"], "--init-match-scale"),
        (["--model", "PCMEpp-ViT-B16"], "PCMEpp-ViT-B-16"),
        (["--resume", "/nowhere/epoch_1.pt"], "--resume /nowhere/epoch_1.pt: there is no such file"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["--accum-freq", "0"], "--accum-freq must be at least 1, not 0"),
        (["--rank-timeout-minutes", "0"], "--rank-timeout-minutes must be above 0 and at most 525600, not 0"),
        (["--rank-timeout-minutes", "inf"], "--rank-timeout-minutes must be above 0 and at most 525600, not inf"),
        (["--save-retry-minutes", "1e300"], "--save-retry-minutes must be between 0 and 525600, not 1e300"),
        (["--warmup", "-1"], "--warmup must be at least 0, not -1"),
        (["--wd", "-0.1"], "--wd must be at least 0, not -0.1"),
        (["--grad-clip-norm", "-1"], "--grad-clip-norm must be more than 0, not -1"),
        (["--dry-run", "0"], "--dry-run must be at least 1, not 0"),
        (["--train-data", ""], "There is nothing to train on: give --train-data"),
        (["--trian-data", "x"], "there is no flag --trian-data; did you mean '--train-data'?"),
        (["--match-wieght", "2"], "there is no flag --match-wieght; did you mean '--match-weight'?"),
        (["--xyzzy"], "there is no flag --xyzzy; see pcmepp train --help."),
        (["--epochs", "many"], "--epochs invalid int value: 'many'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(run, flags, word):
    code, said = run(*flags)
    assert code == 2 and word in said and said.count("\n") == 1


@pytest.mark.parametrize("kind", ["webdataset", "synthetic"])
def test_an_epoch_without_a_step_is_refused(run, capfd, kind):
    code, _ = run("--dataset-type", kind, "--accum-freq", "5")
    assert code == 2 and not list(run.folder.glob("run/checkpoints/*.pt")) and not (run.folder / "run/done").exists()
    assert "--accum-freq 5 is more than the 4 batches of an epoch" in capfd.readouterr().err
    assert run("--dataset-type", kind, "--accum-freq", "4", name="whole")[0] == 0


def test_a_run_that_has_nothing_left_to_train_is_no_success(run, capfd):
    assert run(epochs=2)[0] == 0
    checkpoint = run.folder / "run/checkpoints/epoch_2.pt"
    code, _ = run("--resume", str(checkpoint), name="other", epochs=1)
    assert code == 2 and "nothing is left to train; raise --epochs" in capfd.readouterr().err
    assert not (run.folder / "other/done").exists()


@pytest.mark.parametrize("precision, said", [("amp", True), ("fp32", False), ("amp_bf16", False)])
def test_half_precision_on_a_cpu_is_said_at_start(capfd, tmp_path, precision, said):
    """open_clip's default is made for GPUs: on a CPU it looks like a run that hangs."""
    flags = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8"]
    train.prepare([*flags, "--precision", precision, "--logs", str(tmp_path)])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pcmepp train: ")]
    assert len(lines) == said
    assert all(f"--precision {precision}" in line and "--precision fp32" in line for line in lines)


def test_help_lists_both_kinds_of_flags(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "--vib-weight" in out and "--grad-checkpointing" in out


def test_a_loss_that_is_not_finite_stops_the_run(run, monkeypatch):
    run(epochs=1)
    stock = pp.PCMEppLoss.forward

    def broken(self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        broken.calls += 1
        return {**out, "match_loss": out["match_loss"] * math.nan} if broken.calls == 3 else out

    broken.calls = 0
    monkeypatch.setattr(pp.PCMEppLoss, "forward", broken)
    with pytest.raises(RuntimeError, match=r"not finite at step 6 .*match_loss nan.*epoch_1\.pt"):
        run("--resume", "latest", "--log-every-n-steps", "4", epochs=2)
    assert not (run.folder / "run/checkpoints/epoch_2.pt").exists()


def test_fp16_skips_steps_that_are_not_finite_up_to_a_limit(run, monkeypatch):
    stock, bad = pp.PCMEppLoss.forward, {1}

    def broken(self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        return {name: term * math.nan for name, term in out.items()} if self.step in bad else out

    monkeypatch.setattr(pp.PCMEppLoss, "forward", broken)
    code, log = run("--log-every-n-steps", "2", precision="amp", samples=16, **{"batch-size": 4})
    assert code == 0 and log.count("The loss was not finite at step 1 (contrastive_loss nan") == 1
    assert log.count("the step was skipped") == 1
    saved = torch.load(run.folder / "run/checkpoints/epoch_1.pt", weights_only=True)
    skipped = 16 - math.log2(saved["scaler"]["scale"])  # maybe also the first one, while the scale is searched for
    assert skipped >= 1 and {int(x["step"]) for x in saved["optimizer"]["state"].values()} == {4 - skipped}
    assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())
    bad |= set(range(4, 24))
    with pytest.raises(
        RuntimeError, match=r"not finite at step .* loss scale of --precision amp fell to .*epoch_\d\.pt"
    ):
        run("--resume", "latest", precision="amp", samples=16, epochs=6, **{"batch-size": 4})
    assert not (run.folder / "run/checkpoints/epoch_6.pt").exists()


def test_warnings_of_a_run_that_goes_wrong(run):
    """The log has them once; test_health has the sentences, and what needs none."""
    _, log = run("--init-logvar-bias", "2", lr=0)
    assert log.count("The variances dominate the means") == 1
    assert len(re.findall(r"WARNING \|.* The var", log)) == 1  # a run of four steps is too short for any other
    learned = ("--match-logit", "learned", "--init-match-scale")
    _, log = run(*learned, "5", "--distance", "bhattacharyya", name="saturated", lr=0)
    assert log.count("starts saturated: by --distance bhattacharyya no pair of the batch is a match") == 1
    _, log = run(*learned, "7", name="scale", epochs=2, lr=0)  # s starts at 14.3
    assert log.count("match_ratio in the log, is 0.98") == 1 and "--match-logit tied" in log
    _, log = run("--match-logit", "tied", "--init-logvar-bias", "-8", name="tied", lr=0)
    assert " match_ratio: 0.50000 " in log and "lose its meaning" not in log
    assert "saturated" not in log and "The variance" not in log


def test_validation_by_cosine_and_by_csd(run, data):
    code, _ = run("--val-data", data, "--val-num-samples", "128", epochs=1)
    assert code == 0
    row = json.loads((run.folder / "run/checkpoints/results.jsonl").read_text())
    for direction in ("image_to_text", "text_to_image"):
        for name in ("R@1", "R@5", "R@10", "median_rank", "mean_rank"):  # open_clip's names
            assert f"{direction}_{name}" in row and f"csd/{direction}_{name}" in row
    assert 0 <= row["csd/RSUM"] <= 600
    for samples in ("images", "captions"):
        for hit in ("cosine_R@1", "csd_R@1"):
            assert f"{samples}/{hit}/bin_correlation" in row and 0 <= row[f"{samples}/{hit}/miss_AUROC"] <= 1
            assert -1 <= row[f"{samples}/{hit}/S_10_levels"] <= 1 and f"{samples}/{hit}/S_10_levels_low" not in row
            assert 0 <= row[f"{samples}/{hit}/bank/miss_AUROC"] <= 1
    model = open_clip.create_model("PCMEpp-tiny", pretrained=str(run.folder / "run/checkpoints/epoch_1.pt"))
    assert isinstance(model, pp.PCMEppCLIP) and row["num_samples"] == 128
    # By the entailment score the images alone are worth a line, and `pcmepp eval` finds the same on the same data.
    assert [key for key in row if "entailment" in key] == [f"entailment/image_to_text_R@{k}" for k in (1, 5, 10)]
    flags = ["--pretrained", str(run.folder / "run/checkpoints/epoch_1.pt"), "--workers", "0"]
    flags += ["--retrieval", f"d={data}", "--out", str(run.folder / "eval")]
    assert cli.main(["eval", "--model", "PCMEpp-tiny", *flags]) == 0
    got = json.loads((run.folder / "eval/results.json").read_text())["retrieval"]["d"]["metrics"]
    for key in ("image_to_text_R@5", *(f"entailment/image_to_text_R@{k}" for k in (1, 5, 10))):
        assert row[key] == pytest.approx(got[key]), key
