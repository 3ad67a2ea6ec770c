"""What a run takes of the machines that its cards are in: shared memory, memory and open files."""

import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

PREFETCHED = 2 + 1  # batches of a worker: those that wait, and the one that is being made
PIXEL = 1  # bytes of a colour of a pixel that leaves a worker
TOKEN = 8  # bytes
WORKER = 70e6  # bytes of a worker's own, measured by `python -m benchmarks data`
RANK = 4e9  # bytes, assumed: a rank's process with CUDA's host side and pinned buffers
GPUS_PER_NODE = 8  # assumed where the ranks are not said to be on fewer
FILES = 100  # assumed: libraries, logs, shards, the network of NCCL
FILES_PER_WORKER = 4  # pipes and queues


@dataclass(frozen=True)
class Node:
    """What the ranks of one machine take.

    Arguments:
        ranks: on this machine.
        shared: bytes in /dev/shm, for batches on their way from the workers.
        memory: bytes, with those.
    """

    ranks: int
    shared: float
    memory: float


def node(ranks: int, workers: int, batch_size: int, image_size: tuple[int, int], context_length: int) -> Node:
    """A machine of a run on so many ranks, with up to `GPUS_PER_NODE` of them.

    Arguments:
        workers, batch_size: of a rank.
    """
    here, (height, width) = min(ranks, GPUS_PER_NODE), image_size
    sample = 3 * height * width * PIXEL + context_length * TOKEN
    shared = here * workers * PREFETCHED * batch_size * sample
    return Node(here, shared, here * (workers * WORKER + RANK) + shared)


def open_files(ranks: int, workers: int) -> int:
    """Of one rank: a socket to every other one for the group on the CPU, and those of the workers."""
    return ranks + workers * FILES_PER_WORKER + FILES


def file_limits() -> tuple[int, int]:
    """The soft and the hard limit of this machine; `sys.maxsize` for none."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def free_shared_memory() -> int | None:
    """Bytes in /dev/shm of this machine; None where there is none."""
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None


def free_memory() -> int | None:
    """Bytes of this machine; None where it does not say."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
