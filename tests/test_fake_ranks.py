"""The loss on one of 2, 64 and 1,024 ranks that do not exist: which collectives it calls, in which order, of how many
bytes.

The lists below are those of a step of the training loop. A change of the loss that changes them costs every run on many
ranks, and a rank that calls others than its peers waits forever.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_training import arguments, training_of
from open_clip import ClipLoss

from benchmarks.fake_cuda import fake_cuda
from benchmarks.traffic import Traffic
from pcmepp_openclip import PCMEppLoss
from pcmepp_openclip.forecast.counts import Collective
from pcmepp_openclip.forecast.step import fake_ranks

D, FLOAT = 512, 4
RANKS = [2, 64, 1024]


def forward_collectives(n, ranks, terms):
    """Means and offsets of the texts; the largest logit and the sum of each column; the values, to be logged."""
    N = n * ranks
    gathered = [("all_gather", N * D * FLOAT), ("all_gather", N * FLOAT)]
    return [*gathered, ("all_reduce", N * FLOAT), ("all_reduce", N * FLOAT), ("all_reduce", (terms + 1) * FLOAT)]


def backward_collectives(n, ranks):
    """What was gathered, in reverse."""
    N = n * ranks
    return [("reduce_scatter", N * FLOAT), ("reduce_scatter", N * D * FLOAT)]


def features(n):
    """The arguments of the loss."""
    names = ("image_features", "text_features", "image_logvar", "text_logvar")
    scalars = ("logit_scale", "clip_scale", "match_scale", "match_shift")
    out = {name: torch.empty(n, D, device="cuda").requires_grad_() for name in names}
    out |= {name: torch.empty((), device="cuda").requires_grad_().expand(n) for name in scalars}
    return out | {"logit_scale": torch.empty((), device="cuda")}


def traffic_of(loss, n):
    """(of the forward pass, of the backward pass)."""
    given = features(n)
    with Traffic() as forward:
        total = torch.stack(list(loss(**given, output_dict=True).values())).sum()
    with Traffic() as backward:
        total.backward()
    return forward, backward


def kinds(traffic):
    return [(each.kind, each.bytes) for each in traffic.collectives]


@pytest.mark.parametrize("ranks, weights", [(2, {}), (64, {"pp_weight": 0.1}), (1024, {})], ids=str)
def test_the_collectives_of_the_loss(ranks, weights):
    n = 16
    with fake_ranks(ranks), fake_cuda():
        forward, backward = traffic_of(PCMEppLoss(world_size=ranks, **weights), n)
    terms, keys = (4, [("all_gather", n * ranks * FLOAT), *[("all_gather", n * ranks * 8)] * 2]) if weights else (3, [])
    expected = forward_collectives(n, ranks, terms)
    assert kinds(forward) == [*expected[:2], *keys, *expected[2:]]
    assert kinds(backward) == backward_collectives(n, ranks)
    every = forward.collectives + backward.collectives
    assert {each.device for each in every} == {"cuda"}
    count = len(every) - 1  # without the values
    said = "or {} with pseudo-positives" if weights else "The loss calls {} collectives"
    assert said.format(count) in (Path(__file__).parent.parent / "docs/gpus.md").read_text()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_sends_half_of_what_clip_sends(ranks):
    n = 16
    with fake_ranks(ranks), fake_cuda():
        ours = sum(each.sent(ranks) for each in traffic_of(PCMEppLoss(world_size=ranks), n))
    clip = 4 * n * (ranks - 1) * D * FLOAT  # image and text features, forward and backward
    assert 0.5 < ours / clip < 0.51


def test_the_collectives_of_clip():
    """Of stock open_clip with the flags for many ranks: that they are counted as ours are."""
    n, ranks = 16, 8
    with fake_ranks(ranks), fake_cuda():
        given = {
            name: x for name, x in features(n).items() if name in ("image_features", "text_features", "logit_scale")
        }
        with Traffic() as traffic:
            ClipLoss(local_loss=True, gather_with_grad=True, world_size=ranks)(**given).backward()
    size = n * ranks * D * FLOAT
    assert kinds(traffic) == [("all_gather", size)] * 2 + [("reduce_scatter", size)] * 2
    assert traffic.sent(ranks) == 4 * n * (ranks - 1) * D * FLOAT


@pytest.mark.parametrize("ranks", RANKS)
def test_the_collectives_of_a_step_between_logs_and_of_a_logged_one(tmp_path, ranks):
    """The loss as `pcmepp train` watches it. A logged step also gathers what pseudo-positives are counted by, and the
    columns of the diagnostics."""
    n, N = 16, 16 * ranks
    expected = forward_collectives(n, ranks, 3)
    counted = [("all_gather", N * FLOAT), ("all_gather", N * 8), ("all_gather", N * 8)]
    diagnosed = [*(("all_reduce", N * size) for size in (4, 8, 4, 4, 8)), ("all_gather", N * 24)]
    args = arguments(tmp_path, "--precision", "fp32", model="PCMEpp-tiny")
    with training_of(args, None) as run, fake_ranks(ranks), fake_cuda():
        run.optimizer = run.scaler = None
        run._watch(PCMEppLoss(world_size=ranks))
        loss = run.monitor
        loss.before_step(1, 0, logged=False)
        between, backward = traffic_of(loss, n)
        loss.before_step(2, 0, logged=True)
        logged, _ = traffic_of(loss, n)
    assert kinds(between) == expected[:-1]
    assert kinds(backward) == backward_collectives(n, ranks)
    assert kinds(logged) == [*expected[:2], *counted, *expected[2:], *diagnosed]


def test_nccl_scatters_and_gloo_reduces(monkeypatch):
    """On NCCL a rank gets its own rows of the gradient; gloo has no such collective, and sends twice as much."""
    ranks, n = 64, 16
    with fake_ranks(ranks), fake_cuda():
        assert dist.get_backend() == "nccl"
        _, nccl = traffic_of(PCMEppLoss(world_size=ranks), n)
        monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
        _, gloo = traffic_of(PCMEppLoss(world_size=ranks), n)
    assert [each.kind for each in nccl.collectives] == ["reduce_scatter"] * 2
    assert [each.kind for each in gloo.collectives] == ["all_reduce"] * 2
    assert gloo.sent(ranks) == 2 * nccl.sent(ranks)


def test_a_planted_collective_is_found():
    class Planted(PCMEppLoss):
        def forward(self, *args, **kwargs):
            dist.all_reduce(torch.ones(3))  # on the CPU, which NCCL refuses
            return super().forward(*args, **kwargs)

    with fake_ranks(2), fake_cuda():
        forward, _ = traffic_of(Planted(world_size=2), 16)
    assert forward.collectives[0] == Collective("all_reduce", 12, "cpu")
    assert kinds(forward)[1:] == forward_collectives(16, 2, 3)


def test_a_single_rank_calls_none():
    with fake_ranks(1), fake_cuda():
        forward, backward = traffic_of(PCMEppLoss(), 16)
    assert forward.collectives == backward.collectives == []


def test_kernels_and_bytes_of_a_computation():
    with fake_cuda():
        a, b = torch.empty(10, 20, device="cuda"), torch.empty(20, 30, device="cuda")
        with Traffic() as traffic:
            a.t()[:5].unsqueeze(0)  # views
            torch.empty(1000, device="cuda")  # an allocation
            assert (traffic.kernels, traffic.bytes) == (0, 0)
            product = a @ b
            assert (traffic.kernels, traffic.bytes) == (1, FLOAT * (200 + 600 + 300))
            product.mul_(2)  # read and written
            assert (traffic.kernels, traffic.bytes) == (2, FLOAT * (1100 + 600))
            product + torch.empty((), device="cuda").expand(10, 30)  # one number
            assert (traffic.kernels, traffic.bytes) == (3, FLOAT * (1700 + 601))
            torch.zeros_like(product)  # written only
            assert (traffic.kernels, traffic.bytes) == (4, FLOAT * (2301 + 300))


@pytest.mark.parametrize("kind, factor", [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_bytes_in_a_ring(kind, factor):
    """By a ring that is played through: W - 1 rounds in which every rank passes one chunk on, twice for a reduction."""
    for ranks in (2, 3, 8):
        rounds = factor * (ranks - 1)
        assert Collective(kind, 240, "cuda").sent(ranks) == pytest.approx(sum(240 / ranks for _ in range(rounds)))
