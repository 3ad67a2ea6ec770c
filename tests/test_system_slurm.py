"""launch/slurm.sbatch on a real Slurm of two nodes: finished, preempted, at its time limit, cancelled, a node less."""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from drawn_shards import write_shards

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
LAUNCH = HERE.parent / "launch"
SAMPLES, BATCH = 256, 8


class Cluster:
    """The cluster of tests/support/cluster, its jobs, and the shards that they train on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.data = write_shards(folder / "shards", shards=8, samples=SAMPLES // 8)
        self.call("start")

    def call(self, verb: str, *command: str) -> str:
        # The nodes' Python is this one; the number of threads is the launch scripts' to set.
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [HERE / "support/cluster/cluster", verb, self.folder, *command],
            env={**env, "PYTHON": sys.executable, "PYTHONPATH": str(HERE.parent)},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def run(self, *command: str) -> str:
        return self.call("run", *command)


class Job:
    """A job of launch/slurm.sbatch on both nodes, in a run folder named after the test."""

    def __init__(self, cluster: Cluster, name: str, epochs: int, *flags: str, options=(), gpus=1, launch=LAUNCH):
        self.cluster, self.name, self.epochs, self.ranks = cluster, name, epochs, 2 * gpus
        self.logs = cluster.folder / "logs"
        command = ["sbatch", "--parsable", "--nodes", "2", "--gpus-per-node", str(gpus), "--output", f"{name}.log"]
        command += [*options, str(launch / "slurm.sbatch"), "--model", "PCMEpp-tiny", "--train-data"]
        command += [cluster.data, "--train-num-samples", str(SAMPLES), "--dataset-type", "webdataset"]
        command += ["--batch-size", str(BATCH), "--epochs", str(epochs), "--save-frequency", str(epochs)]
        command += ["--workers", "1", "--precision", "fp32", "--device", "cpu", "--warmup", "3", "--lr", "1e-3"]
        command += ["--log-every-n-steps", "1", "--local-loss", "--gather-with-grad", "--logs", str(self.logs)]
        self.id = cluster.run(*command, "--name", name, *flags)

    @property
    def state(self) -> str:
        return self.cluster.run("squeue", "--noheader", "--states", "all", "--format", "%T", "--jobs", self.id)

    @property
    def output(self) -> str:
        """What the batch shell and the ranks said, at every start."""
        path = self.cluster.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(epoch, samples of it) of every step in the run's own log."""
        path = self.logs / self.name / "out.log"
        found = re.findall(r"Train Epoch: (\d+) \[ *(\d+)/", path.read_text() if path.exists() else "")
        return [(int(epoch), int(samples)) for epoch, samples in found]

    def until(self, condition, what: str, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.state not in ("FAILED", "TIMEOUT"), f"{self.state}\n{self.output[-6000:]}"
            assert time.monotonic() < end, f"not {what}, but {self.state}\n{self.output[-6000:]}"
            time.sleep(0.5)

    def freeze(self) -> None:
        """Hold the ranks in the middle of training: what a test waits for then comes soon enough on any machine."""
        self.until(lambda: len(self.steps) >= 3, "training")
        self.cluster.run("scancel", "--signal", "STOP", f"{self.id}.0")

    def thaw(self) -> None:
        self.cluster.run("scancel", "--signal", "CONT", f"{self.id}.0")

    def start_again(self) -> None:
        """What Slurm does by itself, two minutes after a job was queued again."""
        self.until(lambda: self.state == "PENDING", "queued again")
        time.sleep(3)  # a start within the second of the end is refused: the job's credential is revoked
        self.cluster.run("scontrol", "update", f"job={self.id}", "StartTime=now")

    def check_done(self, starts: int) -> None:
        """Every step was done once, in order, in one run folder, and the job knows that it is done."""
        self.until(lambda: self.state == "COMPLETED", "done")
        size = BATCH * self.ranks
        whole = [(epoch, samples) for epoch in range(self.epochs) for samples in range(size, SAMPLES + 1, size)]
        assert self.steps == whole
        run = self.logs / self.name
        assert (run / "done").read_text() == f"{self.epochs * SAMPLES} samples\n"
        assert (run / f"checkpoints/epoch_{self.epochs}.pt").exists()
        says = re.findall(
            r"launch: job (\d+), start (\d+): (\d+) nodes, (\d+) ranks on each, run folder (.*)", self.output
        )
        assert says == [(self.id, str(i), "2", str(self.ranks // 2), str(run)) for i in range(starts)]
        assert self.output.count("Resuming within the epoch at batch") == (starts - 1) * self.ranks


WATCH = """
import os, sys
if "LOCAL_RANK" in os.environ and "pcmepp_openclip.train" in sys.orig_argv:
    from pathlib import Path
    import watched_train
    watched_train.watch(Path(os.environ["WATCHED"]))
"""


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
    cluster = Cluster(folder)
    yield cluster
    cluster.call("stop")
    shutil.rmtree(folder)


def test_a_launch_folder_with_a_space_and_a_validation_that_was_cut_off(cluster):
    """All ranks are killed in the last validation; the same command then validates, and the job is done."""
    launch = shutil.copytree(LAUNCH, cluster.folder / "my launch")
    gate = cluster.folder / "gate"
    gate.touch()
    shard = cluster.data.split("{")[0] + "00000.tar"
    held = f"pipe:while [ -e {gate} ]; do sleep 0.1; done; cat {shard}"
    flags = ("--val-data", held, "--val-num-samples", "32")
    job = Job(cluster, "space", 1, *flags, launch=launch)
    job.until(lambda: (job.logs / "space/checkpoints/epoch_1.pt").exists(), "in its validation")
    cluster.run("scancel", "--signal", "KILL", f"{job.id}.0")
    job.until(lambda: "not done: requeued" in job.output, "killed")
    gate.unlink()
    job.start_again()
    job.until(lambda: job.state == "COMPLETED", "done")
    assert (job.logs / "space/done").exists() and (job.logs / "space/checkpoints/results.jsonl").exists()


def test_nodes_sh_on_each_node(cluster):
    job = cluster.run(
        *("sbatch", "--parsable", "--nodes", "2", "--ntasks-per-node", "1", "--output", "nodes.log", "--wrap"),
        f"srun env NNODES=2 HEAD=node1 NPROC=1 LAUNCH={HERE.parent}/launch/nodes.sh LOGS={cluster.folder}/logs "
        f"NAME=nodes {HERE.parent}/launch/recipes/smoke-cpu.sh",
    )
    end = time.monotonic() + 180
    while cluster.run("squeue", "--noheader", "--jobs", job) and time.monotonic() < end:
        time.sleep(0.5)
    output = (cluster.folder / "nodes.log").read_text()
    assert (cluster.folder / "logs/nodes/done").exists() and "Rank 1 of 2 on cpu" in output, output


def test_a_preempted_run_goes_on_by_itself(cluster):
    job = Job(cluster, "preempted", 3)
    job.freeze()  # Slurm wakes it up to tell it
    cluster.run("sbatch", "--partition", "high", "--nodes", "2", "--exclusive", "--output", "high.log", "--wrap=true")
    job.until(lambda: "preempted: waiting until Slurm ends this job" in job.output, "stopped")
    assert 3 <= len(job.steps) < 3 * 16 and (job.logs / "preempted/stopped").exists(), job.output[-6000:]
    job.start_again()
    job.check_done(starts=2)


def test_a_time_limit_is_only_a_pause_of_two_ranks_on_each_node(cluster):
    job = Job(cluster, "limit", 4, options=["--time", "10", "--signal", "B:USR2@20"], gpus=2)
    job.freeze()
    minutes, seconds = map(int, cluster.run("squeue", "--noheader", "--format", "%M", "--jobs", job.id).split(":"))
    limit = minutes + (1 if seconds < 25 else 2)  # the signal, 20 s before that, is yet to come
    cluster.run("scontrol", "update", f"job={job.id}", f"TimeLimit={limit}")
    job.until(lambda: "USR2: asking the run to save and exit" in job.output, "told of its limit")
    job.thaw()
    job.until(lambda: "not done: requeued" in job.output, "stopped")
    assert 3 <= len(job.steps) < 4 * 8 and (job.logs / "limit/stopped").exists(), job.output[-6000:]
    cluster.run("scontrol", "update", f"job={job.id}", "TimeLimit=10")
    job.start_again()
    job.check_done(starts=2)


def test_what_is_cancelled_or_wrong_stays_ended(cluster):
    cancelled = Job(cluster, "cancelled", 100, "--save-every-minutes", "0.05")
    wrong = Job(cluster, "wrong", 1, "--no-such-flag")
    cancelled.until(lambda: "Saved" in cancelled.output, "training")  # enough to go on from, if it did
    cluster.run("scancel", cancelled.id)
    cancelled.until(lambda: cancelled.state == "CANCELLED", "cancelled")
    with pytest.raises(AssertionError, match="FAILED"):
        wrong.until(lambda: wrong.state == "COMPLETED", "failed")
    assert "failed without a checkpoint since it started: not requeued" in wrong.output
    time.sleep(3)
    assert cancelled.state == "CANCELLED" and "not done: requeued" not in cancelled.output


def test_a_job_that_comes_back_with_a_node_less_keeps_its_global_batch(cluster):
    """Two nodes, of which one is drained before the job is queued again: the same steps, and every sample once."""
    folder = cluster.folder / "elastic"
    write_shards(folder, shards=8, samples=SAMPLES // 8)
    (folder / "sizes.json").write_text(json.dumps({f"{i:05d}.tar": SAMPLES // 8 for i in range(8)}))
    (folder / "sitecustomize.py").write_text(WATCH)  # the launch scripts start ranks by a name of their own
    path = f"{folder}:{HERE}/support:{HERE.parent}"
    options = ["--nodes", "1-2", "--export", f"ALL,PYTHONPATH={path},WATCHED={folder}/watched"]
    flags = ["--train-data", f"{folder}/*.tar", "--global-batch-size", str(2 * BATCH)]
    job = Job(cluster, "elastic", 1, *flags, options=options)
    job.freeze()
    cluster.run("scontrol", "update", "nodename=node2", "state=drain", "reason=lost")
    try:
        cluster.run("scancel", "--signal", "USR2", "--batch", job.id)
        job.until(lambda: "USR2: asking the run to save and exit" in job.output, "asked")
        job.thaw()
        job.until(lambda: "not done: requeued" in job.output, "stopped")
        before = len(job.steps)
        job.start_again()
        job.until(lambda: job.state == "COMPLETED", "done")
    finally:
        cluster.run("scontrol", "update", "nodename=node2", "state=resume")
    assert 3 <= before < len(job.steps) == SAMPLES // (2 * BATCH), job.output[-6000:]
    assert job.steps == [(0, samples) for samples in range(2 * BATCH, SAMPLES + 1, 2 * BATCH)]
    seen = collections.Counter(
        tuple(token for token in row if token)
        for path in (folder / "watched").iterdir()
        for line in path.read_text().splitlines()
        for row in json.loads(line)
    )
    assert len(seen) == SAMPLES // 2 and set(seen.values()) == {2}  # the shards have every caption twice
    assert (
        f"launch: job {job.id}, start 1: 1 ranks instead of 2: accumulation keeps the global batch of 16" in job.output
    )
    assert job.output.count("The global batch is kept on 1 ranks instead of 2: 16 (8 per rank x 1 ranks x 2 acc") == 1
    assert (job.logs / "elastic/done").read_text() == f"{SAMPLES} samples\n"
