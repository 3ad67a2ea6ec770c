"""The blocks of open_clip's own transformers: runs of them, and the last one computed for a single token.

A block is x + scale_1(attention(norm_1(x))), then x + scale_2(mlp(norm_2(x))). `attend` makes the last one cheap. For a
single query q of a head, matrix products may be taken in another order, which spares the keys K x and the values V x of
every token x, 2 L C^2 products, for 2 C^2 + 2 H L C; p sums to 1, and what is added to all logits of a query, such as
the bias of the keys, changes no p:

    p = softmax_l(q . (K x_l + k)) = softmax_l((K^T q) . x_l)        sum_l p_l (V x_l + v) = V (sum_l p_l x_l) + v

E is the width of a head.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower, _build_vision_tower
from open_clip.transformer import Attention, ResidualAttentionBlock
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils.checkpoint import checkpoint


class Average:
    """The type of `AVERAGE`, which stands for the mean of all tokens but the class token, the first."""


AVERAGE = Average()


def run_blocks(
    transformer: Any, x_NLC: Tensor, mask: Tensor | None, start: int | None = None, stop: int | None = None
) -> Tensor:
    """Return the output of the blocks `start` to `stop` of a transformer for all tokens."""
    for block in transformer.resblocks[start:stop]:
        x_NLC = _call(transformer, block, x_NLC, attn_mask=mask)
    return x_NLC


def run_to_token(
    transformer: Any, x_NLC: Tensor, token_N: Tensor | Average | None, mask: Tensor | None, start: int | None = None
) -> Tensor:
    """Return the output of the blocks from `start` for one token per sample, [N, 1, C]. The last block computes that
    token alone.

    Arguments:
        token_N: the index of the token to read, None for the first one of every sample, or `AVERAGE`.
        mask: the additive attention mask, [L, L] or [N * H, L, L], or None.
    """
    x_NLC = run_blocks(transformer, x_NLC, mask, start, -1)
    return _call(transformer, _last_block, transformer.resblocks[-1], x_NLC, token_N, mask)


def _call(transformer: Any, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a function whose activations are recomputed in the backward pass if those of the transformer are."""
    if transformer.grad_checkpointing:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return function(*args, **kwargs)


def _last_block(block: Any, x_NLC: Tensor, token_N: Tensor | Average | None, mask: Tensor | None) -> Tensor:
    if not is_plain(block):  # a block of another kind computes all tokens, of which one is read
        return pick(block(x_NLC, attn_mask=mask), token_N)
    if not hasattr(block, "unshard"):  # FSDP's modules have this method
        return _block_for_token(block, x_NLC, token_N, mask)
    if not hasattr(block, "for_token"):
        from torch.distributed.fsdp import register_fsdp_forward_method  # gathers the weights while the method runs

        block.for_token = functools.partial(_block_for_token, block)
        register_fsdp_forward_method(block, "for_token")
    return block.for_token(x_NLC, token_N, mask)


def _block_for_token(block: Any, x_NLC: Tensor, token_N: Tensor | Average | None, mask: Tensor | None) -> Tensor:
    normed_NLC, x_N1C = block.ln_1(x_NLC), pick(x_NLC, token_N)
    query_N1C = block.ln_1(x_N1C) if token_N is AVERAGE else pick(normed_NLC, token_N)
    row = None if mask is None else _mask_row(mask, token_N, x_NLC.shape[0])
    x_N1C = x_N1C + block.ls_1(single_query_attention(block.attn, query_N1C, normed_NLC, row))
    return x_N1C + block.ls_2(block.mlp(block.ln_2(x_N1C)))


def is_plain(block: Any) -> bool:
    """Return whether a block is open_clip's plain one, whose attention `single_query_attention` computes.

    Custom blocks (qk_norm, ...) stay whole. LoRA makes subclasses.
    """
    kinds = (nn.MultiheadAttention, Attention)  # of open_clip 3 and 4
    return isinstance(block, ResidualAttentionBlock) and type_before_parametrizations(block.attn) in kinds


def pick(x_NLC: Tensor, token_N: Tensor | Average | None) -> Tensor:
    """Return the token of every sample, [N, 1, C], by `token_N` as in `run_to_token`."""
    if token_N is None:
        return x_NLC[:, :1]
    if isinstance(token_N, Average):
        return x_NLC[:, 1:].mean(dim=1, keepdim=True)
    return x_NLC[torch.arange(x_NLC.shape[0], device=x_NLC.device), token_N].unsqueeze(1)


def _mask_row(mask: Tensor, token_N: Tensor | Average | None, samples: int) -> Tensor:
    """Return the row of the mask for the token that is read, [N, L] or [N, H, L]."""
    assert not isinstance(token_N, Average)
    if mask.ndim == 2:
        return mask[:1].expand(samples, -1) if token_N is None else mask[token_N]
    mask_NHLL = mask.unflatten(0, (samples, -1))
    if token_N is None:
        return mask_NHLL[:, :, 0]
    return mask_NHLL[torch.arange(samples, device=mask.device), :, token_N]


def single_query_attention(
    attn: nn.MultiheadAttention, query_N1C: Tensor, x_NLC: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the attention of one token per sample to all of its tokens, [N, 1, C], as `attn` gives it.

    Arguments:
        mask: what is added to the logits, [N, L] or [N, H, L], or None.
    """
    weight_q, weight_k, weight_v = attn.in_proj_weight.chunk(3)
    bias_q, _, bias_v = attn.in_proj_bias.chunk(3)
    q_HNE = F.linear(query_N1C.squeeze(1), weight_q, bias_q).unflatten(1, (attn.num_heads, -1)).transpose(0, 1)
    value_NC = attend(q_HNE, weight_k, weight_v, x_NLC, mask)
    return attn.out_proj(value_NC + bias_v).unsqueeze(1)


def attend(q_HNE: Tensor, weight_k: Tensor, weight_v: Tensor, x_NLC: Tensor, mask: Tensor | None) -> Tensor:
    """Return the values that the queries attend to, without the bias of the values, [N, H * E].

    Arguments:
        weight_k, weight_v: [H * E, C].
        mask: see above.
    """
    heads, _, width = q_HNE.shape
    key_NHC = (q_HNE * width**-0.5 @ weight_k.unflatten(0, (heads, width))).transpose(0, 1)
    logits_NHL = key_NHC @ x_NLC.transpose(1, 2)
    if mask is not None:
        logits_NHL = logits_NHL + (mask[:, None] if mask.ndim == 2 else mask).to(logits_NHL.dtype)
    mixed_NHC = logits_NHL.softmax(dim=-1) @ x_NLC
    value_HNE = mixed_NHC.transpose(0, 1) @ weight_v.unflatten(0, (heads, width)).transpose(1, 2)
    return value_HNE.transpose(0, 1).flatten(1)


# These functions build untrained transformers.


def image_blocks(vision_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """Return a transformer of `layers` blocks of the kind that the image tower of the config has."""
    cfg = copy.copy(as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg"))
    cfg.layers, cfg.attentional_pool = layers, False  # only the blocks are kept
    return _build_vision_tower(1, cfg, quick_gelu, cast_dtype).transformer


def text_blocks(text_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """Return a transformer of `layers` blocks of the kind that the text tower of the config has."""
    cfg = copy.copy(as_cfg(CLIPTextCfg, text_cfg, "text_cfg"))
    cfg.layers, cfg.vocab_size, cfg.context_length = layers, 1, 1
    return _build_text_tower(1, cfg, quick_gelu, cast_dtype).transformer


def plain_blocks(width: int, heads: int, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """Return a transformer of plain blocks, for a tower whose blocks are not open_clip's."""
    return text_blocks(CLIPTextCfg(width=width, heads=heads), layers, quick_gelu, cast_dtype)


def pair(size: Any) -> list:
    """Return height and width of a size that is one number for both, or two."""
    return list(size) if isinstance(size, (list, tuple)) else [size, size]


def as_cfg(kind: type, cfg: Any, block: str) -> Any:
    """Return the block of a tower in a model config as open_clip's own dataclass."""
    try:
        return kind(**cfg) if isinstance(cfg, dict) else cfg
    except TypeError as error:
        raise ValueError(f"{block} of the model config: {error}") from None
