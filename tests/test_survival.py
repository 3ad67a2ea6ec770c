"""A run that is stopped, killed, or stalls goes on as if nothing had been. Real processes, real signals."""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from drawn_shards import write_csv, write_shards
from watched_train import captions_of
from watching import children, in_middle, log_of, wait_for

from pcmepp_openclip import cli
from pcmepp_openclip.runs import checkpoints


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), shards=8, samples=16)


@pytest.fixture
def flags(data, tmp_path):
    return make_flags(data, tmp_path)


def make_flags(data, folder):
    """Of a run of 3 epochs with 128 samples each; further flags win."""

    def flags(*more, name="run"):
        out = ["--model", "PCMEpp-tiny", "--train-data", data, "--train-num-samples", "128", "--dataset-type"]
        out += ["webdataset", "--batch-size", "8", "--epochs", "3", "--workers", "1", "--precision", "fp32"]
        out += ["--warmup", "3", "--lr", "1e-3", "--log-every-n-steps", "1", "--resume", "latest"]
        return [*out, "--logs", folder, "--name", name, *more]

    return flags


def steps_of(folder):
    """{step: (learning rate, samples of the epoch, loss)} of a run's log, the last word on each step."""
    out, epoch_steps = {}, None
    for line in log_of(folder).splitlines():
        match = re.search(r"Train Epoch: (\d+) \[ *(\d+)/(\d+) .* LR: ([\d.]+) .* Loss: ([\d.]+) \(", line)
        if match:
            epoch, samples, total, rate, loss = match.groups()
            epoch_steps = int(epoch) * int(total) + int(samples)
            out[epoch_steps] = (float(rate), int(samples), float(loss))
    return out


@pytest.fixture(scope="module")
def undisturbed(ranks, data, tmp_path_factory):
    """The folder of a run that was never stopped, by its number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for world in (1, 2):
        assert ranks.run(world, make_flags(data, folder)(name=str(world))) == [0] * world
    return lambda world: folder / str(world)


@pytest.mark.parametrize("world, how", [(1, "TERM"), (2, "USR2"), (2, "file")])
def test_a_stop_in_mid_epoch_and_a_resume_change_nothing(ranks, flags, tmp_path, undisturbed, world, how):
    pids = ranks.start(world, flags())
    run = tmp_path / "run"
    wait_for(lambda: in_middle(run))
    if how == "file":
        (run / "stop").touch()
    else:
        os.kill(pids[-1], getattr(signal, f"SIG{how}"))  # to one rank; all stop
    assert ranks.wait(pids) == [75] * world
    assert (run / "stopped").exists() and not (run / "stop").exists() and not (run / "done").exists()
    stopped_at = checkpoints.position(checkpoints.newest_good(run / "checkpoints"))
    assert stopped_at < (3, 0) and stopped_at[1] > 0  # within an epoch, some steps after the request
    assert ranks.run(world, flags()) == [0] * world
    assert (run / "done").read_text() == "384 samples\n" and not (run / "stopped").exists()
    whole, resumed = steps_of(undisturbed(world)), steps_of(run)
    assert len(whole) == 3 * 128 // 8 // world and resumed.keys() == whole.keys()
    for step, (rate, samples, loss) in whole.items():
        assert resumed[step][:2] == (rate, samples)
        assert resumed[step][2] == pytest.approx(loss, rel=1e-6), step
    ends = [checkpoints.load(folder / "checkpoints/epoch_3.pt") for folder in (undisturbed(world), run)]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.allclose(tensor, ends[1]["state_dict"][name], rtol=1e-5, atol=1e-7), name
    assert not any(name.startswith("module.") for name in ends[0]["state_dict"])


def test_another_number_of_ranks_carries_the_samples_over(ranks, flags, tmp_path):
    pids = ranks.start(2, flags())
    wait_for(lambda: in_middle(tmp_path / "run"))
    os.kill(pids[0], signal.SIGTERM)
    assert ranks.wait(pids) == [75, 75]
    assert ranks.run(1, flags()) == [0]
    log = log_of(tmp_path / "run")
    assert "Resuming on 1 ranks a run of 2" in log and (tmp_path / "run/done").read_text() == "384 samples\n"


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """128 samples with captions of their own, counted."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "sizes.json").write_text(json.dumps({f"{i:05d}.tar": 16 for i in range(8)}))
    return write_shards(folder, shards=8, samples=16)


def test_an_epoch_that_goes_on_in_other_ways_sees_every_sample_once(ranks, counted, tmp_path):
    """Four times over: other ranks, batches and seeds; each start stops behind its first step but for the last."""
    (tmp_path / "run").mkdir()
    make = make_flags(counted, tmp_path)
    files = []
    ways = [(2, 16, 0), (1, 4, 5), (1, 32, 5), (2, 2, 1)]
    for number, (world, size, seed) in enumerate(ways, 1):
        last = number == len(ways)
        if not last:
            (tmp_path / "run/stop").touch()
        argv = make("--epochs", "1", "--batch-size", str(size), "--seed", str(seed))
        assert ranks.run(world, argv, module="watched_train") == [0 if last else 75] * world
        files.append(sorted(path.name for path in (tmp_path / "run/checkpoints").glob("*.pt")))
    # The third file comes before the second by its name, and is the newest all the same.
    assert files == [["epoch_0_batch_1.pt"], ["epoch_0_batch_9.pt"], ["epoch_0_batch_2.pt"], ["epoch_1.pt"]]
    seen, log = captions_of(tmp_path / "watched"), log_of(tmp_path / "run")
    assert len(seen) == 128 and set(seen.values()) == {1}, "some were seen twice, others never"
    assert (tmp_path / "run/done").read_text() == "128 samples\n"
    assert "with the 96 samples that were left, dealt out anew (--seed 0 is now 5, --batch-size 16 is now 4" in log
    assert "with the 60 samples that were left" in log and "0 are seen again" in log


def test_a_csv_file_goes_on_with_the_samples_that_were_left(ranks, tmp_path):
    """Its order follows from the random numbers at the start of the epoch, here the second one."""
    more = ("--dataset-type", "csv", "--csv-separator", ",", "--epochs", "2", "--batch-size", "4")
    argv = make_flags(write_csv(tmp_path, 128), tmp_path)(*more)
    pids = ranks.start(1, argv, module="watched_train")
    wait_for((tmp_path / "run/checkpoints/epoch_1.pt").exists)
    (tmp_path / "run/stop").touch()
    assert ranks.wait(pids) == [75]
    assert checkpoints.newest_good(tmp_path / "run/checkpoints").name.startswith("epoch_1_batch_")
    assert ranks.run(1, argv, module="watched_train") == [0]
    seen = captions_of(tmp_path / "watched")
    assert len(seen) == 128 and set(seen.values()) == {2}


@pytest.mark.parametrize("kind", ["csv", "uncounted"])
def test_what_cannot_be_exact_is_said_with_its_number(ranks, data, tmp_path, kind):
    more = []
    if kind == "csv":
        data = write_csv(tmp_path, 128)
        more = ["--dataset-type", "csv", "--csv-separator", ","]
    make = make_flags(data, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    assert ranks.run(1, make("--epochs", "1", "--batch-size", "32", *more)) == [75]
    assert ranks.run(1, make("--epochs", "1", "--batch-size", "32", "--seed", "3", *more)) == [0]
    assert "--seed" in log_of(tmp_path / "run")
    assert "about 24 samples of this epoch are seen twice, and as many are not seen" in log_of(tmp_path / "run")


def test_shards_that_were_replaced_are_noticed(ranks, counted, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(Path(counted).parent, folder)
    make = make_flags(str(folder / Path(counted).name), tmp_path)
    (tmp_path / "run").mkdir()
    for replace in (lambda: None, lambda: shutil.copy(folder / "00003.tar", folder / "00001.tar"), recount(folder)):
        replace()
        (tmp_path / "run/stop").touch()
        assert ranks.run(1, make("--epochs", "1")) == [75]
    log = log_of(tmp_path / "run")
    assert "1 of 8 shards that were looked at do not hold what they held" in log and "00001.tar" in log
    assert "the shards or their counts are not the same: about 14 samples of this epoch are seen twice" in log


def recount(folder):
    def count_again():
        sizes = json.loads((folder / "sizes.json").read_text())
        (folder / "sizes.json").write_text(json.dumps(sizes | {"00002.tar": 12}))

    return count_again


@pytest.mark.parametrize("opt", ["adamw", "timm/lamb"])
def test_flags_of_the_optimizer_that_are_changed_on_resume_count(ranks, flags, tmp_path, capsys, opt):
    """Decay, betas and eps are in the optimizer's state, too: a resumed run goes on with those of its command line, and
    the record has what is; --init-match-scale is for the start, and the record keeps it."""
    first = f"--opt {opt} --wd 0.2 --beta1 0.9 --beta2 0.98 --eps 1e-6 --match-logit learned --init-match-scale 5"
    other = f"--opt {opt} --wd 0.05 --beta1 0.8 --beta2 0.97 --eps 1e-7 --match-logit learned --init-match-scale 7"
    last = " --skip-scheduler --lr 2e-3"  # else the schedule sets it
    (tmp_path / "run").mkdir()
    for more in (first, other + last):
        (tmp_path / "run/stop").touch()
        assert ranks.run(1, flags(*more.split())) == [75]
    checkpoint = checkpoints.load(checkpoints.newest_good(tmp_path / "run/checkpoints"))
    groups = checkpoint["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0, 0.05}
    assert {(*group["betas"], group["eps"], group["lr"]) for group in groups} == {(0.8, 0.97, 1e-7, 2e-3)}
    assert all(state["step"] == 2 for state in checkpoint["optimizer"]["state"].values() if "step" in state)
    about, log = checkpoint["about"], log_of(tmp_path / "run")
    kept = {name: about["hyperparameters"][name] for name in ("wd", "beta1", "lr", "init_match_scale")}
    assert kept == {"wd": 0.05, "beta1": 0.8, "lr": 2e-3, "init_match_scale": 5}
    assert about["changes"][0]["step"] == 1 and about["changes"][0]["wd"] == [0.2, 0.05]
    assert "Resuming at step 1, these have changed: beta1 0.8 (was 0.9)" in log
    assert "have no effect, since the weights are those of the checkpoint: init_match_scale 7.0 (was 5.0)" in log
    capsys.readouterr()
    assert cli.main(["push", str(tmp_path / "run"), "me/x", "--dry-run"]) == 0
    assert "| 1 | wd | `0.2` | `0.05` |" in capsys.readouterr().out


def test_what_a_run_is_built_of_cannot_be_changed_on_resume(ranks, flags, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/stop").touch()
    assert ranks.run(1, flags()) == [75]
    before = ranks.log.read_text()
    assert ranks.run(1, flags("--opt", "timm/lamb"))[0] in (1, 2)
    said = ranks.log.read_text().removeprefix(before)
    assert "trained with --opt adamw, not with --opt timm/lamb: give the same, or start a new run" in said


def test_a_second_signal_ends_at_once(ranks, flags, tmp_path):
    pids = ranks.start(2, flags("--epochs", "300"))
    wait_for(lambda: in_middle(tmp_path / "run", 0, 32))
    os.kill(pids[1], signal.SIGSTOP)  # so that rank 0 waits for it in vain and cannot stop in good order
    os.kill(pids[0], signal.SIGTERM)
    time.sleep(0.5)
    os.kill(pids[0], signal.SIGTERM)  # the same request once more, as from torchrun beside Slurm
    time.sleep(3.5)
    assert ranks.alive(pids[0])
    os.kill(pids[0], signal.SIGTERM)
    assert ranks.wait(pids) == [128 + signal.SIGTERM, -signal.SIGKILL]


def test_a_signal_to_the_data_workers_too_stops_in_good_order(ranks, flags, tmp_path):
    """Slurm signals all processes of a step, the workers of the ranks included."""
    pids = ranks.start(2, flags("--epochs", "300"))
    wait_for(lambda: in_middle(tmp_path / "run", 0, 32))
    workers = [child for pid in pids for child in children(pid)]
    assert workers
    for pid in workers + pids:
        os.kill(pid, signal.SIGTERM)
    assert ranks.wait(pids) == [75, 75]


def test_thirty_kills(ranks, flags, tmp_path):
    """A random rank is killed at a random moment, saves included; every restart goes on; the end is the same."""
    dice = random.Random(0)
    argv = flags("--epochs", "8", "--save-every-minutes", "0.01", "--delete-previous-checkpoint")
    run, kills, best = tmp_path / "run", 0, (0, 0)
    for _ in range(60):  # starts: one for each kill, and for each time that the run ended before its kill
        pids = ranks.start(2, argv)
        if kills < 30:
            time.sleep(dice.uniform(0.4, 2.4))  # a start takes about a second
            try:
                os.kill(dice.choice(pids), signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                pass
        codes = ranks.wait(pids)
        newest = checkpoints.newest_good(run / "checkpoints")
        reached = checkpoints.position(newest) if newest else (0, 0)
        assert reached >= best, "work that was saved is lost"
        best = reached
        if codes == [0, 0]:
            if kills >= 30:
                break
            (run / "done").unlink()
            for path in (run / "checkpoints").iterdir():  # it got through: again from the start
                path.unlink()
            best = (0, 0)
    assert kills == 30 and codes == [0, 0]
    assert (run / "done").read_text() == f"{8 * 128} samples\n"
    assert torch.load(run / "checkpoints/epoch_8.pt", weights_only=True)["training"]["samples_seen"] == 8 * 128
    assert [path.name for path in (run / "checkpoints").glob("*.pt")] == ["epoch_8.pt"]


def test_a_rank_that_hangs_ends_the_job(ranks, flags, tmp_path):
    pids = ranks.start(2, flags("--epochs", "300", "--rank-timeout-minutes", "0.05"))
    wait_for(lambda: in_middle(tmp_path / "run", 0, 32))
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    codes = ranks.wait(pids)
    # Rank 0 gave up and woke the other, which noticed it by itself or was killed by the launcher.
    assert not {0, 75} & set(codes)
    assert time.monotonic() - start < 30
