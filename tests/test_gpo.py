"""GPO by itself: against its definition, over lengths, precisions and the ways in which torch runs it."""

import pytest
import torch
from helpers import worst_error
from slow_gpo import slow_gpo, slow_token_pool, slow_weights
from torch import nn

from benchmarks.gpo import plain_gpo
from pcmepp_openclip.models.gpo import GPO, TokenPool

MASKS = {
    "all": None,
    "lengths": torch.arange(7) < torch.tensor([7, 1, 4, 4, 2])[:, None],
    "shorter than the batch": torch.arange(7) < torch.tensor([3, 1, 4, 4, 2])[:, None],
    "any places": torch.tensor([[1, 0, 1, 1, 0, 0, 1]] * 3 + [[0, 0, 0, 0, 0, 1, 0], [1] * 7]).bool(),
}


def gpo(seed: int = 0) -> GPO:
    """One whose weights are far from equal."""
    torch.manual_seed(seed)
    made = GPO()
    with torch.no_grad():
        made.score.weight.mul_(4)
    return made


def features(seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 7, 6, generator=generator).to(dtype).requires_grad_()


def slow(made, x, valid):
    rows = x if valid is None else [x_LD[valid_L] for x_LD, valid_L in zip(x, valid, strict=True)]
    return torch.stack([slow_gpo(made, row) for row in rows])


def with_gradients(made, x, out) -> dict[str, torch.Tensor]:
    parameters = dict(made.named_parameters())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    grads = torch.autograd.grad((out * weight).sum(), [x, *parameters.values()])
    return {"out": out, "x": grads[0], **dict(zip(parameters, grads[1:], strict=True))}


@pytest.mark.parametrize("valid", MASKS.values(), ids=MASKS)
def test_values_and_gradients_are_those_of_the_definition(valid):
    made, x = gpo(), features()
    found, expected = (with_gradients(made, x, f(made, x, valid)) for f in (lambda g, *a: g(*a), slow))
    for name, value in expected.items():
        scale = value.abs().max().item()
        assert scale > 0 and worst_error(found[name], value) <= 1e-5 * scale, name
    hidden = torch.zeros(5, 7, dtype=torch.bool) if valid is None else ~valid
    assert (found["x"][hidden] == 0).all()


def test_a_length_has_its_weights_whatever_else_is_in_the_batch():
    made = gpo()
    by_length = {length: slow_weights(made, length) for length in (1, 2, 5, 9)}
    of = made.weights_of(torch.tensor([5, 9, 1, 5, 2]), longest=9)
    for row, length in zip(of, (5, 9, 1, 5, 2), strict=True):
        torch.testing.assert_close(row[:length], by_length[length], rtol=0, atol=1e-6)
        assert (row[length:] == 0).all()
    torch.testing.assert_close(made.weights(9), by_length[9], rtol=0, atol=1e-6)
    assert by_length[9].max() > 0.2  # not the average


def test_the_gru_reads_one_sequence_per_length():
    made, read = gpo(), []
    made.gru.register_forward_hook(lambda module, args, out: read.append(int(args[0].batch_sizes[0])))
    made(torch.randn(64, 10, 4))
    made(torch.randn(64, 10, 4), torch.arange(10) < torch.tensor([3, 10, 3, 8] * 16)[:, None])
    assert read == [1, 3]


def test_the_number_of_parameters():
    assert sum(parameter.numel() for parameter in GPO().parameters()) == 12_704


def test_equal_weights_are_the_average_and_no_features_are_zero():
    made, x = gpo(), features()
    nn.init.zeros_(made.score.weight)
    valid = MASKS["lengths"].clone()
    valid[1] = False
    out = made(x, valid)
    torch.testing.assert_close(out[2], x[2, :4].mean(dim=0), rtol=0, atol=1e-6)
    assert (out[1] == 0).all() and with_gradients(made, x, out)["x"].isfinite().all()


def test_features_may_be_of_any_size():
    """Padding is below them all: a number such as -10,000 would be above these."""
    made, x = gpo(), features() * 1e6 - 1e7
    valid = MASKS["lengths"]
    torch.testing.assert_close(made(x, valid), slow(made, x, valid), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("valid", [None, MASKS["lengths"]], ids=["all", "lengths"])
def test_half_precision_is_that_of_the_input_alone(dtype, valid):
    """The weights, the sum and the output are fp32: in a model of half precision, and under autocast."""
    made, x = gpo(), features(dtype=dtype)
    expected = slow(made, x.float(), valid)
    with torch.autocast("cpu", dtype):
        under_autocast = made(x, valid)
    torch.testing.assert_close(under_autocast, expected, rtol=0, atol=2e-6)
    half = gpo().to(dtype)
    rounded = gpo().to(dtype).float()
    out = half(x, valid)
    torch.testing.assert_close(out, slow(rounded, x.float(), valid), rtol=0, atol=2e-6)
    out.sum().backward()
    assert all(parameter.grad.dtype == dtype and parameter.grad.abs().max() > 0 for parameter in half.parameters())


@pytest.mark.parametrize("valid", [None, MASKS["any places"]], ids=["all", "any places"])
def test_compiled_and_exported(valid):
    torch.compiler.reset()
    made, x = gpo(), features().detach()
    expected = slow(made, x, valid)
    compiled = torch.compile(made, backend="eager")(x, valid)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=2e-6)
    exported = torch.export.export(made, (x, valid)).module()
    torch.testing.assert_close(exported(x, valid), expected, rtol=0, atol=2e-6)
    if valid is not None:  # the lengths of the example are not built in
        torch.testing.assert_close(exported(x, MASKS["lengths"]), slow(made, x, MASKS["lengths"]), rtol=0, atol=2e-6)


def test_the_form_that_it_is_benchmarked_against_gives_the_same():
    made, x = gpo(), features()
    lengths = torch.tensor([7, 1, 4, 4, 2])
    torch.testing.assert_close(plain_gpo(made, x, lengths), made(x, MASKS["lengths"]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bias", [None, -3.0])
def test_tokens_are_projected_and_then_pooled(bias):
    torch.manual_seed(1)
    pool, x = TokenPool(6, 9, bias), features()
    assert pool.bias is None or (pool.bias == -3).all()
    for valid in MASKS.values():
        torch.testing.assert_close(pool(x, valid), slow_token_pool(pool, x, valid), rtol=0, atol=2e-6)


def test_a_bias_stays_exact_in_half_precision():
    torch.manual_seed(1)
    pool, x = TokenPool(6, 9, -10.0), features().detach()
    with torch.autocast("cpu", torch.bfloat16):
        out = pool(x)
    assert out.dtype == torch.float32 and worst_error(out, slow_token_pool(pool, x)) < 0.01  # 0.03 would be one unit
