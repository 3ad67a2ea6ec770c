"""PCMEppLoss and ChunkedClipLoss against open_clip's ClipLoss, and the N x M x D way: time, memory, growth with N.

python -m benchmarks loss
"""

import contextlib
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from .measure import Row, added_memory, alone, busy_cores, threads, timed

DIM = 512
SIZES = (1024, 2048, 4096, 8192)
BARS = {1024: (1.0, 1.1), 8192: (1.0, 0.6)}  # the bars of time and memory by N
THREADS = {1: "one thread", 2: "two threads"}


def inputs(n: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    means = [F.normalize(torch.randn(n, DIM, generator=g), dim=-1) for _ in range(2)]
    logvars = [torch.randn(n, DIM, generator=g) - 8 for _ in range(2)]
    return [x.requires_grad_() for x in (*means, *logvars, torch.tensor(14.3))]


def step(kind: str, leaves: list[torch.Tensor], rank: int = 0, world_size: int = 1) -> None:
    """Run forward and backward of one loss.

    "clip" is with the flags for large runs, with which gathered features have gradients and a rank takes only its own
    rows; "clip by default" is without them.
    """
    v, t, lv, lt, s = leaves
    if kind.startswith("clip"):
        from open_clip import ClipLoss

        flags = {"local_loss": kind == "clip", "gather_with_grad": kind == "clip"}
        ClipLoss(**flags, rank=rank, world_size=world_size)(v, t, s).backward()
    elif kind == "chunked clip":
        from pcmepp_openclip import ChunkedClipLoss

        loss = ChunkedClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
        value = loss(v, t, s)
        assert isinstance(value, torch.Tensor)
        value.backward()
    elif kind == "pcmepp":
        from pcmepp_openclip import PCMEppLoss

        ones = torch.ones(len(v))
        terms = PCMEppLoss(rank=rank, world_size=world_size)(
            v, t, s, lv, lt, s.repeat(len(v)), ones, ones, output_dict=True
        )
        assert isinstance(terms, dict)
        torch.stack(list(terms.values())).sum().backward()
    else:  # this is the way of the authors' code, for the matching term alone
        d = ((v[:, None] - t[None]) ** 2).sum(-1) + (lv.exp()[:, None] + lt.exp()[None]).sum(-1)
        F.binary_cross_entropy_with_logits(1 - d, torch.eye(len(v))).backward()


def rows() -> Iterator[Row]:
    yield from against("pcmepp", "clip", "ClipLoss", SIZES, THREADS, BARS)
    yield time_row("pcmepp", "clip", "ClipLoss", 1024, 2, None, busy=True)
    yield from against("chunked clip", "clip", "ChunkedClipLoss by ClipLoss", (1024, 8192), (1,), BARS)
    yield from against("pcmepp", "nmd", "N x M x D", those_that_fit(), (1,), {})


def against(
    ours: str,
    other: str,
    title: str,
    sizes: Sequence[int],
    numbers: Iterable[int],
    bars: dict[int, tuple[float, float]],
) -> Iterator[Row]:
    """Yield time and memory of our loss and another, and how they grow.

    Arguments:
        ours, other: the kinds, see `step`.
        numbers: the numbers of threads.
        bars: the bars of time and memory by size.
    """
    seconds: dict[int, dict[int, Row]] = {number: {} for number in numbers}
    memory = {}
    for n in sizes:
        bar, memory_bar = bars.get(n, (None, None))
        for number, rows in seconds.items():
            rows[n] = time_row(ours, other, title, n, number, bar)
            yield rows[n]
        our_peak, their_peak = alone(peak, (ours, n), (other, n))
        memory[n] = Row(f"loss, N = {n}, memory, {title}", our_peak, their_peak, "MB", memory_bar)
        yield memory[n]
    if len(sizes) > 1:
        for number, rows in seconds.items():
            yield growth(f"loss, time on {THREADS[number]}, {title}", rows)
        yield growth(f"loss, memory, {title}", memory)


def time_row(ours: str, other: str, title: str, n: int, number: int, bar: float | None, busy: bool = False) -> Row:
    """Return the time of both kinds on this many threads. With `busy`, other processes use the cores, too."""
    leaves = inputs(n)
    our_step, their_step = (functools.partial(step, kind, leaves) for kind in (ours, other))
    repeats = 1 if other == "nmd" else max(4, 2**14 // n)
    where = THREADS[number] + (" of busy cores" if busy else "")
    with threads(number), busy_cores(number) if busy else contextlib.nullcontext():
        return timed(f"loss, N = {n}, time on {where}, {title}", our_step, their_step, bar, repeats)


def peak(kind: str, n: int) -> float:
    """Return the MB that a step adds to the memory of the process with its inputs and the code loaded."""
    step(kind, inputs(8))
    leaves = inputs(n)
    return added_memory(lambda: step(kind, leaves))


def growth(title: str, rows: dict[int, Row]) -> Row:
    """Return the exponents with which ours and theirs grow with N, fitted over the rows."""
    sizes = [math.log(n) for n in rows]
    ours, theirs = (
        statistics.linear_regression(sizes, [math.log(getattr(row, whose)) for row in rows.values()]).slope
        for whose in ("ours", "theirs")
    )
    return Row(f"{title}, grows from N = {min(rows)} to {max(rows)} as N to the power of", ours, theirs, "")


def those_that_fit() -> list[int]:
    """Return the N whose N x M x D tensors, about four at once, fit into half of the memory that is free."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    return [n for n in (256, 512, 1024) if n == 256 or 4 * 4 * n * n * DIM < free / 2]
