"""Ranks of `pcmepp train`, or of another command, forked from one process that has imported everything, so that a
start takes no seconds.

    python ranks.py      reads one JSON request a line: {"world": 2, "argv": [...], "module": "..."} and
                         answers {"pids": [...]}; {"wait": [pids]} answers {"codes": [...]}, -9 for a killed one

Each rank is a real process that runs `main` of the module, of this folder or of the tests, and can be signalled by its
pid."""

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 2.0


class Ranks:
    """The other side: starts such a process, and ranks from it."""

    def __init__(self, log: Path):
        self.log = log
        command = [sys.executable, str(Path(__file__).resolve())]
        with open(log, "ab") as errors:
            self.server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def ask(self, **request):
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, world, argv, module="pcmepp_openclip.training.command"):
        return self.ask(world=world, argv=[str(x) for x in argv], module=module)["pids"]

    def wait(self, pids):
        """Exit codes; once one rank has failed the others are killed, as torchrun does."""
        return self.ask(wait=pids)["codes"]

    def run(self, world, argv, **kwargs):
        return self.wait(self.start(world, argv, **kwargs))

    def alive(self, pid):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork_rank(rank, world, port, argv, module):
    pid = os.fork()
    if pid:
        return pid
    os.dup2(2, 1)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        code = importlib.import_module(module).main(argv) or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code & 255)


def wait(pids):
    """The exit codes. As with torchrun, a rank that fails ends the others, after a time to print what they have to."""
    codes, end = {}, None
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, 0 if end is None else os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] not in (0, 75) and end is None:
                end = time.monotonic() + GRACE_S
        elif time.monotonic() > end:
            for other in set(pids) - set(codes):
                os.kill(other, 9)
            end = math.inf
        else:
            time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.append(str(Path(__file__).parents[1]))
    import open_clip_train.main  # noqa: F401  before the fork
    import pytest  # noqa: F401

    import pcmepp_openclip.training.command  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"codes": wait(request["wait"])}
        else:
            port = free_port()
            world, rest = request["world"], (port, request["argv"], request["module"])
            answer = {"pids": [fork_rank(rank, world, *rest) for rank in range(world)]}
        print(json.dumps(answer), flush=True)
