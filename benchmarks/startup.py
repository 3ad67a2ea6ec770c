"""The time to start: the import beside open_clip's own, and a training run to the end of its first step.

python -m benchmarks startup
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from .measure import Row, row

SECONDS = 0.1  # `import pcmepp_openclip` may add so much
IMPORTS = """
import json, time
start = time.perf_counter()
import open_clip
middle = time.perf_counter()
import pcmepp_openclip
print(json.dumps([time.perf_counter() - start, middle - start]))
"""
DATA = ["--dataset-type", "synthetic", "--train-num-samples", "4", "--workers", "0"]
FLAGS = [*DATA, "--batch-size", "4", "--epochs", "1", "--precision", "fp32"]


def imports() -> list[float]:
    """Return the seconds of both imports, and of open_clip's alone, in a new process."""
    return json.loads(subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True).stdout)


def first_step(module: str, model: str) -> float:
    """Return the seconds from the command to the line that is logged of the first step."""
    with tempfile.TemporaryDirectory() as logs:
        return _first_step([sys.executable, "-m", module, "--model", model, *FLAGS, "--logs", logs])


def _first_step(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Train Epoch: 0 [" in line:
                seconds = time.perf_counter() - start
                process.kill()
                return seconds
    raise RuntimeError(f"{' '.join(command)} made no step:\n{''.join(lines[-20:])}")


def rows() -> Iterator[Row]:
    both, plain = zip(*(imports() for _ in range(3)), strict=True)
    title = "import of open_clip and pcmepp_openclip against open_clip alone"
    bar = 1 + SECONDS / statistics.median(plain)
    yield row(title, both, plain, "s", bar, note=f"the bar is {SECONDS} s more")
    commands = ("pcmepp_openclip.train", "PCMEpp-ViT-B-32"), ("open_clip_train.main", "ViT-B-32")
    seconds: dict[str, list[float]] = {model: [] for _, model in commands}
    for turn in range(2):
        for module, model in commands if turn % 2 else reversed(commands):
            seconds[model].append(first_step(module, model))
    ours, theirs = seconds.values()
    yield row("ViT-B-32, from a training command to the end of its first step", ours, theirs, "s")
