"""`pcmepp paper TABLE`: run a table of the PCME++ paper, and show its numbers beside ours.

    pcmepp paper --list                                            the tables and figures
    pcmepp paper distances                                         on drawn scenes, in minutes on a CPU
    pcmepp paper ablation beta --seeds 1 --steps 50                several tables, faster, less accurate
    pcmepp paper main --data coco --coco-dir DIR --rows b32-pcmepp       the real thing, on COCO
    pcmepp paper main --data coco --coco-dir DIR --launcher "torchrun --nproc-per-node 8 -m --" --ranks 8
    pcmepp paper main --data coco --coco-dir DIR --print           only the commands, for a batch system

Rows are trained by `pcmepp train` and evaluated by `pcmepp eval`. Rows that are done are not run again: the same
command continues what was interrupted.
"""

import argparse
import contextlib
import fcntl
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..data.arguments import positive_number
from ..demo.dataset import CLASSES
from ..demo.seeds import BATCH, cores
from ..evaluation.datasets import read_captioned
from ..system.errors import RunFailed
from ..system.files import check_folder
from ..system.text import did_you_mean, flag_of
from .baselines import retrieval_chance, retrieval_prior
from .pages import write_pages
from .rows import Row, Table
from .runner import PYTHON, Runner
from .scales import Coco, Scale, Scenes
from .tables import FIGURES, TABLES

ONLY_FOR = {"scenes": ("steps", "start_steps", "size"), "coco": ("coco_dir", "launcher", "ranks", "print")}
DEFAULTS = {"steps": 200, "start_steps": 1000, "size": 20_000, "ranks": 1, "launcher": PYTHON}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pcmepp paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the tables and figures")
    parser.add_argument("--rows", metavar="A,B", help="only these rows (default: all; a wrong name lists them)")
    parser.add_argument("--data", choices=("scenes", "coco"), default="scenes", help="default: scenes")
    parser.add_argument("--seeds", type=positive_number, default=3, help="number of seeds, from 0 on (3)")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-paper"), help="output folder (pcmepp-paper)")
    group = parser.add_argument_group("with --data scenes")
    group.add_argument("--steps", type=positive_number, help=f"training steps of a row, with {BATCH} pairs each (200)")
    group.add_argument(
        "--start-steps", type=positive_number, help="training steps of the CLIP that rows start from (1000)"
    )
    group.add_argument("--size", type=positive_number, help="number of training pairs to draw (20000)")
    group = parser.add_argument_group("with --data coco")
    group.add_argument("--coco-dir", type=Path, metavar="DIR", help="the folder that launch/data/coco.sh makes")
    group.add_argument("--launcher", metavar="WORDS", help="what starts a Python module, as in the example above")
    group.add_argument("--ranks", type=positive_number, help="number of ranks that the launcher starts (1)")
    group.add_argument("--print", action="store_true", default=None, help="print the commands, and run nothing")
    args = parser.parse_args(argv)
    if args.list:
        print(listing())
        return 0
    tables = _tables(args)
    scale = _scale(args)
    chosen = {name: _rows(name, table, args.rows, scale) for name, table in tables.items()}
    if args.print:
        print_commands(Runner(scale, args.launcher), tables, chosen, args.seeds)
        return 0
    check_folder(args.out, "--out")
    with _alone(args.out):
        for name in args.tables:
            if name in FIGURES:
                draw(name, args.out / name, args.seeds)
        at_a_time = cores() if args.data == "scenes" else 1
        runner = Runner(scale, args.launcher, at_a_time)
        failed = [name for name in tables if run_table(args, runner, name, chosen[name])]
    if failed:
        raise RunFailed(f"rows of {', '.join(failed)} failed, see above; the same command tries them again.")
    return 0


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the lock of the output folder, which the operating system releases however this process ends."""
    with (out / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFailed(
                f"another `pcmepp paper` works in --out {out}: wait for its end, or give another --out."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def listing() -> str:
    lines = [f"  {name:17}{table.about} ({table.where}, {len(table.rows)} rows)" for name, table in TABLES.items()]
    lines += ["", "Figures, and the commands that draw them:", ""]
    for name, figure in FIGURES.items():
        lines.append(f"  {name:17}{figure.about}")
        lines += [f"  {'':17}pcmepp {command}" for command in figure.commands]
    return "\n".join(["Tables of the paper, for `pcmepp paper TABLE`:", "", *lines])


def run_table(args: argparse.Namespace, runner: Runner, name: str, rows: Sequence[Row]) -> bool:
    """Run a table, print it and write its pages; whether a row failed."""
    table, begin = TABLES[name], time.monotonic()
    print(f"{name}: {table.about} ({table.where} of the paper), {len(rows)} rows, {args.seeds} seeds.", flush=True)
    outcomes = runner.run(table, rows, range(args.seeds))
    settings = {key: getattr(args, key) for key in ONLY_FOR["scenes"]} if args.data == "scenes" else {}
    scale = {"data": args.data, "seeds": args.seeds, **settings}
    title = f"PCME++, {table.where}: {table.about}"
    print(write_pages(args.out / name, title, table, outcomes, scale, baselines(runner.scale, table, args.seeds)))
    print(f"{time.monotonic() - begin:.0f} s.\n", flush=True)
    return any(outcome.logs for outcome in outcomes)


def baselines(scale: Scale, table: Table, seeds: int) -> dict[str, dict[str, float]]:
    """What rankings give that look at no query, by name and column, the mean over seeds; {} on COCO."""
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


def _columns(table: Table, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    columns: dict[str, float] = {}
    for column in table.columns:
        try:
            values = [column.value({"metrics": metrics}, "cosine", "scenes") for metrics in found]
        except KeyError:  # an uncertainty has no such level
            values = []
        columns[column.name] = math.fsum(values) / len(values) if values else math.nan
    return columns


def print_commands(
    runner: Runner, tables: Mapping[str, Table], chosen: Mapping[str, Sequence[Row]], seeds: int
) -> None:
    """Each command once, in the order in which they must run."""
    lines: dict[str, None] = {}
    for name, table in tables.items():
        for run in runner.plan(table, chosen[name], range(seeds)).values():
            lines |= {shlex.join(command): None for command in runner.commands(run)}
    print("\n".join(lines))


def draw(name: str, out: Path, seeds: int) -> None:
    """Run the command of a figure, or say which one it is."""
    from .. import cli

    figure = FIGURES[name]
    if not figure.runs:
        print(f"{name}: {figure.about}\n" + "\n".join(f"  pcmepp {command}" for command in figure.commands))
        return
    words = [*shlex.split(figure.commands[0]), "--out", str(out), "--seeds", str(seeds)]
    if (code := cli.run(words)) != 0:
        raise RunFailed(f"`pcmepp {shlex.join(words)}` failed with exit code {code}.")


def _tables(args: argparse.Namespace) -> dict[str, Table]:
    known = [*TABLES, *FIGURES]
    if not args.tables:
        raise ValueError("name a table: `pcmepp paper --list` lists them.")
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


def _scale(args: argparse.Namespace) -> Scale:
    """The scale of these flags; `args` gets the defaults of those that were not given."""
    for data, names in ONLY_FOR.items():
        for name in names:
            if data != args.data and getattr(args, name) is not None:
                raise ValueError(f"{flag_of(name)} is for --data {data}: drop it, or change --data.")
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.data == "scenes":
        if args.size < BATCH:
            raise ValueError(f"--size {args.size} is smaller than a batch: draw at least {BATCH} pairs.")
        return Scenes(args.out, args.steps, args.start_steps, args.size)
    if args.coco_dir is None:
        raise ValueError("--data coco needs --coco-dir, the folder that launch/data/coco.sh makes.")
    if not args.launcher.split():
        raise ValueError('--launcher is empty: give what starts a module, such as "torchrun --nproc-per-node 8 -m --".')
    return Coco(args.out, args.coco_dir, args.ranks)


def _rows(name: str, table: Table, given: str | None, scale: Scale) -> list[Row]:
    known = {row.key: row for row in table.rows}
    if given is None:
        return list(table.rows)
    rows = []
    for key in given.split(","):
        if key not in known:
            raise ValueError(f"--rows: {name} has no row '{key}'; {did_you_mean(key, known)} Rows: {', '.join(known)}.")
        rows.append(known[key])
    if not any(row.runs_on(scale.name) for row in rows):
        raise ValueError(f"--rows {given}: none of them is run on {scale.name}; choose others of {name}.")
    return rows
