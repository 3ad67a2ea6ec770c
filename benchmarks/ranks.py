"""The cost of a run's groups by the number of ranks: seconds until all ranks have them, and open files of a rank.

python -m benchmarks ranks                   2, 8 and 32 ranks on this machine
python -m benchmarks ranks --ranks 64 128    other numbers

The ranks are forked from one process, so that no import is in the numbers. torch's default group stands for that of
NCCL, which is not measured. A run has one gloo group beside it; the last columns are for a second one.
"""

import argparse
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from pcmepp_openclip.system import network

from . import results

RANKS = (2, 8, 32)
GROUPS = 2
LOOKS = 200  # so often a rank looks for a failure of another
COLUMNS = ("ranks", "start, s", "open files", "one group, s", "open files", "two groups, s", "open files", "look, ms")


def measure(rank: int, world: int, port: int, queue: Any) -> None:
    """Measure on each rank. The last one hands over the numbers after each group."""
    network.raise_open_files(world)
    start = time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    states = [_state(start)]
    for _ in range(GROUPS):
        network.cpu_group(timedelta(hours=1))
        states.append(_state(start))
    store = network.run_store()
    start = time.monotonic()
    for _ in range(LOOKS):
        store.check(["failure"])
    look = (time.monotonic() - start) / LOOKS
    dist.barrier()
    if rank == world - 1:
        queue.put((states, look))
    dist.barrier()


def _state(start: float) -> tuple[float, int]:
    """Return the seconds until all ranks are here, and the open files of this one."""
    dist.barrier()
    return time.monotonic() - start, len(list(Path("/proc/self/fd").iterdir()))


def of_ranks(world: int) -> list[float]:
    """Return the columns after the number of ranks."""
    context = mp.get_context("fork")
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.start_processes(measure, (world, port, queue), world, start_method="fork")
    states, look = queue.get()
    return [value for seconds, files in states for value in (round(seconds, 2), files)] + [round(1000 * look, 2)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ranks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help="numbers of ranks")
    args = parser.parse_args(argv)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    network.choose_interface()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for world in args.ranks:
        print(f"| {' | '.join(map(str, (world, *of_ranks(world))))} |", flush=True)
    print(f"\n{results.machine()}.")
