"""--global-batch-size: what follows from it on any number of ranks, and a run that keeps it when ranks come and go."""

import collections
import json
import math
import random
import re
from unittest import mock

import pytest
from drawn_shards import write_shards
from shard_maker import Words, to_tensor
from watched_train import captions_of

from pcmepp_openclip.data.arguments import rows_per_image
from pcmepp_openclip.data.build import make_loader_spec
from pcmepp_openclip.encode.token_loader import EpochPlan
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train
from pcmepp_openclip.training.config import make_parser
from pcmepp_openclip.training.global_batch import split

RUN = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "4096", "--warmup", "1"]


def slow_split(samples, ranks, at_most, multiple_of):
    """Every way to divide the samples, the one with the largest batch."""
    ways = [
        (size, accum)
        for size in range(1, samples + 1)
        for accum in range(1, samples // size + 1)
        if size * ranks * accum == samples and size % multiple_of == 0 and (at_most is None or size <= at_most)
    ]
    return max(ways, default=None)


def test_the_largest_batches_that_make_the_global_batch():
    dice, kinds = random.Random(0), collections.Counter()
    for _ in range(400):
        ranks, multiple_of = dice.choice([1, 2, 3, 4, 6, 8]), dice.choice([1, 1, 1, 2, 5])
        samples, at_most = dice.randrange(1, 240), dice.choice([None, dice.randrange(1, 40)])
        wanted = slow_split(samples, ranks, at_most, multiple_of)
        try:
            found = split(samples, ranks, at_most, multiple_of)
        except ValueError as error:
            kinds["refused"] += 1
            assert wanted is None or 2 * wanted[0] < at_most, f"{samples, ranks, at_most, multiple_of}: {error}"
            continue
        kinds["accumulated" if found[1] > 1 else "at once"] += 1
        assert found == wanted
    assert min(kinds.values()) > 30, kinds


@pytest.mark.parametrize(
    "samples, ranks, at_most, multiple_of",
    [
        *[(1000, 6, None, 1), (3, 8, None, 1), (24, 2, None, 5), (254, 2, 64, 1), (2 * 5 * 7, 2, 15, 5)],
        *[(1_000_000_007, 1, 64, 1), (999_999_999_989, 1, 64, 1)],  # primes, for which a loop did not return
    ],
)
def test_a_refusal_names_values_that_work(samples, ranks, at_most, multiple_of):
    with pytest.raises(ValueError, match="choose") as refused:
        split(samples, ranks, at_most, multiple_of)
    message = str(refused.value).split("choose ")[1]
    sizes, _, totals = message.rpartition("--global-batch-size ")
    for total in re.findall(r"\d+", totals):
        assert math.prod(split(int(total), ranks, at_most, multiple_of)) * ranks == int(total)
    for size in re.findall(r"\d+", sizes):
        assert split(samples, ranks, int(size), multiple_of)[0] == int(size)
    assert re.findall(r"\d+", message)


def prepared(*flags):
    args, _ = train.prepare([*RUN, *flags])
    return args.batch_size, args.accum_freq


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ([], (128, 1)),
        (["--batch-size", "64"], (64, 2)),  # the value of the default, but given
        (["--batch-size=64"], (64, 2)),
        (["--batch-s", "64"], (64, 2)),
        (["--batch-size", "100"], (64, 2)),
        (["--batch-size", "4096"], (128, 1)),
    ],
)
def test_what_the_command_line_gives_and_what_follows(flags, wanted, capsys):
    assert prepared("--global-batch-size", "1024", "--dry-run", "8", *flags) == wanted
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("global batch"))
    assert f"1,024 ({wanted[0]} per rank x 8 ranks x {wanted[1]} accumulated batches)" in line
    assert ("forward twice" in line and "4/3" in line) == (wanted[1] > 1)


def test_without_it_nothing_follows():
    assert prepared("--dry-run", "8") == (64, 1)
    assert prepared("--dry-run", "8", "--batch-size", "5", "--accum-freq", "3") == (5, 3)


def test_the_number_of_ranks_is_that_of_the_launcher(monkeypatch, tmp_path):
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert prepared("--global-batch-size", "64", "--batch-size", "8", "--logs", str(tmp_path)) == (8, 2)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--global-batch-size", "64", "--accum-freq", "1"], "drop it, or --global-batch-size"),  # as by default
        (["--global-batch-size", "0"], "between 1 and 1000000000000"),
        (["--global-batch-size", "9" * 40], "between 1 and 1000000000000"),
        (["--global-batch-size", "63"], "choose 62 or 64"),
        (["--global-batch-size", "64", "--batch-size", "0"], "--batch-size must be at least 1"),
    ],
)
def test_mistakes(flags, words, capsys):
    assert train.main([*RUN, "--dry-run", "2", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """96 samples with captions of their own, counted."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "sizes.json").write_text(json.dumps({f"{i:05d}.tar": 16 for i in range(6)}))
    return write_shards(folder, shards=6, samples=16)


def spec_of(shards, ranks, *flags):
    argv = ["--model", "PCMEpp-tiny", "--train-data", shards, "--dataset-type", "webdataset", "--dry-run", str(ranks)]
    with mock.patch.object(train, "dry_run"):  # which would forecast the memory
        return train.prepare([*argv, "--warmup", "0", "--workers", "1", *flags])


@pytest.mark.parametrize("total", [24, 36, 60, 96])
@pytest.mark.parametrize("resampled", [[], ["--dataset-resampled"]])
def test_an_epoch_has_the_same_steps_on_any_number_of_ranks(counted, total, resampled):
    """ceil(samples / global batch), with accumulation as without; without the flag, accumulation loses a step."""
    for ranks, most in ((1, 100), (1, 6), (2, 3), (3, 4), (4, 100), (6, 2)):
        flags = ["--global-batch-size", str(total), "--batch-size", str(most), *resampled]
        args, spec = spec_of(counted, ranks, *flags)
        loader = make_loader_spec(spec, to_tensor, Words(), rank=0, ranks=ranks)
        assert loader.batches % args.accum_freq == 0 and loader.batches // args.accum_freq == -(-96 // total)
        plan = EpochPlan(96, spec.filled(96), args.batch_size, 0, ranks, seed=0, position=lambda: (0, 0))
        assert plan.batches == loader.batches
    args, spec = spec_of(counted, 2, "--batch-size", "3", "--accum-freq", str(total // 6))
    loader = make_loader_spec(spec, to_tensor, Words(), rank=0, ranks=2)
    assert loader.batches // args.accum_freq == 96 // total


def test_an_epoch_smaller_than_the_global_batch_is_refused(counted):
    with pytest.raises(ValueError, match="96 samples is smaller than the global batch of 97: lower --global-b"):
        spec_of(counted, 1, "--global-batch-size", "97")


def test_captions_of_an_image_stay_together(tmp_path):
    flags = ["--captions", "all", "--captions-per-image", "3", "--multi-positives", "--contrastive-weight", "0"]
    assert rows_per_image(make_parser().read(flags)) == 3
    assert split(48, 2, 14, 3) == (12, 2)
    with pytest.raises(ValueError, match="3 captions per image"):
        split(20, 2, None, 3)
    with pytest.raises(ValueError, match="--batch-size 2 is less than the 3 captions"):
        split(48, 2, 2, 3)


def test_ranks_come_and_go_and_the_steps_stay(ranks, counted, tmp_path):
    """Two ranks, then three, then one: each start but the last is stopped after its first step."""
    run = tmp_path / "run"
    run.mkdir()
    argv = ["--model", "PCMEpp-tiny", "--train-data", counted, "--dataset-type", "webdataset", "--epochs", "2"]
    argv += ["--workers", "1", "--precision", "fp32", "--warmup", "3", "--log-every-n-steps", "1", "--resume", "latest"]
    argv += ["--global-batch-size", "24", "--batch-size", "8", "--logs", tmp_path, "--name", "run"]
    for world, code in ((2, 75), (3, 75), (1, 0)):
        if code:
            (run / "stop").touch()
        assert ranks.run(world, argv, module="watched_train") == [code] * world, ranks.log.read_text()[-3000:]
    seen, log = captions_of(tmp_path / "watched"), (run / "out.log").read_text()
    assert len(seen) == 96 and set(seen.values()) == {2}, "once per epoch"
    assert (run / "done").read_text() == "192 samples\n"
    steps = re.findall(r"Train Epoch: (\d) \[ *(\d+)/96", log)
    assert steps == [(str(epoch), str(samples)) for epoch in (0, 1) for samples in (24, 48, 72, 96)]
    assert log.count("Global batch: 24 (") == 3
    assert log.count("The global batch is kept on 3 ranks instead of 2: 24 (8 per rank x 3 ranks x 1 acc") == 1
    assert log.count("The global batch is kept on 1 ranks instead of 3: 24 (8 per rank x 1 ranks x 3 acc") == 1
    end = checkpoints.load(run / "checkpoints/epoch_2.pt")
    assert end["training"]["step"] == 8
    about = end["about"]
    assert about["hyperparameters"]["global_batch_size"] == 24 and about["hyperparameters"]["accum_freq"] == 3
    assert [change["world_size"] for change in about["changes"]] == [[2, 3], [3, 1]]


def test_a_global_batch_that_changes_with_the_ranks_is_said(ranks, counted, tmp_path):
    (tmp_path / "run").mkdir()
    argv = ["--model", "PCMEpp-tiny", "--train-data", counted, "--dataset-type", "webdataset", "--epochs", "1"]
    argv += ["--workers", "1", "--precision", "fp32", "--warmup", "3", "--resume", "latest", "--batch-size", "12"]
    argv += ["--logs", tmp_path, "--name", "run"]
    (tmp_path / "run/stop").touch()
    assert ranks.run(2, argv) == [75, 75]
    (tmp_path / "run/stop").touch()
    assert ranks.run(1, argv) == [75]
    log = (tmp_path / "run/out.log").read_text()
    assert "and was 24 (12 per rank x 2 ranks x 1 accumulated batches): give --global-batch-size 24 to keep it." in log
