"""Rows as real runs: `pcmepp train` and `pcmepp eval` in processes of their own, and each training once.

There are two scales: drawn scenes, in minutes on a CPU, and COCO with the paper's settings. A scale gives the flags of
both commands, and the folder of the run. The name of the folder is a digest of all flags and of the data, so rows of
several tables that are trained alike are trained once, and a run with other settings or other data never takes the
place of another.

A run that fails is reported with its log; the others go on. The same command resumes what was interrupted:
a complete training is not repeated, and another one continues from its newest checkpoint.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pcmepp_openclip.demo.command import HELD_OUT, MODEL, ZEROSHOT, settings
from pcmepp_openclip.demo.dataset import SHARD, draw_held_out, write_retrieval, write_train, write_zeroshot
from pcmepp_openclip.models.convert import to_clip
from pcmepp_openclip.system.errors import RunFailed

from .tables import FLAGS, Row, Table

PYTHON = f"{shlex.quote(sys.executable)} -m"  # the launcher of one rank
START_LR, LR = "2e-3", "5e-4"  # rates of a CLIP on scenes from scratch, and of a row that starts from it
COCO_BATCH = 128
# The paper's recipe on COCO, in addition to the loss. As in the authors' code, the average has nine snapshots (epochs
# 16 to 24) and the loss is warmed up; the paper says ten (--swa-start-epoch 15) and the learning rate
# (--warm-up-after-freeze lr).
RECIPE = (
    "--pretrained openai --force-quick-gelu --epochs 25 --opt timm/adamp --opt-kwargs wd_ratio=0.1 nesterov=false "
    "--lr 5e-4 --wd 1e-4 --beta1 0.9 --beta2 0.999 --eps 1e-8 "
    "--grad-clip-norm 2 --lr-scheduler const --lr-drop-epochs 15 --warmup 0 --layer-decay 0.7 "
    "--image-lr-multiplier 0.01 --text-lr-multiplier 0.1 --freeze-image-epochs 2 --warm-up-after-freeze "
    "--captions all --caption-augment 0.2 --swa-start-epoch 16 --save-best --precision fp32"
)
TOKEN_AUGMENT = "--image-token-augment 0.2"  # for models that pool by GPO
CHECKPOINTS = {"best": "best.pt", "swa": "swa.pt"}  # file names in a run on COCO


@dataclass(frozen=True)
class Run:
    """A training and its evaluation.

    Arguments:
        folder: the folder of this run and seed.
        train: the flags of `pcmepp train`; None where an existing model is evaluated.
        evaluation: the folder of the evaluation.
        evaluate: the flags of `pcmepp eval`.
        clip: the file for the plain CLIP within the trained model, which other runs start from; else None.
        needs: the run that it starts from.
    """

    folder: Path
    train: tuple[str, ...] | None
    evaluation: Path
    evaluate: tuple[str, ...]
    clip: Path | None = None
    needs: "Run | None" = None

    @property
    def last(self) -> Path:
        """Return the checkpoint of a run of one epoch."""
        return self.folder / "run" / "checkpoints" / "epoch_1.pt"

    @property
    def results(self) -> Path:
        return self.evaluation / "results.json"


def make_run(
    folder: Path,
    train: Sequence[str] | None,
    model: str,
    pretrained: str | Path,
    data: Sequence[str],
    name: str,
    row: Row | None = None,
    clip: Path | None = None,
    needs: Run | None = None,
) -> Run:
    """Build a run of a folder. The folder of its evaluation is named by `name` and the row's flags of `pcmepp eval`."""
    flags = row.eval_flags.split() if row else []
    evaluation = folder / "-".join(["eval", name, *(word.strip("-") for word in flags)])
    evaluate = ("--model", model, "--pretrained", str(pretrained), *data, *flags, "--out", str(evaluation))
    if train is not None:
        train = (*train, "--logs", str(folder), "--name", "run", "--resume", "latest")
    return Run(folder, train, evaluation, evaluate, clip, needs)


def digest(*flags: str) -> str:
    """Return a short name for these flags."""
    return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Scenes:
    """The drawn scenes of `pcmepp demo`, and PCMEpp-tiny.

    As in the paper, every row fine-tunes a CLIP: it is trained first, from scratch with InfoNCE, once per seed.

    OUT/scenes-SIZE/seed-0/train, retrieval, zeroshot      the data
    OUT/runs/DIGEST/seed-0/run, eval-retrieval             a training and its evaluation
                          /clip.pt                         of the first training, without the log-variance branch

    Arguments:
        steps: training steps of a row that starts from a CLIP.
        start_steps: those of that CLIP, and of a row that starts from scratch.
        size: number of training pairs.
    """

    out: Path
    steps: int
    start_steps: int
    size: int
    name = "scenes"

    def data(self, seed: int) -> Path:
        return self.out / f"scenes-{self.size}" / f"seed-{seed}"

    def draw(self, seed: int) -> None:
        """Write the data of a seed, unless they are there."""
        folder = self.data(seed)
        if not (folder / "drawn").exists():
            write_train(folder / "train", self.size, seed, quiet=True)
            write_retrieval(folder / "retrieval", draw_held_out(HELD_OUT, seed))
            write_zeroshot(folder / "zeroshot", ZEROSHOT, seed)
            (folder / "drawn").touch()

    def start(self, seed: int, task: str = "retrieval") -> Run:
        """Return the training of the CLIP that rows start from; as a row of its own it is evaluated on `task`."""
        flags = [*settings(MODEL, self.start_steps, START_LR), *shlex.split(FLAGS["INFONCE"])]
        folder = self.out / "runs" / digest(*flags, str(self.size)) / f"seed-{seed}"
        return self._run(folder, flags, MODEL, folder / "clip.pt", seed, task, clip=folder / "clip.pt")

    def run(self, table: Table, row: Row, seed: int) -> Run:
        start, model, own = self.start(seed, table.task), row.scenes_model, shlex.split(row.flags)
        if not own:
            return start
        begin: list[str] = []
        if scratch := row.start == "scratch":
            flags = [*settings(model, self.start_steps, START_LR), *own]
            name = digest(*flags, str(self.size))
        else:
            short = ["--model", model, "--steps", str(self.steps), "--lr", LR]
            flags = [*(short if "--rival" in own else settings(model, self.steps, LR)), *own]
            begin = ["--pretrained", str(start.clip)]
            name = digest(*flags, start.folder.parent.name)
        folder = self.out / "runs" / name / f"seed-{seed}"
        last = folder / "run" / "checkpoints" / "epoch_1.pt"
        needs = None if scratch else start
        return self._run(folder, [*flags, *begin], model, last, seed, table.task, row=row, needs=needs)

    def _run(
        self, folder: Path, flags: list[str], model: str, checkpoint: Path, seed: int, task: str, **options: Any
    ) -> Run:
        pattern = f"{self.data(seed) / 'train'}/{{00000..{(self.size - 1) // SHARD:05d}}}.tar"
        if "--rival" in flags:
            train = [*flags, "--train-data", pattern, "--seed", str(seed)]
        else:
            train = [*flags, "--train-data", f"scenes={pattern}", "--workers", "1", "--seed", str(seed)]
            train += ["--save-every-minutes", "0", "--log-every-n-steps", "50"]
        data = ("--workers", "0", "--batch-size", "256", f"--{task}", f"{task}={self.data(seed) / task}")
        return make_run(folder, train, model, checkpoint, data, task, **options)

    def read(self, results: dict[str, Any], table: Table) -> dict[str, Any]:
        """Return the part of a results.json of `pcmepp eval` that a table reads."""
        return results[table.task][table.task]


@dataclass(frozen=True)
class Coco:
    """COCO captions with the paper's recipe, from OpenAI's CLIP.

    DIR/train/*.tar, DIR/val/*.tar         shards: launch/data/coco.sh DIR/dataset_coco.json DIR DIR
    DIR/dataset_coco.json, DIR/val2014/    Karpathy's splits and the images, for the evaluation
    OUT/runs/DIGEST/seed-0/run, eval-coco  a training and its evaluation

    Arguments:
        ranks: number of ranks that the launcher starts; the batch of 128 is divided among them.
    """

    out: Path
    folder: Path
    ranks: int = 1
    name = "coco"

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise ValueError(f"--coco-dir {self.folder}: there is no such folder.")
        for file in ("dataset_coco.json", "val2014"):
            if not (self.folder / file).exists():
                raise ValueError(f"--coco-dir {self.folder}: {file} is not in it, which the evaluation needs.")
        for shards in ("train/*.tar", "val/*.tar"):
            if not any(self.folder.glob(shards)):
                raise ValueError(
                    f"--coco-dir {self.folder}: there is no {shards} in it; make these by launch/data/coco.sh."
                )
        if COCO_BATCH % self.ranks:
            raise ValueError(f"--ranks {self.ranks} must divide the paper's batch of {COCO_BATCH}.")

    def draw(self, seed: int) -> None:
        """Do nothing: the images are photographs."""

    def run(self, table: Table, row: Row, seed: int) -> Run:
        data = ("--coco", str(self.folder / "dataset_coco.json"), "--coco-images", str(self.folder))
        if not row.flags:  # the row is CLIP itself
            model = row.coco_model.removeprefix("PCMEpp-GPO-") + "-quickgelu"  # OpenAI trained it so
            folder = self.out / "runs" / digest(model, *self._files) / f"seed-{seed}"
            return make_run(folder, None, model, "openai", data, "coco")
        augment = TOKEN_AUGMENT if "GPO" in row.coco_model else ""
        recipe = "--pretrained openai" if "--rival" in row.flags else f"{RECIPE} {augment}"
        flags = ["--model", row.coco_model, *shlex.split(f"{recipe} {row.flags} {row.coco_flags}")]
        folder = self.out / "runs" / digest(*flags, *self._files) / f"seed-{seed}"
        names = sorted(path.stem for path in (self.folder / "train").glob("*.tar"))
        shards = f"{self.folder / 'train'}/{{{names[0]}..{names[-1]}}}.tar"
        val = min((self.folder / "val").glob("*.tar"))  # the first shard, 1,000 images, as in the authors' code
        train = [*flags, "--val-data", str(val), "--seed", str(seed), "--train-data"]
        if "--rival" in flags:
            train += [shards]
        else:
            train += [f"coco={shards}", "--val-num-samples", "1000", "--dataset-type", "webdataset", "--workers", "8"]
            train += ["--batch-size", str(COCO_BATCH // self.ranks)]
        checkpoint = folder / "run" / "checkpoints" / CHECKPOINTS[row.checkpoint]
        return make_run(folder, train, row.coco_model, checkpoint, data, f"coco-{row.checkpoint}", row)

    def read(self, results: dict[str, Any], table: Table) -> dict[str, Any]:
        """Return the part of a results.json of `pcmepp eval` that a table reads."""
        return results[table.task]["coco"]

    @functools.cached_property
    def _files(self) -> tuple[str, ...]:
        """Return the folder and the size of every file in it but the images, which tell the data from others."""
        files = [self.folder / "dataset_coco.json", *sorted(self.folder.glob("*/*.tar"))]
        return str(self.folder.resolve()), *(f"{file.relative_to(self.folder)} {file.stat().st_size}" for file in files)


class Failed(Exception):
    """A run that failed."""

    def __init__(self, log: Path) -> None:
        super().__init__(f"see {log}")
        self.log = log


@dataclass
class Outcome:
    """The numbers of a row.

    Arguments:
        values: numbers by seed and by the name of a column, for the seeds that are done.
        logs: logs by seed, for the seeds that failed.
    """

    row: Row
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)


class Runner:
    """Trains and evaluates rows.

    Arguments:
        scale: the data and the settings.
        launcher: a module and its flags are appended to it, such as "torchrun --nproc-per-node 8 -m --".
        at_a_time: number of runs at the same time.
    """

    def __init__(self, scale: Scenes | Coco, launcher: str = PYTHON, at_a_time: int = 1) -> None:
        self.scale, self.launcher, self.at_a_time = scale, shlex.split(launcher), at_a_time
        self._failed: dict[Path, Path] = {}  # logs of trainings that failed, by folder
        self._running: set[subprocess.Popen] = set()
        self._stopped = False

    def commands(self, run: Run) -> Iterator[list[str]]:
        """Yield the command lines of a run: the training, unless there is none, and the evaluation."""
        train, evaluate = [*self.launcher, "pcmepp_openclip.train"], [*self.launcher, "pcmepp_openclip.cli", "eval"]
        if "--rival" in (run.train or ()):  # which one process trains
            train, evaluate = ([*shlex.split(PYTHON), "research.rivals", word] for word in ("train", "eval"))
        if run.train is not None:
            yield [*train, *run.train]
        yield [*evaluate, *run.evaluate]

    def plan(self, table: Table, rows: Sequence[Row], seeds: Sequence[int]) -> dict[tuple[str, int], Run]:
        """Return the runs by row and seed."""
        chosen = [row for row in rows if row.runs_on(self.scale.name)]
        return {(row.key, seed): self.scale.run(table, row, seed) for row in chosen for seed in seeds}

    def run(self, table: Table, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """Run the rows with every seed, and return their numbers in the same order.

        First the data of every seed are drawn and the CLIP is trained that its rows start from; then each training is
        followed by its evaluations. So no two jobs at a time write the same files.
        """
        plan = self.plan(table, rows, seeds)
        waiting = {place: run for place, run in plan.items() if not run.results.exists()}
        starts: dict[int, Run | None] = {}
        trainings: defaultdict[Path, dict[tuple[str, int], Run]] = defaultdict(dict)
        for place, run in waiting.items():
            starts[place[1]] = run.needs or starts.get(place[1])
            trainings[run.folder][place] = run
        logs: dict[tuple[str, int], Path] = {}
        with (
            _exit_on_sigterm(),
            ThreadPoolExecutor(self.at_a_time) as pool,
            tqdm(total=len(plan), initial=len(plan) - len(waiting), desc="rows x seeds", disable=None) as bar,
        ):
            try:
                for future in [pool.submit(self.prepare, seed, run) for seed, run in starts.items()]:
                    future.result()
                jobs = {pool.submit(self.perform, list(runs.values())): runs for runs in trainings.values()}
                for job in as_completed(jobs):
                    for (key, seed), run in jobs[job].items():
                        if (log := job.result().get(run.evaluation)) is not None:
                            logs[key, seed] = log
                            bar.write(f"{key}, seed {seed}: failed, see {log}", file=sys.stderr)
                        elif bar.disable:  # the output is a log
                            print(f"{key}, seed {seed}: done", flush=True)
                        bar.set_postfix_str(f"{key}, seed {seed}")
                        bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise
        outcomes = {row.key: Outcome(row) for row in rows}
        for (key, seed), run in plan.items():
            if (key, seed) in logs:
                outcomes[key].logs[seed] = logs[key, seed]
                continue
            try:
                outcomes[key].values[seed] = self.values(table, outcomes[key].row, run)
            except ValueError as error:
                outcomes[key].logs[seed] = run.results
                print(f"{key}, seed {seed}: failed, {error}", file=sys.stderr)
        return list(outcomes.values())

    def prepare(self, seed: int, start: Run | None) -> None:
        """Draw the data of a seed, and train the model that its runs start from."""
        try:
            self.scale.draw(seed)
        except OSError as error:
            raise RunFailed(f"the scenes of seed {seed} cannot be drawn: {error}.") from error
        if start is not None:
            with contextlib.suppress(Failed):  # the runs that need it will report it
                self.train(start)

    def perform(self, runs: Sequence[Run]) -> dict[Path, Path]:
        """Train the model that these runs share, evaluate it, and return the logs of failures by the evaluation."""
        logs = {}
        try:
            if runs[0].needs is not None:
                self.train(runs[0].needs)  # it is done by now, or has failed
            self.train(runs[0])
        except Failed as failure:
            return {run.evaluation: failure.log for run in runs}
        for run in {run.evaluation: run for run in runs}.values():
            try:
                *_, evaluate = self.commands(run)
                self._call(evaluate, run.evaluation.with_suffix(".log"))
            except Failed as failure:
                logs[run.evaluation] = failure.log
        return logs

    def train(self, run: Run) -> None:
        """Train a run that is not trained; `pcmepp train` marks one that is complete."""
        if run.folder in self._failed:
            raise Failed(self._failed[run.folder])
        try:
            if run.train is not None and not (run.folder / "run" / "done").exists():
                self._call(next(self.commands(run)), run.folder / "train.log")
            if run.clip is not None and not run.clip.exists():
                to_clip(run.last, run.clip)
        except Failed as failure:
            self._failed[run.folder] = failure.log
            raise
        except (OSError, ValueError) as error:  # this process raises them
            log = self._failed[run.folder] = run.folder / "failed.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{error}\n")
            raise Failed(log) from error

    def _call(self, command: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        # One thread is as fast for a small model, and leaves the other cores to the other runs.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if isinstance(self.scale, Scenes) else None
        with log.open("a") as file:
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            try:
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            except OSError as error:  # the launcher may not be installed
                file.write(f"{error}\n")
                raise Failed(log) from error
            self._running.add(process)
            if self._stopped:  # `_stop` may have come meanwhile
                process.terminate()
            code = process.wait()
            self._running.discard(process)
        if code != 0:
            raise Failed(log)

    def _stop(self) -> None:
        """Ask the runs to save and end; nothing is started any more."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()

    def values(self, table: Table, row: Row, run: Run) -> dict[str, float]:
        """Return the columns of a run that is done; a ValueError that names its results.json if that is damaged."""
        try:
            metrics = self.scale.read(json.loads(run.results.read_text(), parse_constant=_refuse), table)
            values = {column.name: column.value(metrics, row.by, self.scale.name) for column in table.columns}
            if any(map(math.isinf, values.values())):
                raise ValueError("infinite")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{run.results} is damaged or has numbers that are not finite: delete it, and the same command "
                "evaluates the row again."
            ) from error
        return values


def _refuse(constant: str) -> float:
    """Refuse NaN and Infinity, which `pcmepp eval` writes for no metric: one that is undefined is null."""
    raise ValueError(constant)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """End this process on SIGTERM as an exception does, so that the processes that it has started end too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
