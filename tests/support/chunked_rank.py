"""One rank of the test of `ChunkedClipLoss`, by `ranks.py`: its value and gradients are those of open_clip's loss."""

import os

import open_clip
import torch
import torch.distributed as dist
import torch.nn.functional as F

import pcmepp_openclip as pp


def leaves(n=29, dim=8, scale=14.0, dtype=torch.float64):
    """(image features, text features, scale, bias) with captions near their images."""
    g = torch.Generator().manual_seed(0)
    shared = torch.randn(n, dim, generator=g, dtype=torch.float64)
    features = [F.normalize(shared + torch.randn(n, dim, generator=g, dtype=torch.float64), dim=-1) for _ in range(2)]
    scalars = [torch.tensor(x, dtype=torch.float64) for x in (scale, -3.0)]
    return [x.to(dtype).requires_grad_() for x in (*features, *scalars)]


def relative(x, y):
    return ((x - y).norm() / y.norm().clamp(min=1e-12)).item()


def main(argv):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = slice(rank * 12 // world, (rank + 1) * 12 // world)
    for flags in ({}, {"gather_with_grad": True}, {"local_loss": True, "gather_with_grad": True}):
        sides = []
        for kind in (pp.ChunkedClipLoss, open_clip.ClipLoss):
            v, t, s, _ = leaves(n=12, dtype=torch.float32)
            v, t = (x.detach()[own].clone().requires_grad_() for x in (v, t))
            value = kind(**flags, rank=rank, world_size=world)(v, t, s)
            value.backward()
            dist.all_reduce(s.grad)  # a rank's own differs with local_loss, and DDP takes the mean
            sides.append((value.detach(), v.grad, t.grad, s.grad / world))
        errors = [relative(x, y) for x, y in zip(*sides, strict=True)]
        assert max(errors) < 1e-6, (flags, errors)
    dist.barrier()
    dist.destroy_process_group()
