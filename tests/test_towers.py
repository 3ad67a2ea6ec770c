"""`single_query_attention`, another order of products, against torch's own multi-head attention."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pcmepp_openclip.host.towers.blocks import run_to_token, single_query_attention

N, L, C, HEADS = 5, 11, 24, 4


class OtherAttention(nn.MultiheadAttention):
    """A subclass may attend in another way: twice as much, here."""

    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def attention(kind=nn.MultiheadAttention, dtype=torch.float64) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    attn = kind(C, HEADS, batch_first=True)
    for parameter in attn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return attn.to(dtype)


def inputs(masked: bool, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x_NLC = torch.randn(N, L, C, generator=generator, dtype=torch.float64).to(dtype)
    mask_NL = torch.zeros(N, L)  # fp32, as a model's is in every precision
    for sample, row in enumerate(mask_NL):
        row[2 * sample + 1 :] = -torch.inf  # one token is seen by the first sample, all but two by the last
    return x_NLC.requires_grad_(), mask_NL if masked else None


def slow(attn, x_NLC, mask_NL):
    mask = None if mask_NL is None else mask_NL[:, None, None].expand(-1, HEADS, -1, -1).flatten(0, 1).to(x_NLC.dtype)
    return attn(x_NLC[:, :1], x_NLC, x_NLC, need_weights=False, attn_mask=mask)[0]


@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients(masked):
    attn, (x_NLC, mask_NL) = attention(), inputs(masked)
    weights = torch.randn(N, 1, C, dtype=torch.float64)
    results = []
    for out in (single_query_attention(attn, x_NLC[:, :1], x_NLC, mask_NL), slow(attn, x_NLC, mask_NL)):
        results.append((out, *torch.autograd.grad((out * weights).sum(), [x_NLC, *attn.parameters()])))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_precision_is_that_of_attention(dtype, masked):
    exact = slow(attention(), *inputs(masked))
    attn, (x_NLC, mask_NL) = attention(dtype=dtype), inputs(masked, dtype)
    ours, theirs = (
        (out.double() - exact).norm() / exact.norm()
        for out in (single_query_attention(attn, x_NLC[:, :1], x_NLC, mask_NL), slow(attn, x_NLC, mask_NL))
    )
    assert ours < 2 * theirs


def test_another_attention_is_called_as_it_is():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = attention(OtherAttention)

        def forward(self, x_NLC, attn_mask):
            return self.attn(x_NLC, x_NLC, x_NLC, need_weights=False, attn_mask=attn_mask)[0]

    block, (x_NLC, _) = Block(), inputs(masked=False)
    expected = 2 * slow(attention(), x_NLC, None)
    transformer = SimpleNamespace(resblocks=[block], grad_checkpointing=False)
    torch.testing.assert_close(run_to_token(transformer, x_NLC, None, None), expected)
