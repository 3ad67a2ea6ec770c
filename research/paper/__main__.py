"""Run a table of the PCME++ paper, and show its numbers beside ours.

    python -m research.paper --list                                    the tables and figures
    python -m research.paper distances                                 on drawn scenes, in minutes on a CPU
    python -m research.paper ablation beta --seeds 1 --steps 50        several tables, faster, less accurate
    python -m research.paper main --data coco --coco-dir DIR --rows b32-pcmepp       the real thing, on COCO
    python -m research.paper main --data coco --coco-dir DIR --launcher "torchrun --nproc-per-node 8 -m --" --ranks 8
    python -m research.paper main --data coco --coco-dir DIR --print   only the commands, for a batch system

Rows are trained by `pcmepp train` and evaluated by `pcmepp eval`. Rows that are done are not run again: the same
command continues what was interrupted.
"""

import argparse
import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout

from pcmepp_openclip.data.captioned import read_captioned
from pcmepp_openclip.demo.command import BATCH, cores
from pcmepp_openclip.demo.dataset import CLASSES
from pcmepp_openclip.system.errors import RunFailed
from pcmepp_openclip.system.files import check_folder
from pcmepp_openclip.system.flags import CommandParser, number
from pcmepp_openclip.system.text import did_you_mean, flag_of

from ..command import run
from ..toy import __main__ as toy
from .baselines import retrieval_chance, retrieval_prior
from .pages import write_pages
from .runs import PYTHON, Coco, Runner, Scenes
from .tables import FIGURES, TABLES, Row, Table

NAME = "research.paper"
DEFAULTS: dict[str, dict[str, Any]] = {  # defaults of the flags that are for one scale only
    "scenes": {"steps": 200, "start_steps": 1000, "size": 20_000},
    "coco": {"coco_dir": None, "launcher": PYTHON, "ranks": 1, "print": False},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    if args.list:
        return print(listing())
    tables = _tables(args)
    scale = _scale(args)
    chosen = {name: _rows(name, table, args.rows, scale.name) for name, table in tables.items()}
    if args.print:
        return print_commands(Runner(scale, args.launcher), tables, chosen, args.seeds)
    check_folder(args.out, "--out")
    with _hold_lock(args.out):
        for name in args.tables:
            if name == "toy":
                toy.main(["--out", str(args.out / name), "--seeds", str(args.seeds)])
            elif name in FIGURES:
                print(f"{name}: {FIGURES[name].summary}\n  {FIGURES[name].command}")
        runner = Runner(scale, args.launcher, cores() if args.data == "scenes" else 1)
        failed = [name for name in tables if run_table(args, runner, name, chosen[name])]
    if failed:
        raise RunFailed(f"rows of {', '.join(failed)} failed, see above; the same command tries them again.")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, positive = CommandParser(f"python -m {NAME}", __doc__), number(int, 1)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the tables and figures")
    parser.add_argument("--rows", metavar="A,B", help="only these rows (default: all; a wrong name lists them)")
    parser.add_argument("--data", choices=("scenes", "coco"), default="scenes", help="default: scenes")
    parser.add_argument("--seeds", type=positive, default=3, help="number of seeds, from 0 on (3)")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-paper"), help="output folder (pcmepp-paper)")
    group = parser.add_argument_group("with --data scenes")
    group.add_argument("--steps", type=positive, help=f"training steps of a row, with {BATCH} pairs each (200)")
    group.add_argument("--start-steps", type=positive, help="training steps of the CLIP that rows start from (1000)")
    group.add_argument("--size", type=positive, help="number of training pairs to draw (20000)")
    group = parser.add_argument_group("with --data coco")
    group.add_argument("--coco-dir", type=Path, metavar="DIR", help="the folder that launch/data/coco.sh makes")
    group.add_argument("--launcher", metavar="WORDS", help="the words that start a Python module, as in the example")
    group.add_argument("--ranks", type=positive, help="number of ranks that the launcher starts (1)")
    group.add_argument("--print", action="store_true", default=None, help="print the commands, and run nothing")
    return parser.parse_args(sys.argv[1:] if argv is None else argv)


def _tables(args: argparse.Namespace) -> dict[str, Table]:
    known = [*TABLES, *FIGURES]
    if not args.tables:
        raise ValueError(f"name a table: `python -m {NAME} --list` lists them.")
    for name in args.tables:
        if name not in known:
            hint = did_you_mean(name, known, f"tables and figures: {', '.join(known)}.")
            raise ValueError(f"there is no table '{name}'; {hint}")
    tables = {name: TABLES[name] for name in args.tables if name in TABLES}
    for name, table in tables.items():
        if args.data not in table.data:
            raise ValueError(f"{name} is not about COCO: run it with --data {table.data[0]}.")
    if args.rows is not None and len(args.tables) != 1:
        raise ValueError("--rows chooses rows of one table: name one.")
    return tables


def _scale(args: argparse.Namespace) -> Scenes | Coco:
    """Build the scale of these flags; `args` gets the defaults of those that were left out."""
    for data, defaults in DEFAULTS.items():
        for name, default in defaults.items():
            if data != args.data and getattr(args, name) is not None:
                raise ValueError(f"{flag_of(name)} is for --data {data}: drop it, or change --data.")
            if getattr(args, name) is None:
                setattr(args, name, default)
    if args.data == "scenes":
        if args.size < BATCH:
            raise ValueError(f"--size {args.size} is smaller than a batch: draw at least {BATCH} pairs.")
        return Scenes(args.out, args.steps, args.start_steps, args.size)
    if args.coco_dir is None:
        raise ValueError("--data coco needs --coco-dir, the folder that launch/data/coco.sh makes.")
    if not args.launcher.split():
        raise ValueError('--launcher is empty: name a launcher, such as "torchrun --nproc-per-node 8 -m --".')
    return Coco(args.out, args.coco_dir, args.ranks)


def _rows(name: str, table: Table, keys: str | None, data: str) -> list[Row]:
    known = {row.key: row for row in table.rows}
    if keys is None:
        return list(table.rows)
    for key in keys.split(","):
        if key not in known:
            raise ValueError(f"--rows: {name} has no row '{key}'; {did_you_mean(key, known)} Rows: {', '.join(known)}.")
    rows = [known[key] for key in keys.split(",")]
    if not any(row.runs_on(data) for row in rows):
        raise ValueError(f"--rows {keys}: none of them is run on {data}; choose others of {name}.")
    return rows


@contextlib.contextmanager
def _hold_lock(out: Path) -> Iterator[None]:
    """Hold the lock of the output folder, which the operating system releases however this process ends."""
    lock = FileLock(out / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        other = f"another `python -m {NAME}` works in --out {out}"
        raise RunFailed(f"{other}: wait for its end, or name another --out.") from None
    except NotImplementedError:  # the file system has no locks
        pass
    try:
        yield
    finally:
        lock.release()


def listing() -> str:
    lines = [f"  {name:17}{table.summary} ({table.where}, {len(table.rows)} rows)" for name, table in TABLES.items()]
    lines += ["", "Figures, and the commands that draw them:", ""]
    lines += [f"  {name:17}{figure.summary}\n  {'':17}{figure.command}" for name, figure in FIGURES.items()]
    return "\n".join([f"Tables of the paper, for `python -m {NAME} TABLE`:", "", *lines])


def print_commands(
    runner: Runner, tables: Mapping[str, Table], chosen: Mapping[str, Sequence[Row]], seeds: int
) -> None:
    """Print each command once, in the order in which they must run."""
    plans = [runner.plan(table, chosen[name], range(seeds)) for name, table in tables.items()]
    lines = [shlex.join(command) for plan in plans for run in plan.values() for command in runner.commands(run)]
    print("\n".join(dict.fromkeys(lines)))


def run_table(args: argparse.Namespace, runner: Runner, name: str, rows: Sequence[Row]) -> bool:
    """Run a table, print it and write its pages. Returns whether a row failed."""
    table, begin = TABLES[name], time.monotonic()
    print(f"{name}: {table.summary} ({table.where} of the paper), {len(rows)} rows, {args.seeds} seeds.", flush=True)
    outcomes = runner.run(table, rows, range(args.seeds))
    settings = {key: getattr(args, key) for key in DEFAULTS["scenes"]} if args.data == "scenes" else {}
    scale = {"data": args.data, "seeds": args.seeds, **settings}
    print(write_pages(args.out / name, table, outcomes, scale, baselines(runner.scale, table, args.seeds)))
    print(f"{time.monotonic() - begin:.0f} s.\n", flush=True)
    return any(outcome.logs for outcome in outcomes)


def baselines(scale: Scenes | Coco, table: Table, seeds: int) -> dict[str, dict[str, float]]:
    """Return by name and column the mean over seeds of rankings that look at no query; {} on COCO."""
    if not isinstance(scale, Scenes):
        return {}
    if table.task == "zeroshot":
        return {"chance": {column.name: 100 / len(CLASSES) for column in table.columns}}
    folders = [folder for seed in range(seeds) if (folder := scale.data(seed) / "retrieval").is_dir()]
    drawn = [read_captioned(str(folder)) for folder in folders]
    return {
        "chance": _columns(table, [retrieval_chance(data) for data in drawn]),
        "one order for all queries": _columns(table, [retrieval_prior(data) for data in drawn]),
    }


def _columns(table: Table, rankings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns = {}
    for column in table.columns:
        columns[column.name] = math.nan
        with contextlib.suppress(KeyError):  # an uncertainty has no such level
            values = [column.value({"metrics": metrics}, "cosine", "scenes") for metrics in rankings]
            columns[column.name] = fmean(values) if values else math.nan
    return columns


if __name__ == "__main__":
    sys.exit(run(NAME, main))
