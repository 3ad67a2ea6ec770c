"""`python -m research.photos --data FOLDER --out DIR`: see the package."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from . import pairs, questions
from .estimators import BANK_SIZES, by_variance, make_bank, of_means
from .features import DEGRADED, TRAIN_CROP, Photos, TrueMatches, empty_caption, read_photos, true_matches
from .heads import METHODS, STEPS, Heads, train_all
from .questions import encode, resampled
from .tables import Result, tables

RESAMPLES = 30
TRUE, GRADED = "coco-true", "graded"
SPLITS = {"flickr8k-dev": (), "coco-dev": DEGRADED, "flickr8k-test": DEGRADED, TRUE: (), GRADED: ()}
CALIBRATED = {"flickr8k-dev": ("coco-dev", TRUE), "coco-dev": (TRUE, "flickr8k-test")}  # fitted to: measured on


def main(argv: list[str] | None = None) -> None:
    """Measure every estimator, or those of some methods, and write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m research.photos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs, see the package's docstring")
    parser.add_argument("--out", type=Path, required=True, help="features, heads, results.json and tables.md")
    parser.add_argument("--seeds", type=int, default=3, help="how often everything is trained (3)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps ({STEPS})")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help=f"of the bootstrap, per seed ({RESAMPLES})")
    args = parser.parse_args(argv)
    cache = args.out / "features"
    photos = read_photos(args.data, "train", ["clean", TRAIN_CROP], cache)
    splits = {name: read_photos(args.data, name, ["clean", *views], cache) for name, views in SPLITS.items()}
    true = true_matches(args.data, TRUE)
    results: list[Result] = []
    for seed in range(args.seeds):
        start = time.monotonic()
        models = train_all(photos, seed, args.steps, args.methods, args.out / "heads")
        with torch.inference_mode():
            results += judge(models, photos, splits, true, empty_caption(cache), seed, args.resamples)
        print(f"seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
        (args.out / "results.json").write_text(json.dumps(results))
    text = tables(results)
    (args.out / "tables.md").write_text(text)
    print(text)


def judge(
    models: dict[str, Heads],
    photos: Photos,
    splits: dict[str, Photos],
    true: list[TrueMatches],
    empty_x: torch.Tensor,
    seed: int,
    resamples: int,
) -> Iterator[Result]:
    """Yield the results of all models of a seed.

    Arguments:
        true: the true items of queries of `TRUE`.
        empty_x: the features of the empty caption.
    """

    def results(question: str, name: str, sees: str, split: str, numbers: questions.Numbers) -> Iterator[Result]:
        row = {"question": question, "estimator": name, "sees": sees, "data": split, "seed": seed}
        for number, samples, value in numbers:
            yield {**row, "number": number, "values": resampled(samples, value, resamples)}

    rows, number = questions.short_texts(splits[GRADED], splits[TRUE])
    for method, heads in models.items():
        bank = make_bank(heads, photos, seed, BANK_SIZES[-1])
        encoded = {name: encode(heads, own) for name, own in splits.items()}
        for by in of_means(heads, photos, empty_x, seed) if method == "plain" else [by_variance(METHODS[method].words)]:
            who = by.name, by.sees
            yield from results("Multiplicity", *who, TRUE, questions.multiplicity(by, encoded[TRUE], true))
            short = questions.multiplicity_of_short(by, encoded[GRADED], encoded[TRUE], rows, number)
            yield from results("Multiplicity", *who, TRUE, short)
            for split in splits:
                if split != GRADED:
                    yield from results("Confusion", *who, split, questions.confusion(by, encoded[split]))
            yield from results("Vagueness", *who, GRADED, questions.graded_captions(by, encoded[GRADED]))
            for split, views in SPLITS.items():
                if views:
                    yield from results("Vagueness", *who, split, questions.less_detail(by, encoded[split]))
        for score, distance in pairs.scores(method, heads, bank):
            for split in splits:
                if split != GRADED:
                    numbers = pairs.pairs(encoded[split], distance, true if split == TRUE else ())
                    yield from results("Pairs", score, "", split, numbers)
            yield from results("Pairs", score, "", GRADED, pairs.graded_pairs(encoded[GRADED], distance))
        if method == "plain":
            for known, others in CALIBRATED.items():
                measured = {split: encoded[split] for split in others}
                for name, split, error in pairs.calibration_errors(encoded[known], measured, bank):
                    row = {"question": "Calibration", "estimator": name, "sees": f"fitted to {known}", "seed": seed}
                    yield {**row, "data": split or "its other half", "number": "ECE", "values": [error]}


if __name__ == "__main__":
    main()
