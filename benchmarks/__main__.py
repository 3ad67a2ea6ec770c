"""`python -m benchmarks [NAME ...]` prints the table of these benchmarks, or of all."""

import argparse
import importlib

from .measure import table

NAMES = ("flops", "loss")

parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default all")
args = parser.parse_args()
for name in args.names or NAMES:
    if name not in NAMES:
        parser.error(f"there is no benchmark '{name}'; there are: {', '.join(NAMES)}")
rows = []
for name in args.names or NAMES:
    for row in importlib.import_module(f"benchmarks.{name}").rows():
        print(f"{row.what}: {row.ratio:.3f}", flush=True)
        rows.append(row)
print("\n" + table(rows))
