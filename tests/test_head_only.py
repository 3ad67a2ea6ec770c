"""`pcmepp train --head-only`, with and without --cache-tokens: real runs. What a cache holds, and
when it may be used, is in test_cache.py."""

import json
import os
import re
import shutil
import signal

import open_clip
import pytest
import torch
from drawn_shards import write_csv, write_shards
from helpers import make_model, mini_config
from watching import wait_for

from pcmepp_openclip.models.pcmepp import is_pcmepp_parameter
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train

SHARDS, SAMPLES = 8, 16


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def data(place):
    pattern = write_shards(place / "shards", SHARDS, SAMPLES)
    (place / "shards/sizes.json").write_text(json.dumps({f"{i:05d}.tar": SAMPLES for i in range(SHARDS)}))
    return pattern


@pytest.fixture(scope="module")
def weights(place):
    path = place / "start.pt"
    torch.save(make_model("PCMEpp-tiny").state_dict(), path)
    return path


def flags(data, folder, *more, name="run", model="PCMEpp-tiny"):
    out = ["--model", model, "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "8", "--lr", "1e-2"]
    out += ["--epochs", "2", "--workers", "1", "--precision", "fp32", "--warmup", "3", "--log-every-n-steps", "1"]
    return [str(x) for x in [*out, "--head-only", "--logs", folder, "--name", name, *more]]


@pytest.fixture
def run(data, tmp_path, capfd):
    """Runs `pcmepp train --head-only` in this process; gives the exit code and what it logged."""

    def run(*more, name="run", **kwargs):
        code = train.main(flags(data, tmp_path, *more, name=name, **kwargs))
        log = tmp_path / name / "out.log"
        return code, log.read_text() if code == 0 else capfd.readouterr().err

    return run


def state_of(folder, epoch=2):
    return checkpoints.load(folder / f"checkpoints/epoch_{epoch}.pt")["state_dict"]


def losses(log):
    return [float(x) for x in re.findall(r"\bLoss: ([-+.\deinfa]+) \(", log)]


def moved(before: dict, after: dict) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


# --- What is trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_the_branch_moves_and_the_towers_do_not(run, weights, tmp_path, cached):
    code, log = run("--pretrained", weights, *(["--cache-tokens", tmp_path / "tokens"] if cached else []))
    assert code == 0 and len(losses(log)) == 2 * SHARDS * SAMPLES // 8 and losses(log)[-1] < losses(log)[0]
    before, after = torch.load(weights, weights_only=True), state_of(tmp_path / "run")
    trained = {name for name in before if is_pcmepp_parameter(name)}
    assert {"shift", "visual.uncertainty_bias", "uncertainty_text_projection"} <= trained
    assert moved(before, after) == trained
    assert "random weights" not in log and log.count("Head only: both towers are frozen") == 1
    assert ("augmentations are off" in log) == cached
    about = checkpoints.load(tmp_path / "run/checkpoints/epoch_2.pt")["about"]
    assert about["hyperparameters"]["head_only"] is True and "tokens" not in json.dumps(about["hyperparameters"])


def test_batch_norms_and_dropout_of_the_towers_are_frozen_too(run, tmp_path):
    """A ResNet with batch norms, and a text tower whose tokens are read at its top."""
    config = mini_config(image_head="top", text_head="split")
    config["vision_cfg"] = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    config["text_cfg"] |= {"vocab_size": 49408, "context_length": 16}
    (tmp_path / "PCMEpp-resnet.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "PCMEpp-resnet.json")
    starts = {}
    for name, more in {"computed": [], "cached": ["--cache-tokens", tmp_path / "tokens"]}.items():
        code, log = run("--lr", "0", "--epochs", "1", *more, name=name, model="PCMEpp-resnet")
        assert code == 0 and "the frozen towers have random weights" in log
        starts[name] = state_of(tmp_path / name, 1)
    code, log = run("--cache-tokens", tmp_path / "tokens", name="trained", model="PCMEpp-resnet")
    assert code == 0 and "Using the cache" in log
    code, _ = run(name="augmented", model="PCMEpp-resnet")
    for name in ("trained", "augmented"):
        after = state_of(tmp_path / name)
        assert any("running_mean" in key for key in after)
        found = moved(starts["computed"], after)
        assert found and all(map(is_pcmepp_parameter, found)) and not moved(starts["computed"], starts["cached"])


FLAGS = {
    "accum": ["--accum-freq", "2"],
    "bf16": ["--precision", "amp_bf16"],
    "pure": ["--precision", "pure_bf16"],
    "checkpointing": ["--grad-checkpointing"],
}


@pytest.mark.parametrize("more", FLAGS.values(), ids=FLAGS)
def test_flags_of_open_clips_work_with_a_cache(run, weights, data, tmp_path, more):
    validation = ["--val-data", data, "--val-num-samples", "32"] if "--accum-freq" in more else []
    code, log = run("--pretrained", weights, "--epochs", "1", "--cache-tokens", tmp_path / "tokens", *more, *validation)
    steps = 8 if "--accum-freq" in more else 16
    assert code == 0 and len(losses(log)) == steps and losses(log)[-1] < losses(log)[0]
    assert ("image_to_text_R@1" in log) == bool(validation)


# --- A run that is stopped --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(ranks, data, weights, place):
    assert ranks.run(2, flags(data, place, "--pretrained", weights, "--cache-tokens", place / "tokens")) == [0, 0]
    return place


def test_a_stop_in_mid_epoch_and_a_resume_change_nothing(ranks, data, weights, tmp_path, undisturbed):
    """On two ranks, which stop after their first step, since the file `stop` is there before it."""
    shutil.copytree(undisturbed / "tokens", tmp_path / "tokens")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    more = ["--pretrained", weights, "--cache-tokens", tmp_path / "tokens", "--resume", "latest"]
    assert ranks.run(2, flags(data, tmp_path, *more)) == [75, 75]
    stopped_at = checkpoints.position(checkpoints.newest_good(tmp_path / "run/checkpoints"))
    assert (0, 0) < stopped_at < (1, 0)
    assert ranks.run(2, flags(data, tmp_path, *more, "--workers", "2")) == [0, 0]
    text = (tmp_path / "run/out.log").read_text()
    assert "with the samples that were left." in text and text.count("Using the cache") == 2
    assert not moved(state_of(undisturbed / "run"), state_of(tmp_path / "run"))


def test_a_cache_is_the_same_on_any_number_of_ranks(ranks, data, weights, tmp_path, undisturbed):
    more = ["--pretrained", weights, "--cache-tokens", tmp_path / "tokens", "--epochs", "1"]
    assert ranks.run(1, flags(data, tmp_path, *more)) == [0]
    one, two = (
        {path.name: path.read_bytes() for path in (folder / "tokens").iterdir()} for folder in (tmp_path, undisturbed)
    )
    assert one == two and len(one) == SHARDS + 1


@pytest.mark.parametrize("how", ["TERM", "KILL"])
def test_a_stop_in_the_first_pass_keeps_what_is_complete(ranks, data, weights, tmp_path, how, undisturbed):
    """The shards come from commands that take their time."""
    world = 1 if how == "KILL" else 2
    folder = data.rpartition("/")[0]
    slow = f"d=pipe:sleep 0.5; cat {folder}/{{00000..{SHARDS - 1:05d}}}.tar"
    more = ["--pretrained", weights, "--cache-tokens", tmp_path / "tokens", "--resume", "latest", "--train-data", slow]
    more += ["--train-data-sizes", f"d={folder}/sizes.json", "--epochs", "1"]
    argv, tokens = flags(data, tmp_path, *more), tmp_path / "tokens"
    pids = ranks.start(world, argv)
    wait_for(lambda: len(list(tokens.glob("0*.safetensors"))) >= 2)
    os.kill(pids[-1], getattr(signal, f"SIG{how}"))  # to one rank; all stop
    assert ranks.wait(pids) == ([-9] if how == "KILL" else [75] * world)
    assert (tmp_path / "run/stopped").exists() == (how != "KILL") and not (tmp_path / "run/stop").exists()
    begun = {path.name: path.stat().st_mtime_ns for path in tokens.glob("0*.safetensors")}
    assert 2 <= len(begun) < SHARDS
    assert ranks.run(world, argv) == [0] * world
    for path in (undisturbed / "tokens").glob("0*.safetensors"):
        assert torch.equal(*(read(folder / path.name) for folder in (tokens, undisturbed / "tokens")))
        assert path.name not in begun or begun[path.name] == (tokens / path.name).stat().st_mtime_ns
    assert "samples are there already" in (tmp_path / "run/out.log").read_text()


def read(path):
    from safetensors.torch import load_file

    return load_file(path)["image_x"]


# --- What is refused, and what a dry run says -------------------------------------------------------------


@pytest.mark.parametrize(
    "more, words",
    [
        (["--model", "ViT-B-32"], "--head-only trains a log-variance branch, which ViT-B-32 lacks"),
        (["--lock-image"], "--head-only freezes both towers: drop --lock-image."),
        (["--lock-text"], "--head-only freezes both towers: drop --lock-text."),
        (["--match-weight", "0", "--vib-weight", "0"], "--head-only has nothing to train"),
        (["--objective", "vagueness", "--cache-tokens", "DIR"], "drop --cache-tokens"),
        (["--cache-tokens", "DIR", "--dataset-resampled", "--train-num-samples", "64"], "drop --dataset-resampled"),
        (["--cache-tokens", "DIR", "--dataset-type", "synthetic"], "--cache-tokens needs shards"),
        (["--cache-tokens", "DIR", "--dataset-type", "csv", "--train-data", "CSV"], "--cache-tokens needs shards"),
        (["--cache-tokens", "DIR", "--train-data", "OTHER", "--train-num-samples", "8"], "run `pcmepp data count"),
        (["--cache-tokens", "/proc/nowhere"], "--cache-tokens /proc/nowhere cannot be written to"),
        (["--cache-tokens", "FULL"], "is neither empty nor a cache of tokens: name a new folder."),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(run, tmp_path, more, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").touch()
    (tmp_path / "csv").mkdir()
    places = {"DIR": tmp_path / "tokens", "FULL": tmp_path / "full", "CSV": write_csv(tmp_path / "csv", 8)}
    places["OTHER"] = write_shards(tmp_path / "other", 2, 8)
    code, said = run(*(places.get(word, word) for word in more))
    start, _, mistakes = said.rpartition("pcmepp train: ")  # one mistake a line, where there are several
    assert code == 2 and "pcmepp train: " not in start and words in mistakes


def test_the_objective_of_vagueness_is_a_word_for_its_flags(run, weights, tmp_path, data, capfd):
    by_flags = ["--difficulty-weight", "1", "--match-weight", "0", "--vib-weight", "0", "--caption-cut", "0.5"]
    for name, more in {
        "word": ["--objective", "vagueness"],
        "flags": [*by_flags, "--cut-images"],
        "uncut": ["--objective", "vagueness", "--caption-cut", "0"],
    }.items():
        assert run("--pretrained", weights, "--epochs", "1", *more, name=name)[0] == 0
    word, by_flags, uncut = (state_of(tmp_path / name, 1) for name in ("word", "flags", "uncut"))
    assert not moved(word, by_flags) and moved(word, uncut)
    assert moved(torch.load(weights, weights_only=True), word)
    argv = [word for word in flags(data, tmp_path, "--objective", "vagueness") if word != "--head-only"]
    assert train.main(argv) == 2 and "add --head-only" in capfd.readouterr().err


def test_a_cache_needs_frozen_towers(data, tmp_path, capsys):
    argv = [word for word in flags(data, tmp_path, "--cache-tokens", tmp_path / "c") if word != "--head-only"]
    assert train.main(argv) == 2 and not (tmp_path / "c").exists()
    assert "--cache-tokens needs --head-only" in capsys.readouterr().err


def test_a_run_stays_head_only(run, data, weights, tmp_path, capfd):
    assert run("--pretrained", weights, "--epochs", "1")[0] == 0
    argv = [word for word in flags(data, tmp_path, "--resume", "latest") if word != "--head-only"]
    assert train.main(argv) == 2
    assert "was trained with --head-only, not without --head-only" in capfd.readouterr().err


def test_a_dry_run_says_what_is_trained_and_how_large_the_cache_is(data, tmp_path, capsys):
    argv = flags(data, tmp_path, "--cache-tokens", tmp_path / "c", "--dry-run", "2")
    assert train.main(argv) == 0 and not (tmp_path / "c").exists()
    out = capsys.readouterr().out
    model = make_model("PCMEpp-tiny")
    trained = sum(p.numel() for name, p in model.named_parameters() if is_pcmepp_parameter(name))
    assert f"{trained:,} trained" in out
    image = SHARDS * SAMPLES * (17 * 64 * 2 + 64 * 4)  # 16 patches and CLS in 16 bit, and the mean
    said = f"{tmp_path / 'c'}: {image / 1e6:.1f} MB for images and at most"
    assert re.search(rf"^token cache +{re.escape(said)}", out, flags=re.MULTILINE)
