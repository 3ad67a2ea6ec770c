"""`pcmepp push` in a process that ends with the process that started it.

    python -m pcmepp_openclip.hub.background NICENESS ARGS      # ARGS are those of `pcmepp push`

It stands alone because it is a program: `start` runs it for a training run, on a checkpoint in the folder `QUEUE` of
the run, which holds links to checkpoints that training may delete meanwhile.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

QUEUE = "hub-queue"  # folder in a run for what is to be pushed, removed when the run ends


def start(arguments: Sequence[str], queue: Path, niceness: int) -> subprocess.Popen:
    """Start a push, which prints its retries and its result, and prepares what it sends in the folder `queue`.

    Arguments:
        niceness: from 0, the priority of this process, to 19, the lowest one.
    """
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(niceness), *arguments],
        stdin=subprocess.PIPE,  # closed by the system when this process dies
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(queue)},
        start_new_session=True,  # Ctrl-C ends the run, which then ends its push
    )


def main() -> int:
    """Push, and end at once when the process that started this one is gone: the run may already be running again."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(int(sys.argv[1]))
    from .. import cli

    return cli.main(["push", *sys.argv[2:]])


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
