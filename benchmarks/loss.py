"""PCMEppLoss against open_clip's ClipLoss, and the N x M x D way: time, peak memory, growth with the batch.

python -m benchmarks loss
"""

import functools
import math
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .measure import Row, elsewhere, peak_memory, reset_peak_memory, timed

DIM = 512


def inputs(n: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    means = [F.normalize(torch.randn(n, DIM, generator=g), dim=-1) for _ in range(2)]
    logvars = [torch.randn(n, DIM, generator=g) - 8 for _ in range(2)]
    return [x.requires_grad_() for x in (*means, *logvars, torch.tensor(14.3))]


def step(kind: str, leaves: list[torch.Tensor], rank: int = 0, world_size: int = 1) -> None:
    """Forward and backward of one loss; CLIP's with the flags for large runs, where its gathered features have
    gradients and a rank takes only its own rows."""
    v, t, lv, lt, s = leaves
    if kind == "clip":
        from open_clip import ClipLoss

        ranks = {"rank": rank, "world_size": world_size}
        ClipLoss(local_loss=True, gather_with_grad=True, **ranks)(v, t, s).backward()
    elif kind == "pcmepp":
        from pcmepp_openclip import PCMEppLoss

        ones = torch.ones(len(v))
        loss = PCMEppLoss(rank=rank, world_size=world_size)
        terms = loss(v, t, s, lv, lt, s.repeat(len(v)), ones, ones, output_dict=True)
        assert isinstance(terms, dict)
        torch.stack(list(terms.values())).sum().backward()
    else:  # the way of the authors' code, for the matching term alone
        d = ((v[:, None] - t[None]) ** 2).sum(-1) + (lv.exp()[:, None] + lt.exp()[None]).sum(-1)
        F.binary_cross_entropy_with_logits(1 - d, torch.eye(len(v))).backward()


def rows() -> Iterator[Row]:
    seconds = {}
    for n in (1024, 2048, 4096, 8192):
        leaves = inputs(n)
        ours, theirs = (functools.partial(step, kind, leaves) for kind in ("pcmepp", "clip"))
        seconds[n] = timed(f"loss, N = {n}, time, ClipLoss", ours, theirs, 1.0 if n >= 4096 else None)
        yield seconds[n]
    yield growth("loss, time", seconds[1024], seconds[8192], 8)
    leaves = inputs(256)
    ours, theirs = (functools.partial(step, kind, leaves) for kind in ("pcmepp", "nmd"))
    yield timed("loss, N = 256, time, N x M x D", ours, theirs, None)
    memory = {}
    for n in (1024, 4096, 8192):
        bar = 0.6 if n == 8192 else None
        memory[n] = Row(f"loss, N = {n}, memory, ClipLoss", peak("pcmepp", n), peak("clip", n), "MB", bar)
        yield memory[n]
    yield growth("loss, memory", memory[1024], memory[8192], 8)
    yield Row("loss, N = 256, memory, N x M x D", peak("pcmepp", 256), peak("nmd", 256), "MB")


def growth(what: str, small: Row, large: Row, times: int) -> Row:
    """The exponents with which ours and theirs grow with N, `times` larger in the second row."""
    ours, theirs = (
        math.log(b / a) / math.log(times) for a, b in ((small.ours, large.ours), (small.theirs, large.theirs))
    )
    return Row(f"{what} grows from N = 1024 to 8192 as N to the power of", ours, theirs, "")


def peak(kind: str, n: int) -> float:
    """MB that a step adds to what the process had with its inputs and the code loaded, in a process of its own."""
    return elsewhere("benchmarks.loss", kind, n)


if __name__ == "__main__":
    kind, n = sys.argv[1], int(sys.argv[2])
    step(kind, inputs(8))
    leaves = inputs(n)
    before = reset_peak_memory()
    step(kind, leaves)
    print(peak_memory() - before)
