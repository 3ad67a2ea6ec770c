"""PCMEppLoss against open_clip's ClipLoss: time, peak memory, and how both grow with the batch.

python -m benchmarks loss
"""

import math
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .measure import Row, peak_memory, reset_peak_memory, timed

DIM = 512


def inputs(n: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    means = [F.normalize(torch.randn(n, DIM, generator=g), dim=-1) for _ in range(2)]
    logvars = [torch.randn(n, DIM, generator=g) - 8 for _ in range(2)]
    return [x.requires_grad_() for x in (*means, *logvars, torch.tensor(14.3))]


def step(kind: str, leaves: list[torch.Tensor]) -> None:
    """Forward and backward of one loss."""
    v, t, lv, lt, s = leaves
    if kind == "clip":
        from open_clip import ClipLoss

        ClipLoss()(v, t, s).backward()
    elif kind == "pcmepp":
        from pcmepp_openclip import PCMEppLoss

        ones = torch.ones(len(v))
        terms = PCMEppLoss()(v, t, s, lv, lt, s.repeat(len(v)), ones, ones, output_dict=True)
        assert isinstance(terms, dict)
        torch.stack(list(terms.values())).sum().backward()
    else:  # the way of the authors' code, for the matching term alone
        d = ((v[:, None] - t[None]) ** 2).sum(-1) + (lv.exp()[:, None] + lt.exp()[None]).sum(-1)
        F.binary_cross_entropy_with_logits(1 - d, torch.eye(len(v))).backward()


def rows() -> Iterator[Row]:
    for n in (1024, 2048, 4096, 8192):
        leaves = inputs(n)
        bar = 1.0 if n >= 4096 else None
        yield timed(
            f"loss, N = {n}, time, ClipLoss", lambda x=leaves: step("pcmepp", x), lambda x=leaves: step("clip", x), bar
        )
    leaves = inputs(256)
    yield timed("loss, N = 256, time, N x M x D", lambda: step("pcmepp", leaves), lambda: step("nmd", leaves), None, 3)
    memory = {}
    for n in (1024, 4096, 8192, 16384):
        memory[n] = peak("pcmepp", n)
        if n < 16384:
            yield Row(f"loss, N = {n}, memory, ClipLoss", memory[n], peak("clip", n), "MB", 0.6 if n == 8192 else None)
    yield Row("loss, N = 256, memory, N x M x D", peak("pcmepp", 256), peak("nmd", 256), "MB")
    growth = math.log(memory[16384] / memory[4096]) / math.log(4)
    yield Row("loss, memory from N = 4096 to 16384 grows as N^", growth, 1, "", 1.2)


def peak(kind: str, n: int) -> float:
    """MB that a step adds to what the process had with its inputs and the code loaded, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.loss", kind, str(n)], capture_output=True, text=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    kind, n = sys.argv[1], int(sys.argv[2])
    step(kind, inputs(8))
    leaves = inputs(n)
    before = reset_peak_memory()
    step(kind, leaves)
    print(peak_memory() - before)
