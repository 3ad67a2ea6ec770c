"""Threads that sleep while they wait for each other, as the `pcmepp` command sets them, against torch's default.

Two works, on idle cores and on cores that other processes use: a layer of a tiny model, and one of a ViT-B-32.

python -m benchmarks waiting
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from .measure import Row, busy_cores, row

STEPS = """
import sys, time, torch
width, tokens, batch, steps = map(int, sys.argv[1:])
layer = torch.nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, batch_first=True)
x, seconds = torch.randn(batch, tokens, width), []
for _ in range(steps):
    start = time.perf_counter()
    layer(x).sum().backward()
    seconds.append(time.perf_counter() - start)
print(sorted(seconds)[steps // 2])
"""
WORKS = {"a small layer": (64, 33, 50, 20), "a layer of ViT-B-32": (768, 50, 8, 8)}  # width, tokens, batch, steps
REPEATS = 3


def seconds(work: tuple[int, ...], **variables: str) -> float:
    """Return the median seconds of a forward and backward pass in a new process with these environment variables."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", STEPS, *map(str, work)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=unset | variables).stdout)


def rows() -> Iterator[Row]:
    for title, work in WORKS.items():
        for where in ("idle", "busy"):
            with busy_cores(os.cpu_count() or 1) if where == "busy" else contextlib.nullcontext():
                pairs = [(seconds(work, OMP_WAIT_POLICY="passive"), seconds(work)) for _ in range(REPEATS)]
            ours, theirs = zip(*pairs, strict=True)
            yield row(f"{title}, {where} cores, waiting threads sleep against torch's default", ours, theirs, "s")
