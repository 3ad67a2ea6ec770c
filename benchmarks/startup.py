"""How long it takes to start: the import beside open_clip's own, and a training run to the end of its first step.

python -m benchmarks startup
"""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator

from .measure import Row, elsewhere, row, timed

SECONDS = 0.1  # what `import pcmepp_openclip` may add


def run(*command: str) -> None:
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows() -> Iterator[Row]:
    pairs = []
    for _ in range(3):
        before, after = elsewhere("benchmarks.startup")
        pairs.append((before + after, before))
    bar = 1 + SECONDS / sorted(theirs for _, theirs in pairs)[len(pairs) // 2]
    yield row(
        "import open_clip, pcmepp_openclip against open_clip alone",
        pairs,
        "s",
        bar,
        note=f"the bar is {SECONDS} s more",
    )
    sizes = ["--dataset-type", "synthetic", "--train-num-samples", "4", "--batch-size", "4", "--epochs", "1"]
    options = [*sizes, "--workers", "0", "--precision", "fp32", "--logs", "none"]
    ours = ("-m", "pcmepp_openclip.train", "--model", "PCMEpp-ViT-B-32", *options)
    theirs = ("-m", "open_clip_train.main", "--model", "ViT-B-32", *options)
    run_ours, run_theirs = (functools.partial(run, *command) for command in (ours, theirs))
    what = "a run of one step, ViT-B-32, from the command to its end"
    yield timed(what, run_ours, run_theirs, None, repeats=1)


if __name__ == "__main__":
    start = time.perf_counter()
    import open_clip  # noqa: F401

    middle = time.perf_counter()
    import pcmepp_openclip  # noqa: F401

    print(json.dumps([middle - start, time.perf_counter() - middle]))
