"""The bytes that ranks hand over for the loss in a training step, ours against ClipLoss, by real gloo ranks.

python -m benchmarks gather

Each rank counts what it gives to every collective of the forward and the backward pass; the gradients that DDP
averages are the same for both and left out.
"""

import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .loss import inputs, step
from .measure import Row

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "scatter"),  # the backward pass of open_clip's gather, on gloo
)
BATCH = 256  # the pairs of a rank
KINDS = ("pcmepp", "clip", "clip by default")


class Counter:
    """Stands in for `torch.distributed`'s functions and adds up the bytes that this rank hands over."""

    def __init__(self) -> None:
        self.bytes = 0
        self.inside = False
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:  # a collective that is made of others counts once
                return function(*args, **kwargs)
            sent = args[0] if name == "all_reduce" else args[1]
            sent = [] if sent is None else sent  # it is None on a rank that only receives
            for tensor in sent if isinstance(sent, (list, tuple)) else [sent]:
                self.bytes += tensor.numel() * tensor.element_size()
            self.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False

        return call


def rank_bytes(rank: int, world: int, folder: str, queue: Any) -> None:
    """Put the MB that rank 0 hands over into the queue, one number per kind of loss."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    counter = Counter()
    for kind in KINDS:
        counter.bytes = 0
        step(kind, inputs(BATCH, seed=rank), rank, world)
        if rank == 0:
            queue.put(counter.bytes / 1e6)
    dist.barrier()
    dist.destroy_process_group()


def rows() -> Iterator[Row]:
    for world in (2, 4):
        queue = mp.get_context("forkserver").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(rank_bytes, (world, folder, queue), nprocs=world, start_method="forkserver")
        ours, theirs, by_default = (queue.get() for _ in KINDS)
        title = f"bytes per rank for the loss, {world} ranks of {BATCH}, ClipLoss"
        yield Row(f"{title} with --local-loss --gather-with-grad", ours, theirs, "MB", 1.005)
        note = "each rank computes all pairs instead"
        yield Row(f"{title} by default", ours, by_default, "MB", note=note)
