"""Rows as real runs: `pcmepp train` and `pcmepp eval` in processes of their own, and each training once.

A run that fails is said to have failed, with its log; the others go on. The same command resumes what was interrupted:
a complete training is not repeated, and another one continues from its newest checkpoint.
"""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from ..models.convert import to_clip
from .rows import Row, Table
from .scales import Run, Scale, Scenes

PYTHON = f"{shlex.quote(sys.executable)} -m"  # the launcher of one rank


class Failed(Exception):
    """A run that failed."""

    def __init__(self, log: Path) -> None:
        super().__init__(f"see {log}")
        self.log = log


@dataclass
class Outcome:
    """What became of a row.

    Arguments:
        values: by seed and by the name of a column, of the seeds that are done.
        logs: by seed, of those that failed.
    """

    row: Row
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)


class Runner:
    """Trains and evaluates rows.

    Arguments:
        scale: the data and the settings.
        launcher: what a module and its flags are appended to, such as "torchrun --nproc-per-node 8 -m --".
        at_a_time: number of runs at the same time.
    """

    def __init__(self, scale: Scale, launcher: str = PYTHON, at_a_time: int = 1) -> None:
        self.scale, self.launcher, self.at_a_time = scale, shlex.split(launcher), at_a_time
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._failed: dict[Path, Path] = {}  # logs of trainings that failed, by folder
        self._running: set[subprocess.Popen] = set()
        self._stopped = False

    def commands(self, run: Run) -> Iterator[list[str]]:
        """The command lines of a run: the training, unless there is none, and the evaluation."""
        if run.train is not None:
            yield [*self.launcher, "pcmepp_openclip.train", *run.train]
        yield [*self.launcher, "pcmepp_openclip.cli", "eval", *run.eval_flags]

    def plan(self, table: Table, rows: Sequence[Row], seeds: Sequence[int]) -> dict[tuple[str, int], Run]:
        """The runs by row and seed."""
        chosen = [row for row in rows if row.runs_on(self.scale.name)]
        return {(row.key, seed): self.scale.run(table, row, seed) for row in chosen for seed in seeds}

    def run(self, table: Table, rows: Sequence[Row], seeds: Sequence[int]) -> list[Outcome]:
        """Run the rows with every seed; what became of them, in the same order."""
        plan = self.plan(table, rows, seeds)
        logs: dict[tuple[str, int], Path] = {}
        waiting = {place: run for place, run in plan.items() if not run.results.exists()}
        with (
            _sigterm_ends(),
            ThreadPoolExecutor(self.at_a_time) as pool,
            tqdm(total=len(plan), initial=len(plan) - len(waiting), desc="rows x seeds", disable=None) as bar,
        ):
            try:
                futures = {pool.submit(self.perform, run, seed): (key, seed) for (key, seed), run in waiting.items()}
                for future in as_completed(futures):
                    key, seed = futures[future]
                    try:
                        future.result()
                    except Failed as failure:
                        logs[key, seed] = failure.log
                        bar.write(f"{key}, seed {seed}: failed, {failure}", file=sys.stderr)
                    else:
                        if bar.disable:  # in a log
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

    def perform(self, run: Run, seed: int) -> None:
        """Train what is not trained, and evaluate; `Failed` if one of them fails."""
        try:
            self._perform(run, seed)
        except (OSError, ValueError) as error:  # of this process
            log = run.folder / "failed.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{error}\n")
            raise Failed(log) from error

    def _perform(self, run: Run, seed: int) -> None:
        """Rows that share a training wait for each other."""
        if isinstance(self.scale, Scenes):
            with self._locks[self.scale.data(seed)]:
                self.scale.draw(seed)
        if run.needs is not None:
            self._train(run.needs)
        self._train(run)
        with self._locks[run.evaluation]:
            if not run.results.exists():
                *_, evaluate = self.commands(run)
                self._call(evaluate, run.evaluation.with_suffix(".log"))

    def _train(self, run: Run) -> None:
        with self._locks[run.folder]:
            if run.folder in self._failed:
                raise Failed(self._failed[run.folder])
            try:
                if not run.trained:
                    self._call(next(self.commands(run)), run.folder / "train.log")
                if run.last is not None and run.checkpoint is not None and not run.checkpoint.exists():
                    to_clip(run.last, run.checkpoint)
            except Failed as failure:
                self._failed[run.folder] = failure.log
                raise

    def _call(self, command: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        # One thread is as fast for a small model, and leaves the other cores to the other runs.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if isinstance(self.scale, Scenes) else None
        with log.open("a") as file:
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            self._running.add(process)
            if self._stopped:  # meanwhile
                process.terminate()
            code = process.wait()
            self._running.discard(process)
        if code != 0:
            raise Failed(log)

    def _stop(self) -> None:
        """Ask what runs to save and end; nothing is started any more."""
        self._stopped = True
        for process in list(self._running):
            process.terminate()

    def values(self, table: Table, row: Row, run: Run) -> dict[str, float]:
        """The columns of a run that is done; a ValueError that names its results.json if that is damaged."""
        try:
            found = self.scale.found(json.loads(run.results.read_text(), parse_constant=_refuse), table)
            values = {column.name: column.value(found, row.by, self.scale.name) for column in table.columns}
            if any(map(math.isinf, values.values())):
                raise ValueError("infinite")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{run.results} is damaged or has numbers that are not finite: delete it, and the same command "
                "evaluates the row again."
            ) from error
        return values


def _refuse(constant: str) -> float:
    """Refuse NaN and Infinity, which `pcmepp eval` writes for no metric: one that is undefined is null."""
    raise ValueError(constant)


@contextlib.contextmanager
def _sigterm_ends() -> Iterator[None]:
    """Within it, SIGTERM ends this process as an exception does, so that what it has started ends too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
