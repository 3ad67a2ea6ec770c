"""Code in forks of one process that has imported the slow libraries, so that each case starts in no time.

    python forks.py MODULE...      reads one JSON request per line, {"code": "...", "world": 2}, runs the code in that
                                   many forks and answers {"codes": [...], "output": what they printed}

The code sees RANK and WORLD_SIZE in its environment where there is more than one."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class Forks:
    """The other side: starts such a process, which imports `modules`, and runs code in its forks."""

    def __init__(self, *modules: str):
        command = [sys.executable, str(Path(__file__).resolve()), *modules]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, world: int = 1) -> tuple[list[int], str]:
        self.server.stdin.write(json.dumps({"code": code, "world": world}) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return answer["codes"], answer["output"]

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)


def fork(code: str, output: int, rank: int, world: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(output, 1)
    os.dup2(output, 2)
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    status = 1
    try:
        exec(code, {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    from ranks import free_port, wait

    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile() as output:
            port = free_port()
            arguments = request["code"], output.fileno()
            pids = [fork(*arguments, rank, request["world"], port) for rank in range(request["world"])]
            codes = wait(pids)
            output.seek(0)
            print(json.dumps({"codes": codes, "output": output.read().decode(errors="replace")}), flush=True)
