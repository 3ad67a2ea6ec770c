"""Draw scenes, train PCMEpp-tiny on them with three seeds, and measure what its uncertainty means.

    pcmepp demo                                                  about five minutes on two cores
    pcmepp demo --seeds 1 --steps 200 --size 4000 --out small    faster, less accurate
    pcmepp demo --steps 10000 --size 400000                      slower, more accurate

The models are trained by `pcmepp train`, as on a cluster. The same seed gives the same result on the same machine.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..system.files import check_folder
from ..system.flags import CommandParser, number
from .dataset import draw_held_out, write_retrieval, write_train, write_zeroshot
from .goals import ESTIMATORS, GOALS, Runs, spread, targets, values

MODEL, BATCH = "PCMEpp-tiny", 128
HELD_OUT, ZEROSHOT = 1000, 500
FIGURE = "uncertainty.png"  # docs/images/uncertainty.png is the one of the defaults


class Seed(NamedTuple):
    """A seed of scenes, model and training. It has a folder for its run and embeddings; the data of the first seed,
    whose model and figure are shown, are in OUT/data, and those of the others in their folders."""

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


def parser() -> CommandParser:
    """Return the parser of the flags."""
    parser = CommandParser("pcmepp demo", __doc__)
    parser.add_argument(
        "--size", type=number(int, BATCH), default=40_000, help="number of training pairs to draw (40000)"
    )
    parser.add_argument(
        "--steps", type=number(int, 1), default=1200, help=f"training steps, with {BATCH} pairs each (1200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="first random seed of scenes, model and training (0)")
    parser.add_argument("--seeds", type=number(int, 1), default=3, help="number of seeds, each with its own model (3)")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-demo"), help="output folder (pcmepp-demo)")
    return parser


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if any(args.out.glob("seed-*")):
        raise ValueError(f"{args.out} already holds a demo: remove it, or choose another folder with --out.")
    check_folder(args.out, "--out")
    seeds = [Seed(args.out, args.seed + i, first=i == 0) for i in range(args.seeds)]
    start = time.monotonic()
    train_all(args, seeds)
    runs = evaluate(args, seeds)
    print(f"\nDone in {time.monotonic() - start:.0f} s.")
    show(args, runs)


def settings(model: str, steps: int, lr: str) -> list[str]:
    """Return the flags of `pcmepp train` for every seed; the settings of the loss are in the model's config."""
    flags = ["--model", model, "--dataset-type", "webdataset", "--dataset-resampled", "--epochs", "1"]
    flags += ["--train-num-samples", str(steps * BATCH), "--batch-size", str(BATCH)]
    flags += ["--lr", lr, "--warmup", str(max(1, steps // 10))]
    flags += ["--beta2", "0.98", "--eps", "1e-6"]  # open_clip's defaults for a ViT, which it recognises by name
    # No crops: they would cut shapes off and change sizes.
    return [*flags, "--aug-cfg", "scale=(1.0,1.0)", "--precision", "fp32"]


def train_all(args: argparse.Namespace, seeds: Sequence[Seed]) -> None:
    """Draw the data of every seed and train its model, as many at a time as there are cores."""
    at_a_time = min(len(seeds), cores())
    numbers = ", ".join(str(seed.number) for seed in seeds)
    print(f"1. Drawing {args.size} scenes to train on and {HELD_OUT} held-out ones for each seed: {numbers}.")
    print(
        f"2. Training a model for each seed, {at_a_time} at a time; what is shown is seed {seeds[0].number}.",
        flush=True,
    )
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            for future in [pool.submit(train, seed, args.size, args.steps) for seed in seeds]:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def train(seed: Seed, size: int, steps: int) -> None:
    """Write the data of a seed, and run `pcmepp train` in a separate process, as a user would. Only the first seed's is
    shown: the others run at the same time, and their lines would be mixed with it."""
    shards = write_train(seed.data / "train", size, seed.number, quiet=not seed.first)
    write_retrieval(seed.data / "retrieval", draw_held_out(HELD_OUT, seed.number))
    flags = [*settings(MODEL, steps, "2e-3"), "--train-data", f"scenes={shards}", "--workers", "1"]
    flags += ["--seed", str(seed.number), "--save-every-minutes", "0", "--log-every-n-steps", "100"]
    flags += ["--logs", str(seed.folder), "--name", "run"]
    seed.folder.mkdir(parents=True, exist_ok=True)
    log, start = seed.folder / "train.log", time.monotonic()
    # One thread is as fast for such a small model, and gives the same sums on any number of cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pcmepp_openclip.train", *flags]
    if seed.first:
        write_zeroshot(seed.data / "zeroshot", ZEROSHOT, seed.number)
        print(f"\npcmepp train {shlex.join(flags)}", flush=True)
        code, log = subprocess.run(command, env=environment).returncode, seed.folder / "run" / "out.log"
    else:
        with log.open("w") as file:
            code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code != 0:
        raise ValueError(f"the training of seed {seed.number} failed with exit code {code}: see {log}.")
    print(f"Seed {seed.number} was trained in {time.monotonic() - start:.0f} s.", flush=True)


def evaluate(args: argparse.Namespace, seeds: Sequence[Seed]) -> Runs:
    """Measure, and write demo.json; the figure, the report and the exported model are those of the first seed.
    Returns the numbers of each seed."""
    import open_clip

    from ..ambiguity.store import BANK_FILE, save_bank
    from ..models.export import export_model
    from ..models.fingerprint import bank_fingerprint
    from ..reports import plots
    from . import figure
    from .measure import result_of
    from .pages import write_report

    print("\n3. Measuring on the held-out scenes.", flush=True)
    results = [result_of(seed) for seed in seeds]
    runs, first = [result.numbers for result in results], results[0]
    content = {"size": args.size, "steps": args.steps, "seeds": [seed.number for seed in seeds]}
    numbers = {seed.number: run for seed, run in zip(seeds, runs, strict=True)}
    content |= {"targets": targets(runs), "numbers": numbers}
    (args.out / "demo.json").write_text(json.dumps(content, indent=2) + "\n")
    plots.png(figure.draw(first), args.out / FIGURE, dpi=140)
    write_report(args.out / "report", first, runs)
    export_model(first.model, args.out / "model", MODEL)
    fingerprint = bank_fingerprint(first.model, open_clip.get_tokenizer(MODEL))
    save_bank(first.bank, args.out / "model" / BANK_FILE, fingerprint)
    return runs


def show(args: argparse.Namespace, runs: Runs) -> None:
    seeds = "mean of the seeds, with the lowest and the highest in brackets" if len(runs) > 1 else "one seed"
    print(f"\nWhat the uncertainty of this model means, on scenes that it has not seen ({seeds}):")
    for goal in GOALS:
        print(f"\n  {goal.words}: {goal.target}")
        for estimator, prefix in ESTIMATORS.items():
            numbers = values(runs, prefix + goal.name)
            print(f"    {estimator:10}{spread(numbers):26}{goal.verdict(numbers)}")
        for name, words in goal.references:
            print(f"    {'':10}{spread(values(runs, name)):26}{words}")
    out, model, data = args.out, args.out / "model", args.out / "data"
    print(f"""
The figure      {out / FIGURE}
The report      {out / "report" / "index.html"}
The numbers     {out / "demo.json"}
The model       {model}, with its bank, loaded by open_clip.create_model("local-dir:{model}")
The data        {data}
The runs        {out}/seed-*/run

Next:
  pcmepp eval --model local-dir:{model} --retrieval {data}/retrieval --zeroshot {data}/zeroshot --out {out}/eval
  pcmepp demo --steps {10 * args.steps} --size {10 * args.size} --out {out}-long
  pcmepp train --model PCMEpp-ViT-B-16 --train-data 'YOUR/SHARDS/{{00000..00331}}.tar' --dry-run""")


def cores() -> int:
    """Return how many trainings may run at a time: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
