"""Train points in the plane by four losses: the toy of the PCME++ paper. Three classes, 30 % of the points are of two.

    python -m research.toy                    five seeds, about 20 seconds of one core
    python -m research.toy --fixed-scale      a and b of the matching logit stay as they are: how much do they matter?
    python -m research.toy --fixed-labels     confusing points keep the class of the first batch: nothing is ambiguous

Writes DIR/toy.json, DIR/toy.png and DIR/toy.gif; the pictures are those of the first seed. The same seed gives the same
result on the same machine.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from pcmepp_openclip.demo.goals import Goal, spread
from pcmepp_openclip.reports import plots
from pcmepp_openclip.system.files import check_folder, write_whole
from pcmepp_openclip.system.flags import CommandParser, number

from ..command import run
from . import figure
from .training import METHODS, History, Settings, separation, train, variances

NAME = "research.toy"
JSON, PICTURE, ANIMATION = "toy.json", "toy.png", "toy.gif"
PAPER = {  # the mean sigma^2 of certain and of confusing points in appendix A.2, and the goal for their ratio
    "csd": (1.68, 3.05, Goal("ratio", 1.82, "confusing points have larger variances")),
    "wasserstein": (2.69, 2.80, Goal("ratio", 1.04, "they do not, for this distance does not ask", below=True)),
}
Numbers = Mapping[str, Sequence[float]]  # the values of each number, one per seed


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(sys.argv[1:] if argv is None else argv)
    check_folder(args.out, "--out")
    for name in (JSON, PICTURE, ANIMATION):
        if (args.out / name).is_dir():
            raise ValueError(f"--out {args.out}: its {name} is a folder; name another one.")
    settings = Settings(
        epochs=args.epochs,
        per_class=args.per_class,
        learn_scale=not args.fixed_scale,
        redraw_labels=not args.fixed_labels,
    )
    seeds = [args.seed + i for i in range(args.seeds)]
    histories = train_all(settings, seeds)
    results = {method: measure(method, runs) for method, runs in histories.items()}
    write(args.out, settings, seeds, {method: runs[0] for method, runs in histories.items()}, results)
    words = f"mean over {len(seeds)} seeds with the lowest and the highest ratio in brackets"
    words = words if len(seeds) > 1 else f"seed {seeds[0]}"
    larger = sum(a > b for a, b in zip(results["csd"]["ratio"], results["wasserstein"]["ratio"], strict=True))
    print(f"The mean variance of certain and of confusing points, {words}:\n\n{text_table(results)}\n")
    print(f"CSD has the larger ratio of the two, as in the paper, in {larger} of {len(seeds)} seeds.", end=" ")
    print("Separation: the distance of classes over their width; below 1 they have collapsed.\n")
    for name in (JSON, PICTURE, ANIMATION):
        print(args.out / name)


def parser() -> CommandParser:
    """Return the parser of the flags."""
    parser = CommandParser(f"python -m {NAME}", __doc__)
    parser.add_argument("--epochs", type=number(int, 1), default=500, help="steps, each of a batch of 128 points (500)")
    parser.add_argument(  # fewer points would not be confusing
        "--per-class", type=number(int, 10, 100_000), default=500, help="points of each of the three classes (500)"
    )
    parser.add_argument(
        "--seed", type=number(int, 0, 2**62), default=0, help="first random seed of points and training (0)"
    )
    parser.add_argument("--seeds", type=number(int, 1, 10_000), default=5, help="number of seeds (5)")
    parser.add_argument("--fixed-scale", action="store_true", help="do not train a and b of the matching logit")
    parser.add_argument("--fixed-labels", action="store_true", help="draw the class of confusing points only once")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-toy"), help="output folder (pcmepp-toy)")
    return parser


def train_all(settings: Settings, seeds: Sequence[int]) -> dict[str, list[History]]:
    """Train every method with every seed; the first seed's points are kept for the animation."""
    keep = figure.frame_epochs(settings.epochs)
    histories: dict[str, list[History]] = {method: [] for method in METHODS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small to be worth sharing
    try:
        with tqdm(total=len(seeds) * len(METHODS) * settings.epochs, unit=" epochs", disable=None) as bar:
            for seed in seeds:
                for method in METHODS:
                    bar.set_description(f"seed {seed}, {method}")
                    snapshots = keep if seed == seeds[0] else ()
                    histories[method].append(train(method, seed, settings, snapshots, bar.update))
    finally:
        torch.set_num_threads(threads)
    return histories


def measure(method: str, histories: Sequence[History]) -> dict[str, list[float]]:
    """Return the numbers of one method in every seed: how far the classes are apart, and if the variances are trained,
    the mean sigma^2 of certain and of confusing points and its ratio."""
    numbers = {"separation": [separation(history.final, history.points) for history in histories]}
    if METHODS[method].probabilistic:
        pairs = [variances(history.final, history.points.confusing_N) for history in histories]
        numbers["certain"], numbers["confusing"] = map(list, zip(*pairs, strict=True))
        numbers["ratio"] = [confusing / certain for certain, confusing in pairs]
    return numbers


def as_json(method: str, numbers: Numbers) -> dict[str, Any]:
    content: dict[str, Any] = {
        name: {"mean": fmean(values), "min": min(values), "max": max(values), "seeds": list(values)}
        for name, values in numbers.items()
    }
    if "ratio" in numbers:
        certain, confusing, goal = PAPER[method]
        content["paper"] = {"certain": certain, "confusing": confusing, "ratio": goal.value}
        content["target"], content["reached"] = goal.target, goal.count(numbers["ratio"])
    return content


def write(
    out: Path, settings: Settings, seeds: list[int], shown: dict[str, History], results: Mapping[str, Numbers]
) -> None:
    methods = {method: as_json(method, numbers) for method, numbers in results.items()}
    content = json.dumps({"settings": asdict(settings), "seeds": seeds, "methods": methods}, indent=2)
    write_whole(out / JSON, lambda path: path.write_text(f"{content}\n"))
    write_whole(out / PICTURE, lambda path: plots.png(figure.draw(shown, settings.epochs), path, dpi=120))
    with tqdm(total=len(figure.frame_epochs(settings.epochs)), desc=ANIMATION, unit=" frames", disable=None) as bar:
        write_whole(out / ANIMATION, lambda path: figure.animate(shown, path, bar.update))


def text_table(results: Mapping[str, Numbers]) -> str:
    """Format means over seeds for the terminal. Only a ratio that every seed reaches is called reached."""
    rows = {}
    for method, numbers in results.items():
        row = {"": "no variances", "separation": spread(numbers["separation"], 1)}
        if "ratio" in numbers:
            goal, ratios = PAPER[method][2], numbers["ratio"]
            row |= {name: f"{fmean(numbers[name]):.2f}" for name in ("certain", "confusing")}
            row |= {
                "ratio": spread(ratios, 2),
                "paper": f"{goal.value:g}",
                "": f"{goal.target}: {goal.verdict(ratios)}",
            }
        rows[METHODS[method].title] = row
    columns = ["certain", "confusing", "ratio", "paper", "", "separation"]
    return pd.DataFrame.from_dict(rows, "index", columns=columns).fillna("-").to_string()


if __name__ == "__main__":
    sys.exit(run(NAME, main))
