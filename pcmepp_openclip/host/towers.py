"""Pieces of open_clip's CLIP, which a PCME++ model is built of: all that is known of its attributes.

N samples, L tokens, C channels of a tower, D dimensions of an embedding.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower, _build_vision_tower
from torch import Tensor, nn

from . import seams

CLIP = open_clip.CLIP

PARTS = (  # attributes of a CLIP that are used here and in `models`
    *("visual.transformer.resblocks", "visual.transformer.grad_checkpointing", "visual.transformer.width"),
    *("visual.proj", "visual.image_size", "visual.output_dim", "visual.conv1.weight"),
    *("transformer.resblocks", "transformer.grad_checkpointing", "transformer.width", "transformer.get_cast_dtype"),
    *("token_embedding", "positional_embedding", "ln_final", "text_projection"),
    *("attn_mask", "text_pool_type", "text_eos_id", "context_length", "logit_scale", "logit_bias", "output_dict"),
)
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "fill_color")  # the size is the model's own
BLOCK_PARTS = ("attn", "ln_1", "ls_1", "ln_2", "ls_2", "mlp")  # of each of its blocks


def check_parts(model: Any) -> None:
    """ImportError, with the cure, if open_clip's CLIP lacks an attribute that a PCME++ model is built on."""
    blocks = [f"{tower}.resblocks.0.{part}" for tower in ("visual.transformer", "transformer") for part in BLOCK_PARTS]
    for name in (*PARTS, *blocks):
        part: Any = model
        for attribute in name.split("."):
            try:
                part = part[0] if attribute == "0" else getattr(part, attribute)
            except AttributeError:
                raise ImportError(seams.lacking(f"attribute {name} of a CLIP", "encode images and texts")) from None


def check_towers(vision_cfg: Any, text_cfg: Any, head_layers: int) -> None:
    """ValueError for an architecture of open_clip's that a log-variance branch cannot be split off from."""
    vision = _as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg")
    text = _as_cfg(CLIPTextCfg, text_cfg, "text_cfg")
    if vision.timm_model_name or not isinstance(vision.layers, int):
        raise ValueError("A PCME++ model needs open_clip's own VisionTransformer, not a timm model or a ResNet.")
    if text.hf_model_name:
        raise ValueError("A PCME++ model needs open_clip's own text transformer: drop text_cfg.hf_model_name.")
    for block, key, value, allowed in [
        ("vision_cfg", "pool_type", vision.pool_type, ("tok",)),
        ("vision_cfg", "attentional_pool", vision.attentional_pool, (False,)),
        ("vision_cfg", "output_tokens", vision.output_tokens, (False,)),
        ("text_cfg", "pool_type", text.pool_type, ("argmax", "eos", "first")),
        ("text_cfg", "output_tokens", text.output_tokens, (False,)),
        ("text_cfg", "embed_cls", text.embed_cls, (False,)),
    ]:
        if value not in allowed:
            raise ValueError(f"A PCME++ model needs {block}.{key} of {' or '.join(map(repr, allowed))}, not {value!r}.")
    if head_layers >= min(vision.layers, text.layers):
        raise ValueError(
            f"pcmepp_cfg.head_layers must be below the towers' {vision.layers} and {text.layers} layers, "
            f"not {head_layers}."
        )


def _as_cfg(kind: type, cfg: Any, block: str) -> Any:
    try:
        return kind(**cfg) if isinstance(cfg, dict) else cfg
    except TypeError as error:
        raise ValueError(f"{block} of the model config: {error}") from None


def image_blocks(vision_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """An untrained transformer of `layers` blocks, of the kind that the image tower of that config has."""
    cfg = copy.copy(_as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg"))
    cfg.layers = layers
    return _build_vision_tower(1, cfg, quick_gelu, cast_dtype).transformer


def text_blocks(text_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """The same for the text tower."""
    cfg = copy.copy(_as_cfg(CLIPTextCfg, text_cfg, "text_cfg"))
    cfg.layers, cfg.vocab_size, cfg.context_length = layers, 1, 1  # only the blocks are kept
    return _build_text_tower(1, cfg, quick_gelu, cast_dtype).transformer


@dataclass(frozen=True)
class Stack:
    """Blocks that follow one another; with `recompute`, their activations are recomputed in the backward pass."""

    blocks: Sequence[nn.Module]
    recompute: bool


def stack(transformer: Any, start: int | None = None, stop: int | None = None) -> Stack:
    """Blocks `start` to `stop` of a transformer."""
    return Stack(transformer.resblocks[start:stop], transformer.grad_checkpointing)


def set_recompute(transformer: Any, enable: bool) -> None:
    transformer.grad_checkpointing = enable


@dataclass(frozen=True)
class BlockParts:
    """The parts of a residual attention block: x + scale_1(attention(norm_1(x))), then x + scale_2(mlp(norm_2(x)))."""

    norm_1: nn.Module
    attention: nn.MultiheadAttention
    scale_1: nn.Module
    norm_2: nn.Module
    mlp: nn.Module
    scale_2: nn.Module


def parts_of(block: Any) -> BlockParts | None:
    """The parts of a block, or None for open_clip's custom blocks (qk_norm, scale_heads, ...), which are a whole."""
    if type(block.attn) is not nn.MultiheadAttention:
        return None
    return BlockParts(block.ln_1, block.attn, block.ls_1, block.ln_2, block.mlp, block.ls_2)


def image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    height, width = model.visual.image_size
    return 3, height, width


def image_dtype(model: Any) -> torch.dtype:
    return model.visual.conv1.weight.dtype


def embed_image(model: Any, image: Tensor) -> Tensor:
    """Pixels to what the first block of the image tower reads, [N, L, C]."""
    return model.visual._embeds(image)


def project_image(model: Any, x_N1C: Tensor) -> Tensor:
    """The CLS token after the last block to CLIP's image features, [N, D]."""
    visual = model.visual
    pooled_NC, _ = visual._pool(x_N1C)
    return pooled_NC if visual.proj is None else pooled_NC @ visual.proj


def embed_text(model: Any, text_NL: Tensor) -> Tensor:
    """Token ids to what the first block of the text tower reads, [N, L, C]."""
    dtype = model.transformer.get_cast_dtype()
    return model.token_embedding(text_NL).to(dtype) + model.positional_embedding[: text_NL.shape[1]].to(dtype)


def text_mask(model: Any, length: int) -> Tensor | None:
    """The additive attention mask of texts of that length, [L, L], or None where every token sees all others."""
    return None if model.attn_mask is None else model.attn_mask[:length, :length]


def text_token(model: Any, text_NL: Tensor) -> Tensor | None:
    """The index of the token that stands for a text, [N], or None for the first one of every text."""
    if model.text_pool_type == "first":
        return None
    ids_NL = text_NL if model.text_pool_type == "argmax" else (text_NL == model.text_eos_id).int()
    return ids_NL.argmax(dim=-1)


def project_text(model: Any, x_N1C: Tensor) -> Tensor:
    """The token that stands for a text, after the last block, to CLIP's text features, [N, D]."""
    x_NC = model.ln_final(x_N1C).squeeze(1)
    if model.text_projection is None:
        return x_NC
    if isinstance(model.text_projection, nn.Linear):
        return model.text_projection(x_NC)
    return x_NC @ model.text_projection


def embedding_dim(model: Any) -> int:
    return model.visual.output_dim


def config_as_built(model: Any, model_cfg: dict) -> dict:
    """The content of `open_clip_config.json` for a model that was built from `model_cfg` and flags."""
    model_cfg = copy.deepcopy(model_cfg)
    if getattr(model, "logit_bias", None) is not None:
        model_cfg.setdefault("init_logit_bias", -10.0)  # that there is one; its value is among the weights
    if "hf_model_name" not in model_cfg["text_cfg"] and "multimodal_cfg" not in model_cfg:  # theirs mean another length
        model_cfg["text_cfg"]["context_length"] = model.context_length
    size = model.visual.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    model_cfg["vision_cfg"]["image_size"] = height if height == width else [height, width]
    preprocess_cfg = {name: model.visual.preprocess_cfg[name] for name in PREPROCESSING}
    return {"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg}


@contextlib.contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of `module` while the context lasts, for open_clip methods that do not give them out."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()
