"""`pcmepp push` in a process of low priority that ends with the process that started it.

It stands alone because it is a program: `start` runs it for a training run, whose checkpoints wait in the folder
`QUEUE` of the run, as links, since training may delete them meanwhile. It imports all that a push needs, waits for one
line, the arguments of `pcmepp push` as JSON, pushes and ends.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

QUEUE = "hub-queue"  # folder in a run for files to push, removed when the run ends


def start(queue: Path) -> subprocess.Popen:
    """Start a process for a push, which prepares what it sends in the folder `queue`, and prints retries and result."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,  # the system closes it when this process dies
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(queue)},
        start_new_session=True,  # Ctrl-C ends the run, which then ends its push
    )


def main() -> int:
    """Push, and end at once when the process that started this one is gone: the run may already be running again."""
    os.nice(19)
    from .. import cli
    from . import command  # noqa: F401  it takes seconds, and there is nothing to push yet

    line = sys.stdin.readline()
    if not line:
        return 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return cli.main(["push", *json.loads(line)])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
