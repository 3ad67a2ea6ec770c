"""Train points in the plane by four losses: the toy of the PCME++ paper. Three classes, 30 % of the points are of two.

    pcmepp toy                       five seeds, about 15 seconds of one core
    pcmepp toy --fixed-scale         a and b of the matching logit stay as they are: how much do they matter?
    pcmepp toy --fixed-labels        confusing points keep the class of the first batch: nothing is ambiguous

Writes DIR/toy.json, DIR/toy.png and DIR/toy.gif; the pictures are those of the first seed. The same seed gives the same
result on the same machine.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from ..reports import plots
from ..system.files import check_folder, write_whole
from ..system.text import flag_of
from . import figure
from .methods import METHODS
from .outcomes import Outcome, outcome_of, text_table
from .training import History, Settings, train

MAX_SEED, MAX_SEEDS, MAX_PER_CLASS = 2**62, 10_000, 100_000
JSON, PICTURE, ANIMATION = "toy.json", "toy.png", "toy.gif"


def main(argv: list[str]) -> None:
    args = _arguments(argv)
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
    shown, outcomes = run(settings, seeds)
    write(args.out, settings, seeds, shown, outcomes)
    print(f"The mean variance of certain and of confusing points, {words_of(seeds)}:\n\n{text_table(outcomes)}\n")
    print(f"{order(outcomes)} Separation: the distance of classes over their width; below 1 they have collapsed.\n")
    for name in (JSON, PICTURE, ANIMATION):
        print(args.out / name)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pcmepp toy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=500, help="steps, each of a batch of 128 points (500)")
    parser.add_argument("--per-class", type=int, default=500, help="points of each of the three classes (500)")
    parser.add_argument("--seed", type=int, default=0, help="first random seed of points and training (0)")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (5)")
    parser.add_argument("--fixed-scale", action="store_true", help="do not train a and b of the matching logit")
    parser.add_argument("--fixed-labels", action="store_true", help="draw the class of confusing points only once")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-toy"), help="output folder (pcmepp-toy)")
    args = parser.parse_args(argv)
    for name, least, why in (
        ("epochs", 1, ""),
        ("seeds", 1, ""),
        ("seed", 0, ""),
        ("per_class", 10, ", so that some of the points are confusing"),
    ):
        if vars(args)[name] < least:
            raise ValueError(f"{flag_of(name)} must be at least {least}{why}, not {vars(args)[name]}.")
    for name, most in (("seed", MAX_SEED), ("seeds", MAX_SEEDS), ("per_class", MAX_PER_CLASS)):
        if vars(args)[name] > most:
            raise ValueError(f"{flag_of(name)} must be at most {most}, not {vars(args)[name]}.")
    return args


def run(settings: Settings, seeds: list[int]) -> tuple[dict[str, History], list[Outcome]]:
    """Train every method with every seed: the runs of the first seed by method, and what became of all."""
    keep = figure.frame_epochs(settings.epochs)
    histories: dict[str, list[History]] = {method: [] for method in METHODS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small to be worth sharing
    try:
        with tqdm(total=len(seeds) * len(METHODS) * settings.epochs, unit=" epochs", disable=None) as bar:
            for i, seed in enumerate(seeds):
                for method in METHODS:
                    bar.set_description(f"seed {seed}, {method}")
                    histories[method].append(train(method, seed, settings, keep if i == 0 else (), bar.update))
    finally:
        torch.set_num_threads(threads)
    shown = {method: runs[0] for method, runs in histories.items()}
    return shown, [outcome_of(method, runs) for method, runs in histories.items()]


def write(out: Path, settings: Settings, seeds: list[int], shown: dict[str, History], outcomes: list[Outcome]) -> None:
    found = {"settings": asdict(settings), "seeds": seeds}
    found["methods"] = {outcome.method: outcome.as_json() for outcome in outcomes}
    write_whole(out / JSON, lambda path: path.write_text(json.dumps(found, indent=2) + "\n"))
    write_whole(out / PICTURE, lambda path: plots.png(figure.draw(shown), path, dpi=120))
    with tqdm(total=len(figure.frame_epochs(settings.epochs)), desc=ANIMATION, unit=" frames", disable=None) as bar:
        write_whole(out / ANIMATION, lambda path: figure.animate(shown, path, bar.update))


def order(outcomes: list[Outcome]) -> str:
    """In how many seeds CSD tells confusing points better than the Wasserstein distance does."""
    ratio = {outcome.method: outcome.ratio for outcome in outcomes if outcome.ratio is not None}
    pairs = list(zip(ratio["csd"].values, ratio["wasserstein"].values, strict=True))
    larger = sum(a > b for a, b in pairs)
    return f"CSD has the larger ratio of the two, as in the paper, in {larger} of {len(pairs)} seeds."


def words_of(seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"mean over {len(seeds)} seeds with the lowest and the highest ratio in brackets"
