"""Draw scenes, train PCMEpp-tiny on them with three seeds, and measure what its uncertainty means.

    pcmepp demo                                                  about five minutes on two cores
    pcmepp demo --seeds 1 --steps 200 --size 4000 --out small    faster, less accurate
    pcmepp demo --steps 10000 --size 400000                      slower, more accurate

The models are trained by `pcmepp train`, as on a cluster. The same seed gives the same result on the same machine.
"""

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..system.files import check_folder
from .goals import GOALS, Outcome, outcomes, spread
from .seeds import BATCH, HELD_OUT, MODEL, Seed, cores, draw, train, train_flags

FIGURE = "uncertainty.png"  # docs/images/uncertainty.png is the one of the defaults


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="pcmepp demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=_positive, default=40_000, help="number of training pairs to draw (40000)")
    parser.add_argument("--steps", type=_positive, default=1200, help=f"training steps, with {BATCH} pairs each (1200)")
    parser.add_argument("--seed", type=int, default=0, help="first random seed of scenes, model and training (0)")
    parser.add_argument("--seeds", type=_positive, default=3, help="number of seeds, each with its own model (3)")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-demo"), help="output folder (pcmepp-demo)")
    args = parser.parse_args(argv)
    if args.size < BATCH:
        raise ValueError(f"--size {args.size} is smaller than a batch: draw at least {BATCH} pairs.")
    if any(args.out.glob("seed-*")):
        raise ValueError(f"{args.out} already holds a demo: remove it, or choose another folder with --out.")
    check_folder(args.out, "--out")
    seeds = [Seed(args.out, args.seed + i, first=i == 0) for i in range(args.seeds)]
    start = time.monotonic()
    prepare(args, seeds)
    runs = evaluate(args, seeds)
    print(f"\nDone in {time.monotonic() - start:.0f} s.")
    show(args, runs)


def prepare(args: argparse.Namespace, seeds: Sequence[Seed]) -> None:
    """Draw the data of every seed and train its model, as many at a time as there are cores."""
    at_a_time = min(len(seeds), cores())
    numbers = ", ".join(str(seed.number) for seed in seeds)
    print(f"1. Drawing {args.size} scenes to train on and {HELD_OUT} held-out ones for each seed: {numbers}.")
    print(
        f"2. Training a model for each seed, {at_a_time} at a time; what is shown is seed {seeds[0].number}.",
        flush=True,
    )

    def one(seed: Seed) -> None:
        flags = train_flags(seed, args.steps, draw(seed, args.size))
        if seed.first:
            print(f"\npcmepp train {shlex.join(flags)}", flush=True)
        start = time.monotonic()
        train(seed, flags)
        print(f"Seed {seed.number} was trained in {time.monotonic() - start:.0f} s.", flush=True)

    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            for future in [pool.submit(one, seed) for seed in seeds]:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def evaluate(args: argparse.Namespace, seeds: Sequence[Seed]) -> dict[int, dict[str, float]]:
    """Measure, and write demo.json; the figure, the report and the exported model are those of the first seed.
    Returns the numbers by seed."""
    import open_clip

    from ..ambiguity.store import BANK_FILE, save_bank
    from ..models.export import export_model
    from ..models.fingerprint import bank_fingerprint
    from ..reports import plots
    from . import figure
    from .pages import write_report
    from .results import result_of

    print("\n3. Measuring on the held-out scenes.", flush=True)
    results = [result_of(seed) for seed in seeds]
    runs = {seed.number: result.numbers for seed, result in zip(seeds, results, strict=True)}
    found: dict[str, Any] = {"size": args.size, "steps": args.steps, "seeds": list(runs)}
    found["targets"] = [outcome.as_json() for outcome in outcomes(list(runs.values()))]
    found["numbers"] = runs
    (args.out / "demo.json").write_text(json.dumps(found, indent=2) + "\n")
    first = results[0]
    plots.png(figure.draw(first), args.out / FIGURE, dpi=140)
    write_report(args.out / "report", first, list(runs.values()))
    export_model(first.model, args.out / "model", MODEL)
    fingerprint = bank_fingerprint(first.model, open_clip.get_tokenizer(MODEL))
    save_bank(first.bank, args.out / "model" / BANK_FILE, fingerprint)
    return runs


def show(args: argparse.Namespace, runs: dict[int, dict[str, float]]) -> None:
    every = list(runs.values())
    seeds = "mean of the seeds, with the lowest and the highest in brackets" if len(every) > 1 else "one seed"
    print(f"\nWhat the uncertainty of this model means, on scenes that it has not seen ({seeds}):")
    found = outcomes(every)
    for goal in GOALS:
        print(f"\n  {goal.words}: {goal.target}")
        for outcome in found:
            if outcome.goal == goal:
                print(f"    {_line(outcome)}")
        for name, words in goal.beside:
            print(f"    {'':10}{spread(every, name)!s:26}{words}")
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


def _line(outcome: Outcome) -> str:
    return f"{outcome.estimator:10}{outcome.spread!s:26}{outcome.verdict}"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
