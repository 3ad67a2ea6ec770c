"""What is forecast beside the memory: compute, bytes on the wire, batch sizes that fit, machines and hours."""

from argparse import Namespace

import open_clip
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import flops
from pcmepp_openclip import ChunkedClipLoss, PCMEppLoss
from pcmepp_openclip.forecast import machines, report
from pcmepp_openclip.forecast.counts import StepCounter
from pcmepp_openclip.forecast.machines import (
    CARDS,
    CONTEXT,
    FRAGMENTS,
    MULTIPLE,
    UTILISATION,
    largest,
    samples_per_second,
)
from pcmepp_openclip.forecast.report import forecast_line
from pcmepp_openclip.forecast.step import FakeTraining, fake_ranks
from pcmepp_openclip.host.flags import planned_loss
from pcmepp_openclip.host.loss import pcmepp_loss
from pcmepp_openclip.training import command

TINY = "PCMEpp-tiny"
RUN = {"batch_size": 64, "accum_freq": 1, "grad_checkpointing": False, "precision": "amp", "world_size": 8}
RUN |= {"workers": 2, "samples_per_second_per_gpu": None}


def on_meta():
    with torch.device("meta"):
        return open_clip.create_model(TINY, device="meta", output_dict=True)


@pytest.mark.parametrize("accum_freq", [1, 3])
def test_flops_are_those_of_torchs_counter(accum_freq):
    batch = 8
    model = on_meta()
    costs = FakeTraining(model, pcmepp_loss(model.pcmepp_cfg), precision="fp32").measure(batch, accum_freq)
    of_loss = 5 * 2 * (accum_freq * batch) ** 2 * 64  # five products of all means; the counter ran without the loss
    assert costs.flops - of_loss == pytest.approx(
        batch * flops.count(TINY).flops, rel=0.02
    )  # fused attention computes once more
    assert 0.3 < costs.forward_flops / costs.flops < 0.36


def test_bytes_on_the_wire_by_hand():
    ranks, rows = 4, 100
    with fake_ranks(ranks), FakeTensorMode(), StepCounter() as counter:
        x, every = torch.empty(rows), torch.empty(ranks * rows)
        dist.all_gather_into_tensor(every, x)
        dist.reduce_scatter_tensor(x, every)
        dist.all_reduce(every)  # as a reduce-scatter and a gather
    once = 3 * rows * 4  # its own rows to each of the others
    assert [each.sent(ranks) for each in counter.collectives] == [once, once, 2 * once]
    assert not dist.is_initialized()


def test_what_the_loss_of_many_ranks_sends():
    """The means of all texts forward, their gradients backward, and a few numbers per text."""
    ranks, batch, dim = 16, 32, 64
    model = on_meta()
    loss = pcmepp_loss(model.pcmepp_cfg, world_size=ranks)
    costs = FakeTraining(model, loss, precision="amp_bf16", ranks=ranks).measure(batch)
    means = (ranks - 1) * batch * dim * 4
    assert 2 * means < costs.sent < 2 * means * (1 + 8 / dim)
    gradients = 4 * sum(p.numel() for p in model.parameters())
    assert costs.reduced == pytest.approx(2 * gradients * (ranks - 1) / ranks, rel=0.02)


def slowly(peak, size):
    """Tries one batch size after the other."""
    batch_size = 0
    while peak(batch_size + MULTIPLE) * (1 + FRAGMENTS) + CONTEXT <= size:
        batch_size += MULTIPLE
    return batch_size


@pytest.mark.parametrize(
    ("fixed", "linear", "square", "floor"),
    [(3e9, 80e6, 0, 0), (3e9, 8e6, 0, 4e9), (2e9, 30e6, 80e3, 0), (50e9, 1e9, 0, 60e9)],
)
@pytest.mark.parametrize("first", [64, 512])
def test_the_largest_batch_size_is_that_of_a_search(fixed, linear, square, floor, first):
    calls = []

    def peak(batch_size):
        return int(max(floor, fixed + linear * batch_size + square * batch_size**2))

    def counted(batch_size):
        calls.append(batch_size)
        return peak(batch_size)

    sizes = [24e9, 40e9, 80e9]
    found = largest(counted, [(first, peak(first)), (2 * first, peak(2 * first))], peak(0), sizes)
    assert found == pytest.approx([slowly(peak, size) for size in sizes], rel=0.05, abs=MULTIPLE)
    assert len(calls) <= (7 if floor or square else 1)


def test_a_machine_by_hand():
    node = machines.node(ranks=64, workers=6, batch_size=128, image_size=(224, 224), context_length=77)
    assert node.ranks == 8
    assert node.shared == 8 * 6 * 3 * 128 * (3 * 224 * 224 + 77 * 8)
    small = machines.node(ranks=2, workers=6, batch_size=128, image_size=(224, 224), context_length=77)
    assert small.shared == node.shared / 4
    assert node.shared < node.memory
    assert machines.open_files(ranks=500, workers=6) - machines.open_files(ranks=100, workers=6) == 400


def test_cards():
    v100, a100 = (next(card for card in CARDS if card.name == name) for name in ("V100", "A100"))
    assert samples_per_second(a100, 1e11, "amp_bf16") == pytest.approx(312e12 * UTILISATION / 1e11)
    assert samples_per_second(a100, 1e11, "fp32") == pytest.approx(156e12 * UTILISATION / 1e11)
    assert samples_per_second(v100, 1e11, "amp_bf16") is None
    assert samples_per_second(v100, 1e11, "amp") == pytest.approx(125e12 * UTILISATION / 1e11)


def rows(model=None, why_not="", **changes):
    model, run = model or on_meta(), Namespace(**{**RUN, **changes})
    cfg = getattr(model, "pcmepp_cfg", None)
    loss = pcmepp_loss(cfg, world_size=run.world_size) if cfg else open_clip.ClipLoss()
    return {name.strip(): text for name, text in report.rows(run, model, loss, 10**6, why_not)}


def test_the_rows_of_a_dry_run():
    out = rows(accum_freq=2)
    assert "activations" in out["GPU memory"] and "DDP buckets" in out["GPU memory"]
    assert "assumed" in out["a card adds"] and "assumed" in out["time"]
    assert {"with --grad-checkpointing", "largest --batch-size", "machine", "open files"} <= out.keys()
    assert "gradients" in out["sent per step"] and "% more compute" in out["accumulation"]
    assert all("GPU-hours" in out[card.name] for card in CARDS)
    assert len(out) <= 16
    timed = rows(why_not="this run has --device cpu.", samples_per_second_per_gpu=500.0)
    assert timed["GPU memory"] == "not forecast: this run has --device cpu."
    hours = 10**6 / 500 / 3600
    assert timed["time"] == f"{hours / 8:.2g} hours, {hours:.2g} GPU-hours at 500 samples/s per GPU"
    assert "A100" not in timed


def test_a_model_that_cannot_be_forecast_costs_no_other_row():
    class Curious(torch.nn.Module):
        context_length = 32

        def __init__(self):
            super().__init__()
            self.visual = torch.nn.Linear(1, 1, device="meta")
            self.visual.image_size = 32

        def set_grad_checkpointing(self, on):
            pass

        def forward(self, image, text):
            return {"image_features": image[: int(text.sum())]}  # depends on numbers, which there are none of

    out = rows(Curious())
    assert out["GPU memory"].startswith("not forecast: ") and "machine" in out
    assert not dist.is_initialized()


def arguments(*more):
    flags = ["--model", TINY, "--dataset-type", "synthetic", "--train-num-samples", "64", "--workers", "0", *more]
    return command.prepare(flags)[0]


def test_one_sentence_for_an_error():
    args = arguments("--batch-size", "48", "--precision", "amp")
    args.world_size = 4
    line = forecast_line(args)
    assert line is not None and line.count("\n") == 0 and line.endswith(" GB.")
    assert "--batch-size 48" in line and "--grad-checkpointing" in line
    assert forecast_line(Namespace(model="no such model")) is None


def test_the_loss_of_a_forecast_is_that_of_the_flags():
    for flags, loss in (([], open_clip.ClipLoss), (["--chunked-clip-loss"], ChunkedClipLoss)):
        assert type(planned_loss(arguments("--model", "ViT-B-32", *flags))) is loss
    assert type(planned_loss(arguments())) is PCMEppLoss


@pytest.mark.parametrize("speed", ["0", "-1", "inf", "nan"])
def test_a_speed_that_is_none(speed):
    with pytest.raises(ValueError, match="--samples-per-second-per-gpu must be"):
        arguments("--dry-run", "2", "--samples-per-second-per-gpu", speed)


def test_a_speed_without_a_dry_run():
    with pytest.raises(ValueError, match="add that, or drop it"):
        arguments("--samples-per-second-per-gpu", "5")
