"""One seed of the demo: where its files are, how they are drawn, and how its model is trained.

OUT/seed-0/run, embeddings     and so on for each seed
OUT/data                       of the first seed; of the others OUT/seed-1/data, ...
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .dataset import draw_held_out, write_retrieval, write_train, write_zeroshot

MODEL, BATCH = "PCMEpp-tiny", 128
HELD_OUT, ZEROSHOT = 1000, 500


@dataclass(frozen=True)
class Seed:
    """A seed and its files.

    Arguments:
        out: the folder of the demo.
        number: the random seed of scenes, model and training.
        first: whether it is the one whose model, data and figure are shown.
    """

    out: Path
    number: int
    first: bool

    @property
    def folder(self) -> Path:
        return self.out / f"seed-{self.number}"

    @property
    def data(self) -> Path:
        return self.out / "data" if self.first else self.folder / "data"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "run" / "checkpoints" / "epoch_1.pt"


def draw(seed: Seed, size: int) -> str:
    """Write all data of a seed. Returns the pattern of the training shards."""
    shards = write_train(seed.data / "train", size, seed.number, quiet=not seed.first)
    write_retrieval(seed.data / "retrieval", draw_held_out(HELD_OUT, seed.number))
    if seed.first:
        write_zeroshot(seed.data / "zeroshot", ZEROSHOT, seed.number)
    return shards


def train_flags(seed: Seed, steps: int, shards: str) -> list[str]:
    """The flags of `pcmepp train`. The settings of the loss are in the model's config."""
    flags = ["--model", MODEL, "--train-data", f"scenes={shards}", "--dataset-type", "webdataset"]
    flags += ["--dataset-resampled", "--train-num-samples", str(steps * BATCH), "--epochs", "1"]
    flags += ["--batch-size", str(BATCH), "--lr", "2e-3", "--warmup", str(max(1, steps // 10))]
    flags += ["--beta2", "0.98", "--eps", "1e-6"]  # open_clip's defaults for a ViT, which it recognises by name
    flags += ["--aug-cfg", "scale=(1.0,1.0)"]  # no crops: they would cut shapes off and change sizes
    flags += ["--workers", "1", "--precision", "fp32", "--seed", str(seed.number), "--save-every-minutes", "0"]
    return [*flags, "--log-every-n-steps", "100", "--logs", str(seed.folder), "--name", "run"]


def train(seed: Seed, flags: list[str]) -> None:
    """Run `pcmepp train` in a separate process, as a user would. Only the first seed's is shown: the others run at the
    same time, and their lines would be mixed with it."""
    # One thread is as fast for such a small model, and gives the same sums on any number of cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pcmepp_openclip.train", *flags]
    seed.folder.mkdir(parents=True, exist_ok=True)
    if seed.first:
        code, log = subprocess.run(command, env=environment).returncode, seed.folder / "run" / "out.log"
    else:
        log = seed.folder / "train.log"
        with log.open("w") as file:
            code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0:
        raise ValueError(f"the training of seed {seed.number} failed with exit code {code}: see {log}.")


def cores() -> int:
    """How many trainings may run at a time: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
