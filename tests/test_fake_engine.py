"""The Python autograd engine for fake CUDA tensors against torch's own: the same gradients where there are numbers."""

import open_clip
import pytest
import torch
from fake_training import model_on_meta
from helpers import assert_same_gradients, make_batch, make_model

from benchmarks import fake_cuda as fake
from benchmarks.fake_cuda import fake_cuda, to_cuda
from pcmepp_openclip import PCMEppLoss

TINY = "PCMEpp-tiny"
ENGINE = torch.Tensor.backward


def loss_of(model, batch, autocast, device="cpu"):
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        out = model(*batch)
        return sum(PCMEppLoss(pp_weight=0.1)(**out, output_dict=True).values())


def gradients(model, batch, autocast, backward, passes=1):
    model.zero_grad(set_to_none=True)
    for _ in range(passes):
        backward(loss_of(model, batch, autocast))
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("autocast, checkpointing", [(False, False), (True, True)])
def test_gradients_are_those_of_torch(autocast, checkpointing):
    model = make_model(TINY)
    model.set_grad_checkpointing(checkpointing)
    batch = make_batch(model)
    expected = gradients(model, batch, autocast, ENGINE)
    assert_same_gradients(gradients(model, batch, autocast, fake.backward), expected, 1e-6)
    assert {name: x.dtype for name, x in expected.items()} == {name: p.dtype for name, p in model.named_parameters()}


def test_grad_is_that_of_torch():
    model = make_model(TINY)
    batch = make_batch(model)
    leaves = [model.logit_scale, model.visual.proj, torch.zeros(2, requires_grad=True)]
    expected = torch.autograd.grad(loss_of(model, batch, False), leaves, allow_unused=True)
    actual = fake.grad(loss_of(model, batch, False), leaves)
    assert actual[2] is expected[2] is None
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_leaves_that_are_used_twice_and_gradients_that_are_none():
    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    found = []
    for backward in (ENGINE, fake.backward):
        x.grad = y.grad = None
        first, _ = (x * y).split(2, dim=1)  # the second part takes no gradient
        backward((first.sum(dim=1, keepdim=True) * x + x.expand(2, 3, 4).mean(dim=0)).exp().mean())
        found.append((x.grad, y.grad))
    for actual, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16"])
def test_fake_gradients_have_the_shapes_and_dtypes_of_real_ones(precision):
    real = open_clip.create_model(TINY, precision=precision, output_dict=True)
    images, texts = make_batch(real)
    images, autocast = images.to(torch.bfloat16 if precision == "bf16" else torch.float32), precision == "amp_bf16"
    loss_of(real, (images, texts), autocast).backward()
    model = model_on_meta(TINY, precision)
    with fake_cuda():
        to_cuda(model)
        batch = (
            torch.empty(images.shape, dtype=images.dtype, device="cuda"),
            torch.zeros(texts.shape, dtype=torch.long, device="cuda"),
        )
        loss_of(model, batch, autocast, "cuda").backward()
    expected = {name: (p.grad.shape, p.grad.dtype) for name, p in real.named_parameters()}
    assert {name: (p.grad.shape, p.grad.dtype) for name, p in model.named_parameters()} == expected
    assert {p.grad.device.type for p in model.parameters()} == {"cuda"}


def test_torch_has_its_own_engine_again():
    with fake_cuda():
        assert torch.Tensor.backward is fake.backward
    assert torch.Tensor.backward is ENGINE
