"""The two scales that a table is run at: drawn scenes, in minutes on a CPU, and COCO with the paper's settings.

A scale says how a row is trained and evaluated: the flags of `pcmepp train` and `pcmepp eval`, and the folder of the
run. The name of the folder is a digest of all flags and of the data, so rows of several tables that are trained alike
are trained once, and a run with other settings or other data never takes the place of another.
"""

import functools
import hashlib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..demo.dataset import SHARD, draw_held_out, write_retrieval, write_train, write_zeroshot
from ..demo.seeds import BATCH, HELD_OUT, MODEL, ZEROSHOT
from .rows import Row, Table
from .tables import CHECKPOINTS, INFONCE, RECIPE, TOKEN_AUGMENT

START_LR, LR = "2e-3", "5e-4"  # of a CLIP on scenes from scratch, and of what starts from it
COCO_BATCH = 128


@dataclass(frozen=True)
class Run:
    """A training and its evaluation.

    Arguments:
        folder: of this run and seed.
        train: the flags of `pcmepp train`; None where an existing model is evaluated.
        evaluate: the flags of `pcmepp eval`, without its folder.
        evaluation: the folder of the evaluation.
        checkpoint: the file that is evaluated; None for one that is not trained here.
        last: the last checkpoint, where `checkpoint` is the plain CLIP within it; else None.
        needs: the run that it starts from.
    """

    folder: Path
    train: tuple[str, ...] | None
    evaluate: tuple[str, ...]
    evaluation: Path
    checkpoint: Path | None = None
    last: Path | None = None
    needs: "Run | None" = None

    @property
    def trained(self) -> bool:
        """`pcmepp train` marks a run that is complete."""
        return self.train is None or (self.folder / "run" / "done").exists()

    @property
    def results(self) -> Path:
        return self.evaluation / "results.json"

    @property
    def eval_flags(self) -> list[str]:
        return [*self.evaluate, "--out", str(self.evaluation)]


def digest(*flags: str) -> str:
    """A short name for these flags."""
    return hashlib.sha256("\0".join(flags).encode()).hexdigest()[:10]


def _name(*words: str) -> str:
    return "-".join(word.strip("-") for word in words)


def _last(folder: Path) -> Path:
    """The checkpoint of a run of one epoch."""
    return folder / "run" / "checkpoints" / "epoch_1.pt"


@dataclass(frozen=True)
class Scenes:
    """The drawn scenes of `pcmepp demo`, and PCMEpp-tiny.

    As in the paper, every row fine-tunes a CLIP: it is trained first, from scratch with InfoNCE, once per seed.

    OUT/scenes-SIZE/seed-0/train, retrieval, zeroshot      the data
    OUT/runs/DIGEST/seed-0/run, eval-retrieval             a training and its evaluation
                          /clip.pt                         of the first training, without the log-variance branch

    Arguments:
        steps, start_steps: of a row, and of the CLIP that it starts from or a row that starts from scratch.
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
        whole = self.data(seed) / "drawn"
        if not whole.exists():
            write_train(self.data(seed) / "train", self.size, seed, quiet=True)
            write_retrieval(self.data(seed) / "retrieval", draw_held_out(HELD_OUT, seed))
            write_zeroshot(self.data(seed) / "zeroshot", ZEROSHOT, seed)
            whole.touch()

    def start(self, seed: int, task: str = "retrieval") -> Run:
        """The training of the CLIP that rows start from; `task` is what it is evaluated on as a row of its own."""
        settings = [*self._settings(MODEL, self.start_steps, START_LR), *shlex.split(INFONCE)]
        folder = self.out / "runs" / digest(*settings, str(self.size)) / f"seed-{seed}"
        checkpoint = folder / "clip.pt"
        evaluate, evaluation = self._evaluate(folder, MODEL, checkpoint, seed, task)
        return Run(folder, self._train(folder, settings, seed), evaluate, evaluation, checkpoint, last=_last(folder))

    def run(self, table: Table, row: Row, seed: int) -> Run:
        start, model = self.start(seed, table.task), row.scenes_model
        if row.flags is None:
            return start
        flags = shlex.split(row.flags)
        if row.start == "scratch":
            settings = [*self._settings(model, self.start_steps, START_LR), *flags]
            name, begin, needs = digest(*settings, str(self.size)), [], None
        else:
            settings = [*self._settings(model, self.steps, LR), *flags]
            name, begin = digest(*settings, start.folder.parent.name), ["--pretrained", str(start.checkpoint)]
            needs = start
        folder = self.out / "runs" / name / f"seed-{seed}"
        train = self._train(folder, [*settings, *begin], seed)
        evaluate, evaluation = self._evaluate(folder, model, _last(folder), seed, table.task, row.eval_flags)
        return Run(folder, train, evaluate, evaluation, _last(folder), needs=needs)

    def found(self, results: dict[str, Any], table: Table) -> dict[str, Any]:
        """What `pcmepp eval` found, of its results.json."""
        return results[table.task][table.task]

    def _settings(self, model: str, steps: int, lr: str) -> list[str]:
        flags = ["--model", model, "--dataset-type", "webdataset", "--dataset-resampled", "--epochs", "1"]
        flags += ["--train-num-samples", str(steps * BATCH), "--batch-size", str(BATCH)]
        flags += ["--lr", lr, "--warmup", str(max(1, steps // 10)), "--beta2", "0.98", "--eps", "1e-6"]
        return [*flags, "--aug-cfg", "scale=(1.0,1.0)", "--precision", "fp32"]

    def _train(self, folder: Path, settings: list[str], seed: int) -> tuple[str, ...]:
        pattern = f"{self.data(seed) / 'train'}/{{00000..{(self.size - 1) // SHARD:05d}}}.tar"
        flags = [*settings, "--train-data", f"scenes={pattern}", "--workers", "1", "--seed", str(seed)]
        flags += ["--save-every-minutes", "0", "--log-every-n-steps", "50"]
        return (*flags, "--logs", str(folder), "--name", "run", "--resume", "latest")

    def _evaluate(
        self, folder: Path, model: str, checkpoint: Path, seed: int, task: str, eval_flags: tuple[str, ...] = ()
    ) -> tuple[tuple[str, ...], Path]:
        flags = ("--model", model, "--pretrained", str(checkpoint), "--workers", "0", "--batch-size", "256")
        data = (f"--{task}", f"{task}={self.data(seed) / task}")
        return (*flags, *data, *eval_flags), folder / _name("eval", task, *eval_flags)


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
        for what in ("dataset_coco.json", "val2014"):
            if not (self.folder / what).exists():
                raise ValueError(f"--coco-dir {self.folder}: {what} is not in it, which the evaluation needs.")
        for what in ("train/*.tar", "val/*.tar"):
            if not any(self.folder.glob(what)):
                raise ValueError(
                    f"--coco-dir {self.folder}: there is no {what} in it; make these by launch/data/coco.sh."
                )
        if COCO_BATCH % self.ranks:
            raise ValueError(f"--ranks {self.ranks} must divide the paper's batch of {COCO_BATCH}.")

    def run(self, table: Table, row: Row, seed: int) -> Run:
        if row.flags is None:  # CLIP itself
            model = row.coco_model.removeprefix("PCMEpp-GPO-") + "-quickgelu"  # as OpenAI trained it
            folder = self.out / "runs" / digest(model, *self._data) / f"seed-{seed}"
            return Run(folder, None, self._evaluate(model, "openai", ()), folder / "eval-coco")
        augment = TOKEN_AUGMENT if "GPO" in row.coco_model else ""
        settings = ["--model", row.coco_model, *shlex.split(f"{RECIPE} {augment} {row.flags} {row.coco_flags}")]
        folder = self.out / "runs" / digest(*settings, *self._data) / f"seed-{seed}"
        val = min((self.folder / "val").glob("*.tar"))  # the first shard, 1,000 images, as in the authors' code
        train = [*settings, "--train-data", f"coco={self._shards()}", "--val-data", str(val)]
        train += ["--val-num-samples", "1000", "--dataset-type", "webdataset", "--workers", "8", "--seed", str(seed)]
        train += ["--batch-size", str(COCO_BATCH // self.ranks)]
        train += ["--logs", str(folder), "--name", "run", "--resume", "latest"]
        checkpoint = folder / "run" / "checkpoints" / CHECKPOINTS[row.checkpoint]
        evaluate = self._evaluate(row.coco_model, str(checkpoint), row.eval_flags)
        evaluation = folder / _name("eval-coco", row.checkpoint, *row.eval_flags)
        return Run(folder, tuple(train), evaluate, evaluation, checkpoint)

    def found(self, results: dict[str, Any], table: Table) -> dict[str, Any]:
        return results[table.task]["coco"]

    @functools.cached_property
    def _data(self) -> tuple[str, ...]:
        """What tells these data from others: where they are, and the size of every file but the images."""
        files = [self.folder / "dataset_coco.json", *sorted(self.folder.glob("*/*.tar"))]
        return str(self.folder.resolve()), *(f"{file.relative_to(self.folder)} {file.stat().st_size}" for file in files)

    def _evaluate(self, model: str, pretrained: str, eval_flags: tuple[str, ...]) -> tuple[str, ...]:
        data = ("--coco", str(self.folder / "dataset_coco.json"), "--coco-images", str(self.folder))
        return ("--model", model, "--pretrained", pretrained, *data, *eval_flags)

    def _shards(self) -> str:
        names = sorted(path.stem for path in (self.folder / "train").glob("*.tar"))
        return f"{self.folder / 'train'}/{{{names[0]}..{names[-1]}}}.tar"


Scale = Scenes | Coco
