"""One rank of many that do not exist: collectives return at once, with the shapes that they would have."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Within it, this process is rank 0 of a group that says that it is NCCL's; of no group for a single rank."""
    if ranks == 1:
        yield
        return
    if dist.is_initialized():
        raise ValueError("This process is a rank of a run already.")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with mock.patch.object(dist, "get_backend", lambda *_, **__: "nccl"):
            yield
    finally:
        dist.destroy_process_group()
