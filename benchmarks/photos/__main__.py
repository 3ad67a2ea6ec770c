"""`python -m benchmarks.photos --data FOLDER --out DIR`: see the package."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .estimators import BANK_SIZES, VARIANCE, make_bank, of_means
from .features import DEGRADED, Photos, read_photos
from .heads import METHODS, STEPS, train
from .judge import COLUMNS, RESAMPLES, encode, judge, pair_errors, retrieval

HEADER = {
    "bins_i2t": "bins i2t", "bins_t2i": "bins t2i", "miss_i2t": "miss i2t", "miss_t2i": "miss t2i", "blur": "blur",
    "box": "box", "half": "left half", "noise": "noise", "crop": "crop", "cut": "cut captions",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.photos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs, see the package's docstring")
    parser.add_argument("--out", type=Path, required=True, help="features, results.json and table.md")
    parser.add_argument("--test", nargs="+", default=["coco-dev", "flickr8k-test"], help="splits to measure on")
    parser.add_argument("--validation", default="flickr8k-dev", help="split for the calibration of pairs")
    parser.add_argument("--seeds", type=int, default=3, help="how often everything is trained (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="of these (0)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps ({STEPS})")
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help="of the bootstrap, per seed")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="JSON", help="only print the table of these results")
    args = parser.parse_args()
    if args.merge:
        return print(tables([row for path in args.merge for row in json.loads(path.read_text())]))
    cache = args.out / "features"
    photos = read_photos(args.data, "train", ["clean", "rrc"], cache)
    validation = read_photos(args.data, args.validation, ["clean"], cache)
    test = {name: read_photos(args.data, name, ["clean", *DEGRADED], cache) for name in args.test}
    results: list[dict[str, Any]] = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.methods:
            start = time.monotonic()
            results += run(name, photos, validation, test, seed, args)
            print(f"seed {seed}, {METHODS[name].words}: {time.monotonic() - start:.0f} s", flush=True)
            (args.out / "results.json").write_text(json.dumps(results))
    text = tables(results)
    (args.out / "table.md").write_text(text)
    print(text)


def run(
    name: str, photos: Photos, validation: Photos, test: dict[str, Photos], seed: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The results of one training on every test split: R@1, and the numbers of each estimator."""
    heads = train(METHODS[name], photos, seed, args.steps)
    results = []
    with torch.inference_mode():
        bank = make_bank(heads, photos, seed, BANK_SIZES[-1])
        is_plain = name.startswith("plain")
        estimators = list(of_means(heads, photos, seed)) if is_plain else [VARIANCE]
        for split, own in test.items():
            data = encode(heads, own)
            about = {"method": name, "seed": seed, "split": split}
            found: dict[str, Any] = {**about, "R@1": retrieval(data, bank), "k": _ratio(heads)}
            if is_plain:
                found["pairs"] = pair_errors(encode(heads, validation), data, bank)
                words = torch.tensor([float(len(caption.split())) for caption in own.captions])
                results.append({**about, "estimator": "oracle: loss of the own pair", **judge(data, None, 0)})
                found["words_miss_t2i"] = _words(data, words)
            results.append(found)
            for estimator in estimators:
                results.append({**about, "estimator": estimator.name, **judge(data, estimator, args.resamples)})
    return results


def _ratio(heads: Any) -> float:
    return (2 * heads.match_scale / heads.scale).item()


def _words(data: Any, words_M: torch.Tensor) -> float:
    """The AUROC of a caption's length in words for finding its image: what no model is needed for."""
    from pcmepp_openclip import DISTANCES
    from pcmepp_openclip.evaluation.uncertainty import auroc

    from .judge import first_hits

    return auroc(words_M, first_hits(data, DISTANCES["cosine"])[1])


def tables(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: R@1 by method, then per split the estimators, each the mean over seeds and a 95 % interval."""
    found = ["R@1, mean over seeds (lowest to highest)", ""]
    found.append("| training | split | mean i2t | mean t2i | CSD i2t | CSD t2i | bank i2t | bank t2i | k |")
    found.append("|---|---|" + "---|" * 7)
    scored = [row for row in results if "R@1" in row]
    for method, split in dict.fromkeys((row["method"], row["split"]) for row in scored):
        rows = [row for row in scored if (row["method"], row["split"]) == (method, split)]
        cells = []
        for key in ("mean_i2t", "mean_t2i", "csd_i2t", "csd_t2i", "bank_i2t", "bank_t2i"):
            values = [row["R@1"][key] for row in rows]
            cells.append(f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        cells.append(f"{np.mean([row['k'] for row in rows]):.2f}")
        found.append(f"| {METHODS[method].words} | {split} | {' | '.join(cells)} |")
    for split in dict.fromkeys(row["split"] for row in results):
        found += ["", f"{split}", "", f"| training | estimator | {' | '.join(HEADER[c] for c in COLUMNS)} |"]
        found.append("|---|---|" + "---|" * len(COLUMNS))
        judged = [row for row in results if row["split"] == split and "estimator" in row]
        for method, name in dict.fromkeys((row["method"], row["estimator"]) for row in judged):
            rows = [row for row in judged if (row["method"], row["estimator"]) == (method, name)]
            cells = [_cell([row[column] for row in rows]) for column in COLUMNS]
            found.append(f"| {METHODS[method].words} | {name} | {' | '.join(cells)} |")
    paired = [row for row in scored if "pairs" in row]
    if paired:
        found += ["", "Pairs: expected calibration error at a prior of 1/2, and AUROC over all pairs", ""]
        found.append("| training | split | ECE, cosine | ECE, bank | AUROC, cosine | AUROC, bank | miss t2i by words |")
        found.append("|---|---|" + "---|" * 5)
    for method, split in dict.fromkeys((row["method"], row["split"]) for row in paired):
        rows = [row for row in paired if (row["method"], row["split"]) == (method, split)]
        keys = ("cosine", "bank", "cosine_auroc", "bank_auroc")
        values = [f"{np.mean([row['pairs'][key] for row in rows]):.3f}" for key in keys]
        values.append(f"{np.mean([row['words_miss_t2i'] for row in rows]):.3f}")
        found.append(f"| {METHODS[method].words} | {split} | {' | '.join(values)} |")
    return "\n".join(found) + "\n"


def _cell(values: list[list[float]]) -> str:
    """The mean over seeds, and the 95 % interval of the resampled values of all seeds."""
    text = f"{np.mean([value[0] for value in values]):.2f}"
    drawn = [x for value in values for x in value[1:]]
    if drawn:
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        text += f" ({low:.2f} to {high:.2f})"
    return text


if __name__ == "__main__":
    main()
