"""Follow the uncertainty of PCMEpp-tiny through a long run, with a learned match scale and with a tied one.

python -m research.drift [--steps 3000] [--every 250] [--runs learned tied]

All runs see the same batches of the demo's scenes, held in memory. The table has the diagnostics of
`pcmepp train`, averaged over the steps since the row before, and numbers that only data with known matches can tell, on
held-out scenes.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import open_clip
from torch import Tensor

from pcmepp_openclip.demo.measure import truth_of

from .sweep import build, encode, make_pairs, measured, shrink_vocabulary, train

RUNS: dict[str, dict[str, Any]] = {
    "learned": {"match_logit": "learned", "init_match_scale": 5.0, "init_match_shift": 5.0, "init_logvar_bias": -5.0},
    "tied": {"match_logit": "tied", "match_ratio": 0.5},
    "learned_from_8": {  # it starts with 2a / s above 1
        "match_logit": "learned",
        "init_match_scale": 8.0,
        "init_match_shift": 8.0,
        "init_logvar_bias": -5.0,
    },
}
LOGGED = ("match_ratio", "expected_matches", "image_slope", "text_slope", "image_agreement", "text_agreement")
MEASURED = (
    *("caption_matches_spearman", "blurred_auroc", "covered_auroc"),
    *("image_to_text_own_R@1", "text_to_image_own_R@1"),
)
LOG_EVERY = 10  # steps


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.drift", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of each run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=250, metavar="STEPS", help="between rows (default: %(default)s)")
    parser.add_argument("--size", type=int, default=40_000, help="number of training pairs (default: %(default)s)")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    schedule = {"batch": 128, "lr": 1e-3, "warmup": min(100, args.steps // 2), "wd": 0.2, "eps": 1e-6}
    data, held_out = make_pairs(f"train {args.seed}", args.size), make_pairs(f"test {args.seed}", 1000, captions=4)
    config = open_clip.get_model_config("PCMEpp-tiny")
    shrink_vocabulary(config, data, held_out)
    truth, start = truth_of(held_out.drawn), time.monotonic()
    print("| run | step |", " | ".join([*LOGGED, *MEASURED]), "|", flush=True)
    print("|---" * (2 + len(LOGGED) + len(MEASURED)) + "|", flush=True)
    for name in args.runs:
        block = config["pcmepp_cfg"] | RUNS[name]
        block["train_means_by"] = "contrastive" if name == "tied" else "all"
        model, loss = build({**config, "pcmepp_cfg": block}, args.seed)
        loss.diagnose = True  # the first step is logged
        seen: list[dict[str, float]] = []

        def on_step(
            step: int,
            terms: dict[str, Tensor],
            name: str = name,
            model: Any = model,
            loss: Any = loss,
            seen: Any = seen,
        ) -> None:
            if loss.diagnose:
                seen.append(loss.read_diagnostics())
            loss.diagnose = (step + 1) % LOG_EVERY == 0
            if step % args.every == 0 or step == args.steps:
                numbers = measured(model, data, *encode(model, held_out), truth)
                logged = [sum(row[key] for row in seen) / len(seen) for key in LOGGED]
                values = [*logged, *(numbers[key] for key in MEASURED)]
                print(f"| {name} | {step} |", " | ".join(f"{value:.2f}" for value in values), "|", flush=True)
                seen.clear()

        train(model, loss, data, argparse.Namespace(steps=args.steps, seed=args.seed, **schedule), on_step)
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
