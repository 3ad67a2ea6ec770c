"""However a run ends, all of its processes end within seconds. Real processes of Python, since what used to hang came
after `main`: at the end of the interpreter."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from drawn_shards import write_shards
from helpers import REPO
from watching import children, log_of, wait_for

from pcmepp_openclip.runs import checkpoints, lock

ONE = [sys.executable, "-m", "pcmepp_openclip.cli", "train"]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
TWO += ["pcmepp_openclip.train"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), shards=8, samples=16)


@pytest.fixture
def flags(data, tmp_path):
    """Of an endless run of epochs with 128 samples each; further flags win."""

    def flags(*more, name="run"):
        out = ["--model", "PCMEpp-tiny", "--train-data", data, "--train-num-samples", "128", "--dataset-type"]
        out += ["webdataset", "--batch-size", "8", "--epochs", "1000", "--workers", "1", "--precision", "fp32"]
        out += ["--warmup", "3", "--lr", "1e-3", "--log-every-n-steps", "1", "--device", "cpu"]
        return [*out, "--logs", str(tmp_path), "--name", name, *map(str, more)]

    return flags


class Run:
    """A command in a session of its own, and all processes that belong to it."""

    def __init__(self, command, folder: Path):
        self.folder, self.output = folder, folder / "output"
        folder.mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(REPO), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command, cwd=REPO, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> str:
        return self.output.read_text()

    def log(self) -> str:
        return log_of(self.folder / "run")

    def until(self, condition, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said()[-3000:]
            assert time.monotonic() < end, f"waited in vain\n{self.said()[-3000:]}"
            time.sleep(0.05)

    def trains(self) -> None:
        self.until(lambda: self.log().count("Train Epoch: 0") >= 3)

    def alive(self) -> list[int]:
        """Processes of the session that are no zombies, orphans included."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                pid, rest = int(stat.parent.name), stat.read_text().rsplit(")", 1)[1].split()
                if int(rest[3]) == self.process.pid and rest[0] not in "ZX":
                    found.append(pid)
        return found

    def check_ends(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, f"{self.alive()} after {seconds} s\n{self.said()[-3000:]}"
            time.sleep(0.05)
        return self.process.wait(5)

    def kill(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    runs = []

    def start(*command):
        runs.append(Run(command, tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


@pytest.mark.parametrize("how", ["loss", "worker", "INT"])
def test_a_run_that_fails_ends_with_its_workers(start, flags, how):
    run = start(*ONE, *flags("--rank-timeout-minutes", "0.05", *(["--lr", "1e30"] if how == "loss" else [])))
    run.trains() if how != "loss" else run.until(lambda: "Train Epoch: 0" in run.log())
    if how == "worker":
        os.kill(children(run.process.pid)[0], signal.SIGSTOP)
    elif how == "INT":
        os.kill(run.process.pid, signal.SIGINT)
    code = run.check_ends(20)
    last = run.said().splitlines()[-1]
    assert "Traceback" not in run.said()
    assert (code, last[:13]) == (130 if how == "INT" else 1, "pcmepp train:")
    said = {"loss": "not finite", "worker": "are stuck", "INT": "interrupted. Start again with --resume latest"}
    assert said[how] in last


def test_a_log_on_a_full_disk_says_so_once_and_hides_no_error(start, flags, tmp_path):
    """Each line of the log fails there, and logging prints a traceback for each."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/out.log").symlink_to("/dev/full")
    run = start(*ONE, *flags("--lr", "1e30", "--resume", "latest"))
    assert run.check_ends(60) == 1
    said = run.said()
    assert "Logging error" not in said and "Traceback" not in said
    assert said.count("out.log cannot be written (No space left on device)") == 1
    assert "not finite" in said.splitlines()[-1]


def test_a_rank_that_was_stopped_ends_with_the_others_under_torchrun(start, flags):
    """torchrun's own TERM does not reach it, and the two minutes that it may take to save are not waited for."""
    run = start(*TWO, *flags("--rank-timeout-minutes", "0.05"))
    run.trains()
    _, last = children(run.process.pid)[-2:]
    os.kill(last, signal.SIGSTOP)
    assert run.check_ends(40) == 1


def test_workers_die_with_a_rank_that_is_killed_even_if_they_are_stopped(ranks, flags, tmp_path):
    pids = ranks.start(1, flags())
    wait_for(lambda: in_run(tmp_path, "Train Epoch: 0"))
    (worker,) = children(pids[0])
    os.kill(worker, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    assert ranks.wait(pids) == [-signal.SIGKILL]
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or not ranks.alive(worker), 5)


def in_run(folder, text, name="run"):
    return text in log_of(folder / name)


def drying_up(data: str, folder: Path) -> str:
    """A command that gives a shard to each worker three times and then nothing: data that do not come."""
    shard, visits = data.replace("{00000..00007}", "00000"), f"{folder}/visits.$PPID"
    return f"pipe:echo >>{visits}; if [ $(wc -l <{visits}) -gt 3 ]; then sleep 1000; else cat {shard}; fi"


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_waits_for_data_says_so_and_stops_with_a_checkpoint(ranks, flags, data, tmp_path, world):
    more = ["--train-data", drying_up(data, tmp_path), "--train-data-shuffle-buffer", "4", "--batch-size", "2"]
    pids = ranks.start(world, flags(*more, "--dataset-resampled"))
    if world == 1:
        wait_for(lambda: in_run(tmp_path, "Waited 10 s for a batch of epoch 0"))
    else:
        wait_for(lambda: sum(len(path.read_text()) > 3 for path in tmp_path.glob("visits.*")) == world)
    workers = [child for pid in pids for child in children(pid)]
    # those that have printed all and wait to be read to their end are done
    commands = [command for worker in workers for command in children(worker) if ranks.alive(command)]
    assert len(commands) == world
    os.kill(pids[0], signal.SIGTERM)
    start = time.monotonic()
    assert ranks.wait(pids) == [75] * world
    assert time.monotonic() - start < 15
    step = int(re.search(r"step (\d+)", (tmp_path / "run/stopped").read_text())[1])
    path = checkpoints.newest_good(tmp_path / "run/checkpoints")
    assert step > 0 and checkpoints.load(path)["training"]["step"] == step
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in commands), 5)


def limit_files(pid, size):
    """A disk that is full, for one process: no file of it may grow beyond `size` bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("how", ["at the end", "on TERM", "for a while"])
def test_a_run_whose_last_state_cannot_be_saved_has_failed(ranks, flags, tmp_path, how):
    run = tmp_path / "run"
    os.truncate(ranks.log, 0)  # what earlier tests of this process have printed counts towards the limit of its size
    more = ["--resume", "latest", "--epochs", "2", "--save-retry-minutes", "1" if how == "for a while" else "0.02"]
    pids = ranks.start(1, flags(*more))
    wait_for(lambda: in_run(tmp_path, "Train Epoch: 0"))
    limit_files(pids[0], 10**6)
    if how == "on TERM":
        os.kill(pids[0], signal.SIGTERM)
    if how == "for a while":
        wait_for(lambda: in_run(tmp_path, "is the last state of the run: trying again"))
        limit_files(pids[0], resource.RLIM_INFINITY)
        assert ranks.wait(pids) == [0] and (run / "done").read_text() == "256 samples\n"
        return
    assert ranks.wait(pids) == [1]
    assert in_run(tmp_path, "CHECKPOINT NOT SAVED") and in_run(tmp_path, "is the last state of the run: trying again")
    assert "The last state of the run could not be saved to" in ranks.log.read_text()
    assert not (run / "done").exists() and not (run / "stopped").exists()
    assert ranks.run(1, flags(*more)) == [0] and (run / "done").exists()


@pytest.mark.parametrize("world, epochs, how", [(1, 1, "KILL"), (1, 2, "KILL"), (2, 1, "TERM")])
def test_a_validation_that_was_cut_off_is_done_again(ranks, flags, data, tmp_path, world, epochs, how):
    """Killed in the last validation or in one before, and stopped in it."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    gate.touch()
    held = f"pipe:while [ -e {gate} ]; do sleep 0.1; done; cat {data.replace('{00000..00007}', '00000')}"
    more = ["--epochs", epochs, "--val-data", held, "--val-num-samples", "16", "--resume", "latest"]
    pids = ranks.start(world, flags(*more))
    wait_for(lambda: (run / "checkpoints/epoch_1.pt").exists())
    time.sleep(1)  # and the validation has begun
    for pid in pids:
        os.kill(pid, getattr(signal, f"SIG{how}"))
    assert ranks.wait(pids) == ([-9] if how == "KILL" else [75] * world)
    assert not (run / "done").exists() and (run / "stopped").exists() == (how == "TERM")
    gate.unlink()
    assert ranks.run(world, flags(*more)) == [0] * world
    assert (run / "done").read_text() == f"{128 * epochs} samples\n"
    results = [json.loads(line) for line in (run / "checkpoints/results.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in results] == list(range(1, epochs + 1))
    steps = re.findall(r"Train Epoch: (\d+) ", (run / "out.log").read_text())
    assert len(steps) == epochs * 128 // 8 // world  # nothing was trained twice
    (run / "done").unlink()  # killed before it was written
    assert ranks.run(world, flags(*more)) == [0] * world and (run / "done").exists()
    assert len((run / "checkpoints/results.jsonl").read_text().splitlines()) == epochs


def test_a_folder_is_of_one_run_at_a_time(ranks, flags, tmp_path):
    first = ranks.start(1, flags("--resume", "latest"))
    wait_for(lambda: in_run(tmp_path, "Train Epoch: 0"))
    second = ranks.start(1, flags("--resume", "latest"))
    assert ranks.wait(second) == [1]
    assert f"is in use by another run (process {first[0]} on " in ranks.log.read_text()
    assert ranks.alive(first[0])
    os.kill(first[0], signal.SIGKILL)  # which leaves nothing behind
    assert ranks.wait(first) == [-9]
    assert ranks.run(1, flags("--resume", "latest", "--epochs", "1")) == [0]


@pytest.mark.parametrize("other", ["lives", "is dead", "has long been dead", "leaves"])
def test_a_run_on_another_node_is_known_by_its_signs_of_life(tmp_path, monkeypatch, other):
    """Where the file system does not tell other nodes of locks: only what is in the file counts."""
    monkeypatch.setattr(lock, "DEAD_AFTER_S", 3.0)
    path, ended = tmp_path / lock.NAME, threading.Event()

    def sign(number):
        line = json.dumps({"host": "node7", "pid": 1, "machine": "other", "run": "x", "sign": number})
        with open(path, "r+" if path.exists() else "w") as file:
            file.write(line.ljust(lock.SIGN_BYTES))

    def live():
        for number in range(100):
            if ended.wait(0.5):
                return
            sign(number)

    sign(-1)
    thread = threading.Thread(target=live)
    if other == "lives":
        thread.start()
    if other == "has long been dead":
        os.utime(path, (time.time() - 100,) * 2)
    if other == "leaves":
        threading.Timer(0.5, lambda: path.write_text("")).start()
    start, mine = time.monotonic(), lock.FolderLock(tmp_path)
    if other == "lives":
        with pytest.raises(lock.FolderInUse, match=r"in use by another run \(process 1 on node7\)"):
            mine.take()
        ended.set()
        thread.join()
        return
    mine.take()
    waited = time.monotonic() - start
    assert {"is dead": 2 < waited < 6, "has long been dead": waited < 1, "leaves": waited < 2.5}[other]
    assert json.loads(path.read_text())["pid"] == os.getpid()
    sign(0)  # it was asleep, not dead
    mine._check()
    assert mine.lost == "process 1 on node7"
    mine.release()
    assert json.loads(path.read_text())["host"] == "node7"
