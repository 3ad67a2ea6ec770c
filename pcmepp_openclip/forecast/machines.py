"""The resources of machines and cards, the needs of a run, and the batch sizes that fit a card."""

import itertools
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

UTILISATION = 0.4  # the share of the peak that training is assumed to reach where the data keep up
CONTEXT = 1.5e9  # bytes that the CUDA context, cuBLAS, cuDNN and NCCL are assumed to take
FRAGMENTS = 0.1  # assumes that 5 to 10 % of the memory is lost to fragments in the caching allocator
SIZES = (24, 40, 80)  # the GB that cards come with

MULTIPLE = 8  # batch sizes are multiples of this
CLOSE = 0.02  # the share by which a line may differ from a measured step
FARTHEST = 8  # a step is measured at up to this many times the larger known batch size
CHECKS = 3  # this many steps are measured for each card where the line is bent

PREFETCHED = 2 + 1  # batches of a worker: two wait and one is being made
PIXEL = 1  # bytes of one colour of a pixel
TOKEN = 8  # bytes of a token id
WORKER = 70e6  # bytes that a worker takes itself, measured by `python -m benchmarks data`
RANK = 4e9  # bytes that a rank's process is assumed to take, with CUDA's host side and pinned buffers
GPUS_PER_NODE = 8  # ranks of one machine, as is assumed where a run has more
FILES = 100  # files that libraries, logs, shards and NCCL are assumed to open
FILES_PER_WORKER = 4  # the files of its pipes and queues


@dataclass(frozen=True)
class Card:
    """A card with its peak TFLOPS of dense matrix products, from its data sheet.

    Arguments:
        half: TFLOPS with 16-bit inputs that are summed in fp32.
        single: TFLOPS with fp32 inputs, which open_clip lets a card round to TF32 where it has that.
        bfloat16: whether it computes in bfloat16; otherwise `half` is of float16 alone.
    """

    name: str
    half: float
    single: float
    bfloat16: bool = True


CARDS = (
    Card("V100", 125, 15.7, bfloat16=False),
    Card("RTX 4090", 165, 82.6),
    Card("A100", 312, 156),
    Card("L40S", 362, 183),
    Card("H100", 989, 494),
)


def room(size: float) -> float:
    """Return the peak that fits a card of `size` bytes, next to the context and the larger share of fragments."""
    return (size - CONTEXT) / (1 + FRAGMENTS)


def samples_per_second(card: Card, flops: float, precision: str) -> float | None:
    """Return the speed of a card at the assumed utilisation, or None for a precision that it does not have.

    Arguments:
        flops: FLOPs of a sample.
        precision: a value of --precision.
    """
    if "bf" in precision and not card.bfloat16:
        return None
    return (card.single if precision == "fp32" else card.half) * 1e12 * UTILISATION / flops


def largest(
    peak: Callable[[int], int], known: Sequence[tuple[int, int]], least: int, sizes: Sequence[float]
) -> list[int]:
    """Return the largest batch size for each card, a multiple of `MULTIPLE`; 0 where none fits.

    As few steps as possible are measured. Memory over the batch size is nearly a straight line, except where a small
    batch has its peak at the update of the weights, or where the loss holds a matrix of all pairs.

    Arguments:
        peak: gives the peak of a step in bytes by its batch size. It is called once where memory is a straight line.
        known: two batch sizes with their peaks.
        least: the peak of a step with hardly any samples, in bytes.
        sizes: the memory of the cards, in bytes.
    """
    points, bent, checked, largest_of = dict(known), False, False, {}
    farthest = FARTHEST * max(points)  # counting the loss of a far larger batch takes long
    for size in sorted(sizes, reverse=True):
        limit = room(size)
        for _ in range(CHECKS if limit > least else 0):
            at = min(_crossing(points, limit), farthest) or min(points) // 4
            if at in points or at == 0 or (checked and not bent):
                break
            expected, points[at], checked = _line(points, at), peak(at), True
            if abs(points[at] - expected) <= CLOSE * points[at]:
                break
            bent = True
        largest_of[size] = _crossing(points, limit) if limit > least else 0
    return [largest_of[size] for size in sizes]


def _crossing(points: dict[int, int], limit: float) -> int:
    """Return the batch size at which the lines through the points reach a limit, rounded down."""
    (x, low), (y, high) = _nearest(points, lambda _, size: size >= limit)
    if high <= low:
        return FARTHEST * y
    return max(0, int((x + (limit - low) * (y - x) / (high - low)) // MULTIPLE) * MULTIPLE)


def _line(points: dict[int, int], at: int) -> float:
    """Return the peak at a batch size, by the lines through the points."""
    (x, low), (y, high) = _nearest(points, lambda n, _: n >= at)
    return low + (at - x) * (high - low) / (y - x)


def _nearest(points: dict[int, int], beyond: Callable[[int, int], bool]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the first two neighbouring points whose right one is `beyond`, or the last two if none is."""
    pairs = list(itertools.pairwise(sorted(points.items())))
    return next((pair for pair in pairs if beyond(*pair[1])), pairs[-1])


@dataclass(frozen=True)
class Node:
    """The needs of the ranks of one machine.

    Arguments:
        ranks: number of ranks on this machine.
        shared: bytes in /dev/shm for batches on their way from the workers.
        memory: bytes of memory, /dev/shm included.
    """

    ranks: int
    shared: float
    memory: float


def node(ranks: int, workers: int, batch_size: int, image_size: tuple[int, int], context_length: int) -> Node:
    """Return the needs of one machine of a run, which has up to `GPUS_PER_NODE` of its ranks.

    Arguments:
        workers, batch_size: those of one rank.
    """
    here, (height, width) = min(ranks, GPUS_PER_NODE), image_size
    sample = 3 * height * width * PIXEL + context_length * TOKEN
    shared = here * workers * PREFETCHED * batch_size * sample
    return Node(here, shared, here * (workers * WORKER + RANK) + shared)


def open_files(ranks: int, workers: int) -> int:
    """Return the number of open files of a rank: a socket to every other one, the files of its workers, and others."""
    return ranks + workers * FILES_PER_WORKER + FILES


def file_limits() -> tuple[int, int]:
    """Return the soft and the hard limit of open files of this machine; `sys.maxsize` stands for no limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard


def free_shared_memory() -> int | None:
    """Return the free bytes in /dev/shm of this machine; None where there is none."""
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None


def free_memory() -> int | None:
    """Return the free bytes of memory of this machine; None where /proc/meminfo does not tell."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
