"""Measure this package and the alternative side by side, and write a table.

python -m benchmarks                              all but those that take long
python -m benchmarks loss step --out DIR          some of them
python -m benchmarks --compare DIR/table.json     with the change against an earlier run
python -m benchmarks models                       which of open_clip's models work, and at what cost
python -m benchmarks scale                        what a rank of a large run would do, without a GPU
python -m benchmarks ranks                        the cost of a run's groups by the number of ranks

The table is printed, and written to table.md and table.json in the folder of --out.
"""

import importlib
import logging
import sys
import time
import traceback
from pathlib import Path

from . import results

COMMANDS = {  # each is a module here with `main(argv)`
    "models": "every model of open_clip's; a command of its own, see `models --help`",
    "scale": "collectives and memory of a rank on fake CUDA tensors; a command of its own, see `scale --help`",
    "ranks": "start-up time and open files by the number of ranks; a command of its own, see `ranks --help`",
}
NAMES = {  # each is a module here with `rows()`
    "flops": "training FLOPs of the models",
    "data": "samples/s and memory of the loader",  # it comes early, since its workers are forked and share all memory
    "peers": "samples/s of the loader and of other projects', in environments of their own",
    "waiting": "threads that sleep while they wait, on idle and on busy cores",
    "startup": "imports and time to the first step",
    "head_only": "epochs of --head-only from cached tokens",
    "loss": "time and memory of the loss",
    "labels": "mixed images and soft labels against none",
    "pcme": "the loss by CSD, and by the Monte-Carlo samples of PCME",
    "gather": "bytes that ranks exchange for the loss",
    "checkpoint": "saving and verified loading",
    "retrieval": "evaluation by CSD and by cosine",
    "ambiguity": "the confusion of a text by a bank, beside its encoding",
    "hub": "training while a checkpoint is pushed",
    "gpo": "pooling by GPO against its plain form, and a training step with it",
    "step": "time and memory of training steps",
}
APART = {"hub", "peers"}  # see docs/hub.md; the other needs a package index


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        logging.disable(logging.WARNING)
        return importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    described = (f"  {name:12} {description}" for name, description in (NAMES | COMMANDS).items())
    parser = results.parser("benchmarks", __doc__, epilog="\n".join(described))
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"see below; all but {', '.join(sorted(APART))} by default"
    )
    parser.add_argument("--compare", type=Path, metavar="FILE", help="table.json of an earlier run: show the change")
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            parser.error(f"there is no benchmark '{name}'; there are: {', '.join(NAMES)}")
    try:
        compared_with, earlier = results.read(args.compare) if args.compare else ("", None)
    except ValueError as error:
        parser.error(str(error))
    logging.disable(logging.WARNING)
    rows, failed, start = [], [], time.monotonic()
    for name in dict.fromkeys(args.names) or [name for name in NAMES if name not in APART]:
        try:
            for row in importlib.import_module(f"benchmarks.{name}").rows():
                print(f"{time.monotonic() - start:4.0f} s  {row.what}: {results.number(row.ratio)}", flush=True)
                rows.append(row)
        except Exception:  # one that fails must not cost the minutes of the others
            traceback.print_exc()
            failed.append(name)
    minutes = f"{(time.monotonic() - start) / 60:.1f} minutes"
    text = f"{results.table(rows, earlier)}\n\n{results.LEGEND}\n\n{results.machine()}; {minutes}."
    if compared_with:
        text += f" Compared with {args.compare}: {compared_with}."
    results.write(rows, args.out, text)
    assert len({row.what for row in rows}) == len(rows), "two rows of one name: --compare goes by names"
    print(f"\n{text}\nwritten to {args.out}/table.md and table.json")
    if failed:
        sys.exit(f"These failed, see above: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
