"""Pieces of open_clip's towers, which a PCME++ model is built of."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import open_clip
import torch
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower, _build_vision_tower
from torch import Tensor, nn

CLIP = open_clip.CLIP


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
    """A fresh transformer of `layers` blocks, of the kind that the image tower of that config has."""
    cfg = copy.copy(_as_cfg(CLIPVisionCfg, vision_cfg, "vision_cfg"))
    cfg.layers = layers
    return _build_vision_tower(1, cfg, quick_gelu, cast_dtype).transformer


def text_blocks(text_cfg: Any, layers: int, quick_gelu: bool, cast_dtype: torch.dtype | None) -> Any:
    """The same for the text tower."""
    cfg = copy.copy(_as_cfg(CLIPTextCfg, text_cfg, "text_cfg"))
    cfg.layers, cfg.vocab_size, cfg.context_length = layers, 1, 1  # only the blocks are kept
    return _build_text_tower(1, cfg, quick_gelu, cast_dtype).transformer


def embed_image(visual: Any, image: Tensor) -> Tensor:
    """Pixels to what the first block of the image tower reads, [N, L, C]."""
    return visual._embeds(image)


def project_image(visual: Any, x_N1C: Tensor) -> Tensor:
    """The CLS token behind the last block to CLIP's image features, [N, D]."""
    pooled_NC, _ = visual._pool(x_N1C)
    return pooled_NC if visual.proj is None else pooled_NC @ visual.proj


@contextlib.contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of `module` while the context lasts, for open_clip methods that do not give them out."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()
