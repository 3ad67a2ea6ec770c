"""Attention on fake CUDA tensors by the kernels that a card has.

Where there is no driver, torch's own choice falls on the plain computation, which holds a matrix of all pairs of tokens
for every head. A card runs a kernel that does not: "flash" in half precision without a mask, and otherwise the
memory-efficient one.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

_plain = F.scaled_dot_product_attention


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Within it, `scaled_dot_product_attention` of CUDA tensors is one fused kernel, forward and backward."""
    with mock.patch.object(F, "scaled_dot_product_attention", _attention):
        yield


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's of that name."""
    if query.device.type != "cuda" or enable_gqa or query.ndim != 4:
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        batch, heads, length, _ = query.shape
        attn_mask = attn_mask.to(query.dtype).expand(batch, heads, length, key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
