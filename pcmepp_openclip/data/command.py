"""Inspect webdataset shards before training on them.

pcmepp data count '/data/cc3m/{00000..00331}.tar'
pcmepp data count 'cc3m=https://host/cc3m/{00000..00331}.tar' --output cc3m.sizes.json
pcmepp data check 'cc3m=/data/cc3m/{00000..00331}.tar::redcaps=/data/redcaps/{00000..01199}.tar' --workers 8
"""

import argparse
import os
from pathlib import Path

from ..system.files import check_folder
from ..system.flags import CommandParser, number
from .check import check_shards, check_source
from .count import check_places, count_source, shard_table, summary_lines, write_counts, write_table
from .decode import MAX_PIXELS
from .sizes import count_command, read_sizes
from .sources import label, parse_sources


def parser() -> CommandParser:
    """Return the parser of the flags."""
    parser = CommandParser("pcmepp data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="count|check")
    count = commands.add_parser("count", help="read every shard, and write sizes.json and a report next to them")
    count.add_argument("--output", type=Path, help="where to write sizes.json, for shards without a writable folder")
    count.add_argument(
        "--table", type=_table_path, metavar="FILE", help="also write a table with one row per shard: .csv or .html"
    )
    check = commands.add_parser("check", help="find in seconds what would stop a training run")
    check.add_argument("--full", action="store_true", help="read every shard completely, and compare with sizes.json")
    check.add_argument("--ranks", type=number(int, 1), default=1, help="training processes (default: 1)")
    check.add_argument("--dataset-resampled", action="store_true", help="as in training")
    for command in (count, check):
        command.add_argument("pattern", help="shards, in the format of --train-data")
        command.add_argument(
            "--workers",
            type=number(int, 1 if command is count else 0),
            default=(os.cpu_count() or 1) if command is count else 4,
            help="reading processes (default: all cores)" if command is count else "per training process (default: 4)",
        )
        command.add_argument(
            "--max-pixels",
            type=number(int, 1),
            default=MAX_PIXELS,
            help="largest image that is decoded (default: 64 million)",
        )
        command.add_argument(
            "--retries", type=number(int, 0), default=5, help="attempts to resume a broken connection (default: 5)"
        )
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    return run_count(args) if args.command == "count" else run_check(args)


def run_count(args: argparse.Namespace) -> int:
    sources = parse_sources(args.pattern, "PATTERN")
    if args.output and len(sources) > 1:
        raise ValueError("--output takes the counts of one source: count the sources one by one.")
    for source in sources:
        check_places(source, args.output)
    if args.table:
        check_folder(args.table.parent, "--table")
    unreadable, tables = 0, []
    for source in sources:
        counts = count_source(source, args.workers, args.max_pixels, args.retries)
        print("\n".join(summary_lines(source, counts)))
        if args.table:
            tables.append(shard_table(source, counts))
        for path in write_counts(source, counts, args.output):
            print(f"  wrote {path}")
        unreadable += sum(count.cause is not None for count in counts)
    if args.table:
        write_table(tables, args.table)
        print(f"Wrote {args.table}")
    return 1 if unreadable else 0


def _table_path(text: str) -> Path:
    if not text.endswith((".csv", ".html")):
        raise argparse.ArgumentTypeError("must end in .csv or .html")
    return Path(text)


def run_check(args: argparse.Namespace) -> int:
    sources = parse_sources(args.pattern, "PATTERN")
    for source in sources:
        check_source(source, args.max_pixels, args.retries)
    if not args.dataset_resampled:
        check_shards(sum(len(source.shards) for source in sources), args.workers, args.ranks)
    bad = 0
    for source in sources:
        sizes = read_sizes(source)
        if sizes is None:
            print(f"{source.name}: {len(source.shards)} shards, not counted: run `{count_command(source)}`")
        else:
            samples = sum(size.samples for size in sizes)
            print(f"{source.name}: {len(source.shards)} shards, {samples} usable samples according to sizes.json")
        if args.full:
            counts = count_source(source, os.cpu_count() or 1, args.max_pixels, args.retries)
            print("\n".join(summary_lines(source, counts)))
            bad += sum(count.cause is not None for count in counts)
            for size, found in zip(sizes or (), counts, strict=False):
                if size.samples != found.usable:
                    bad += 1
                    print(f"  {label(found.shard)}: sizes.json says {size.samples}, but {found.usable} are usable")
    return 1 if bad else 0
