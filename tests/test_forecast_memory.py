"""The memory that is forecast for a training step, against real steps and against counts by hand."""

import open_clip
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import alone
from benchmarks.step import peak
from pcmepp_openclip.forecast.counts import BLOCK, LiveBytes
from pcmepp_openclip.forecast.step import FakeTraining, as_on_a_card, step_costs
from pcmepp_openclip.host.loss import pcmepp_loss

TINY = "PCMEpp-tiny"


def test_a_count_by_hand():
    with FakeTensorMode(), LiveBytes() as memory:
        a = torch.empty(1024, dtype=torch.float32)
        assert memory.now == 4096
        b = a.view(2, 512)[0]  # no storage of its own
        assert memory.now == 4096
        del a
        assert memory.now == 4096
        c = torch.empty(1)
        torch.empty(10**6, device="meta")
        assert memory.now == 4096 + BLOCK
        del b
        assert (memory.now, memory.peak) == (BLOCK, 4096 + BLOCK)
        memory.restart()
        c.add_(1)
        assert memory.peak == memory.now == BLOCK


def test_what_is_saved_for_the_backward_pass_is_dropped_on_the_way():
    """Of a chain of squares, each saves its input: at the end of the backward pass two gradients are left."""
    with FakeTensorMode(), LiveBytes() as memory:
        x = leaf = torch.empty(256, requires_grad=True)
        for _ in range(10):
            x = x.square()
        loss = x.sum()
        del x
        assert memory.now == 10 * 1024 + BLOCK  # the last square is not needed
        memory.restart()
        loss.backward()
        assert memory.peak < 15 * 1024
        assert memory.now == 2 * 1024 + BLOCK and leaf.grad is not None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_holds_no_matrix_of_all_pairs_of_tokens(dtype, masked):
    length, batch, width = 1024, 2, 64
    with FakeTensorMode(), LiveBytes() as memory:
        attention = nn.MultiheadAttention(width, 4, batch_first=True, dtype=dtype)
        x = torch.empty(batch, length, width, dtype=dtype, requires_grad=True)
        mask = torch.empty(length, length, dtype=dtype) if masked else None
        memory.restart()
        before = memory.now
        out, _ = attention(x, x, x, need_weights=False, attn_mask=mask)
        assert out.shape == x.shape and out.dtype == dtype
        out.sum().backward()
        assert x.grad is not None and x.grad.dtype == dtype
        assert memory.peak - before < batch * 4 * length**2 * dtype.itemsize / 2


def test_norms_under_autocast_are_those_of_a_card():
    """In fp32, also where they are computed again for the backward pass."""
    with FakeTensorMode(), as_on_a_card(), torch.autocast("cpu", torch.bfloat16):
        norm, x = nn.LayerNorm(8), torch.empty(4, 8, dtype=torch.bfloat16, requires_grad=True)
        out = checkpoint(norm, x, use_reentrant=False)
        assert out.dtype == torch.float32
        out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def forecast_on_cpu(name, batch):
    with torch.device("meta"):
        model = open_clip.create_model(name, device="meta", output_dict=True)
    loss = pcmepp_loss(model.pcmepp_cfg) if name == TINY else open_clip.ClipLoss()
    return FakeTraining(model, loss, precision="fp32").measure(batch)


def test_it_is_what_a_real_step_takes_on_a_cpu():
    batch = 1024
    (measured,) = alone(peak, (TINY, batch))
    assert forecast_on_cpu(TINY, batch).peak / 2**20 == pytest.approx(measured, rel=0.1)


def test_parts():
    with torch.device("meta"):
        model = open_clip.create_model(TINY, device="meta")
    one, many = (step_costs(TINY, 64, precision="amp", ranks=ranks) for ranks in (1, 8))
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert one.weights == pytest.approx(parameters, rel=0.02)  # rounded to blocks, and with the text tower's mask
    assert one.optimizer == pytest.approx(2 * parameters, rel=0.02)
    assert one.buckets == 0 and many.buckets == pytest.approx(parameters, rel=0.02)
    for each in (one, many):
        parts = each.weights, each.gradients, each.optimizer, each.buckets, each.activations
        assert sum(parts) == each.peak and min(parts) >= 0


def test_precision_batch_size_checkpointing_and_accumulation():
    with torch.device("meta"):
        model = open_clip.create_model(TINY, device="meta", output_dict=True)
    forecast, batch = FakeTraining(model, pcmepp_loss(model.pcmepp_cfg), precision="fp32"), 256
    whole = forecast.measure(batch)
    assert forecast.measure(batch) == whole  # nothing is left of a step
    assert forecast.measure(2 * batch).activations == pytest.approx(2 * whole.activations, rel=0.05)
    assert forecast.measure(batch, grad_checkpointing=True).activations < 0.8 * whole.activations
    images, matrix = 3 * batch * 3 * 32 * 32 * 4, (4 * batch) ** 2 * 4
    more = forecast.measure(batch, accum_freq=4).activations - whole.activations
    assert images < more < images + 6 * matrix
    assert step_costs(TINY, batch, precision="bf16").activations < 0.7 * whole.activations


def test_plain_models_and_frozen_parameters():
    with torch.device("meta"):
        model = open_clip.create_model("ViT-S-32", device="meta", output_dict=True)
    model.lock_image_tower()
    frozen = FakeTraining(model, open_clip.ClipLoss(), precision="fp32").measure(8)
    text = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert frozen.optimizer == pytest.approx(2 * text, rel=0.02)
    assert frozen.activations < step_costs("ViT-S-32", 8, precision="fp32").activations
