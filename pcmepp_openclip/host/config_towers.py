"""The towers that a config of others asks for: whether each can be built and run, and how large it would be.

A name leads to code or to a repo of anyone's choice, so that a timm model, or a Hugging Face text model, must be one
that a config of open_clip's own names. The sizes of open_clip's own towers follow from their config; one of timm's is
built and run without memory, on the device "meta"; one of Hugging Face's is that of the name.
"""

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import open_clip
import torch
from open_clip import factory
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_vision_tower

from .config_values import TOKENIZER_KEYS, check_count, check_keys, check_value, is_whole, pair
from .towers import has_tokens, set_image_size

MAX_SIDE_PIXELS = 2048  # of open_clip's own transformer
MAX_SIDE_PIXELS_OTHERS = 1024  # of a ResNet or a tower from timm; open_clip's largest has 512
MAX_PATCHES = 2**14
MAX_ACTIVATIONS = 2**28  # numbers that one block makes of one image or text
GPO_STATES = 64  # numbers, in both directions
HUGGING_FACE_TOKENS = 512  # that RoBERTa, the shortest of them, has positions for
HUGGING_FACE_WIDTH = 2048  # of the widest of them, mT5-XL
PARTS = {"act_kwargs": ("approximate",), "norm_kwargs": ("eps",), "tokenizer_kwargs": TOKENIZER_KEYS}
NAMES = ("timm_model_name", "hf_model_name")


class TowerSize(NamedTuple):
    """The size of a tower without its log-variance branch.

    Arguments:
        parameters: how many there are, about.
        width: channels of its tokens.
        tokens: how many it has, at most; 0 where it has a feature map.
        block: parameters of a block of the branch, where it can leave the tower before its last blocks.
    """

    parameters: float
    width: int
    tokens: int
    block: float = 0.0

    def with_branch(self, head: str, layers: int, embed_dim: int, pool: str) -> float:
        """Parameters, about, with a branch of so many blocks at that place, "split" or "top", pooled like that."""
        if pool == "gpo":
            return self.parameters + layers * max(self.block, 12 * self.width**2) + 2 * (self.width + 2) * embed_dim
        if head == "split":
            return self.parameters + layers * self.block + (self.width + 1) * embed_dim
        each = embed_dim * (10 * embed_dim + 2 * self.width + 16)
        return self.parameters + layers * each + embed_dim * (embed_dim + 2) + 2 * self.width

    def check_gpo(self, name: str, embed_dim: int) -> None:
        """ValueError if the tokens are none, or too many, to be pooled by GPO, which has a state for each pair of a
        length and a rank."""
        if not self.tokens:
            raise ValueError(f"{name} has no tokens that GPO could pool: set pcmepp_cfg.pool to 'tower'.")
        _check_activations(4 * self.tokens * embed_dim, name, f"{self.tokens} tokens of width {embed_dim} in GPO")
        _check_activations(2 * GPO_STATES * self.tokens**2, name, f"lengths up to {self.tokens} tokens in GPO")


def parse_tower(block: Any, kind: type, name: str) -> Any:
    """A tower's block in open_clip's own form, every value by itself checked."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    check_keys(block, fields, name)
    for key, value in block.items():
        if key in PARTS:
            if value is None and key != "tokenizer_kwargs":
                continue
            check_keys(value, PARTS[key], f"{name}.{key}")
            for inner, part in value.items():
                check_value(inner, part, f"{name}.{key}", bool if inner == "strip_sep_token" else str)
        elif key == "layers" and isinstance(value, list):
            if kind is not CLIPVisionCfg or len(value) != 4:
                raise ValueError(f"{name}.layers must be a whole number, or four of a ResNet, not {value!r:.40}.")
            for layers in value:
                check_count(key, layers, name)
        elif key != "image_size" and not (key == "patch_size" and value is None):
            check_value(key, value, name, type(fields[key]))
    cfg = kind(**block)
    if int(cfg.width * cfg.mlp_ratio) < 1:
        raise ValueError(f"{name}.mlp_ratio {cfg.mlp_ratio} leaves nothing of the width {cfg.width}.")
    return cfg


def names_of_others(model_cfg: dict) -> list[tuple[str, Any]]:
    """Every name of a timm or Hugging Face model in a config, with its key."""
    blocks = [(tower, model_cfg.get(tower)) for tower in ("vision_cfg", "text_cfg", "multimodal_cfg")]
    return [
        (f"{tower}.{key}", block[key])
        for tower, block in blocks
        if isinstance(block, dict)
        for key in NAMES
        if block.get(key)
    ]


def unknown_name(model_cfg: dict) -> tuple[str, Any] | None:
    """The first of these that no config of open_clip's has, with its key, or None.

    Such a name leads to a repo of anyone's choice, which would be fetched when the model is built.
    """
    known = [
        name for model in open_clip.list_models() for _, name in names_of_others(factory.get_model_config(model) or {})
    ]
    return next(((key, name) for key, name in names_of_others(model_cfg) if name not in known), None)


# Image towers.


def check_vision(cfg: CLIPVisionCfg, block: dict, embed_dim: int) -> TowerSize:
    """The size of the image tower; ValueError if it cannot be built or run."""
    resnet = not isinstance(cfg.layers, int)
    sides = pair(cfg.image_size)
    most = MAX_SIDE_PIXELS_OTHERS if cfg.timm_model_name or resnet else MAX_SIDE_PIXELS
    if len(sides) != 2 or not all(is_whole(side) and 1 <= side <= most for side in sides):
        raise ValueError(f"vision_cfg.image_size must be 1 to {most} pixels per side, not {cfg.image_size!r:.40}.")
    if cfg.timm_model_name:
        keys = [key for key in block if key.startswith("timm_") or key in ("image_size", "patch_dropout")]
        return _timm_size(json.dumps({key: block[key] for key in keys}, sort_keys=True), embed_dim)
    if resnet:
        return _check_resnet(cfg, embed_dim)
    return _check_vit(cfg, sides, embed_dim)


def _check_vit(cfg: Any, sides: list[int], embed_dim: int) -> TowerSize:
    if cfg.patch_size is None:
        raise ValueError("vision_cfg.patch_size must be a whole number in a tower without a ResNet or a timm model.")
    grid = [side // cfg.patch_size for side in sides]
    patches = grid[0] * grid[1]
    if min(grid) < 1 or patches > MAX_PATCHES:
        raise ValueError(f"vision_cfg.patch_size {cfg.patch_size} does not go with image_size {cfg.image_size}.")
    if cfg.pos_embed_type == "sin_cos_2d" and (grid[0] != grid[1] or cfg.width % 4):
        raise ValueError("vision_cfg.pos_embed_type sin_cos_2d needs a square image and a width that 4 divides.")
    if cfg.width % cfg.head_width:
        raise ValueError(f"vision_cfg.width {cfg.width} is not a multiple of head_width {cfg.head_width}.")
    _check_activations(
        patches * cfg.width * (4 + cfg.mlp_ratio), "vision_cfg", f"{patches} tokens of width {cfg.width}"
    )
    parameters = cfg.layers * _block(cfg) + cfg.width * (3 * cfg.patch_size**2 + patches + 8)
    if not cfg.attentional_pool:
        return TowerSize(parameters + (cfg.width + 1) * embed_dim, cfg.width, patches + 1, _block(cfg))
    if embed_dim % cfg.attn_pooler_heads:
        raise ValueError(f"embed_dim {embed_dim} is not a multiple of vision_cfg.attn_pooler_heads.")
    queries = cfg.attn_pooler_queries
    _check_activations(4 * queries * embed_dim, "vision_cfg", f"{queries} queries of width {embed_dim}")
    parameters += embed_dim * (3 * embed_dim + 2 * cfg.width + queries + 8)
    return TowerSize(parameters, cfg.width, patches + 1, _block(cfg))


def _check_resnet(cfg: Any, embed_dim: int) -> TowerSize:
    side, width = cfg.image_size, 32 * cfg.width  # of the image, and of the last feature map
    if not is_whole(side) or side % 32:
        raise ValueError(f"vision_cfg.image_size of a ResNet must be one multiple of 32, not {side!r:.40}.")
    if cfg.width < 2 or cfg.head_width > width or width % (width // cfg.head_width):
        raise ValueError(f"vision_cfg.width {cfg.width} of a ResNet does not go with head_width {cfg.head_width}.")
    _check_activations((side // 2) ** 2 * cfg.width, "vision_cfg", f"a feature map of {side // 2} x {side // 2}")
    parameters = 14 * cfg.width**2 + width * (3 * width + embed_dim + (side // 32) ** 2 + 8)
    for number, layers in enumerate(cfg.layers):
        planes = cfg.width * 2**number
        parameters += layers * (17 * planes**2 + 24 * planes) + 12 * planes**2  # the first one also changes the width
    return TowerSize(parameters, width, tokens=0)


@functools.lru_cache(maxsize=256)
def _timm_size(vision_json: str, embed_dim: int) -> TowerSize:
    """Of a tower from timm, which is built and run on the device "meta"."""
    cfg = CLIPVisionCfg(**{**json.loads(vision_json), "timm_model_pretrained": False})
    name = f"vision_cfg.timm_model_name {cfg.timm_model_name!r:.60}"
    try:
        with torch.device("meta"), torch.inference_mode():
            tower = _build_vision_tower(embed_dim, cfg).eval()
            set_image_size(tower)
            image = torch.zeros(1, 3, *tower.image_size)
            shape = tower(image).shape
            tokens = tower.trunk.forward_features(image).shape[1] if has_tokens(tower) else 0
    except Exception as error:  # whatever timm makes of values that do not go together
        raise ValueError(f"{name} does not go with the other values of vision_cfg ({type(error).__name__}).") from None
    if tuple(shape) != (1, embed_dim):
        raise ValueError(f"{name} gives {list(shape)[1:]}, not the embed_dim {embed_dim}: set vision_cfg.timm_proj.")
    return TowerSize(sum(parameter.numel() for parameter in tower.parameters()), tower.trunk.num_features, tokens)


# Text towers.


def check_text(cfg: CLIPTextCfg, block: dict, embed_dim: int) -> TowerSize:
    """The size of the text tower; ValueError if it cannot be built or run."""
    for key in cfg.tokenizer_kwargs or ():
        if key != "clean" and not cfg.hf_tokenizer_name:
            raise ValueError(f"text_cfg.tokenizer_kwargs.{key} is for a tokenizer of its own, which it does not have.")
    if "hf_model_name" in block:  # open_clip asks for the key, not for its value
        if not cfg.hf_model_name:
            raise ValueError("text_cfg.hf_model_name must name a model: leave it out where the tower is open_clip's.")
        if cfg.context_length > HUGGING_FACE_TOKENS:
            raise ValueError(
                f"text_cfg.context_length of a Hugging Face model must be at most {HUGGING_FACE_TOKENS}, "
                f"not {cfg.context_length}."
            )
        return TowerSize(2 * HUGGING_FACE_WIDTH * embed_dim, HUGGING_FACE_WIDTH, cfg.context_length)
    if cfg.width % cfg.heads:
        raise ValueError(f"text_cfg.width {cfg.width} is not a multiple of heads {cfg.heads}.")
    if cfg.proj_type == "none" and cfg.width != embed_dim:
        raise ValueError(f"text_cfg.proj_type none needs a width of embed_dim {embed_dim}, not {cfg.width}.")
    tokens = cfg.context_length
    _check_activations(tokens * cfg.width * (4 + cfg.mlp_ratio), "text_cfg", f"{tokens} tokens of width {cfg.width}")
    if cfg.embed_cls:  # its mask is one of each text and head
        _check_activations(cfg.heads * (tokens + 1) ** 2, "text_cfg", f"masks of {tokens} tokens for {cfg.heads} heads")
    parameters = cfg.layers * _block(cfg) + cfg.width * (cfg.vocab_size + tokens + 8) + (cfg.width + 1) * embed_dim
    return TowerSize(parameters, cfg.width, tokens + cfg.embed_cls, _block(cfg))


def _block(cfg: Any) -> float:
    """Parameters of a block of open_clip's own transformers."""
    return cfg.width * (4 * cfg.width + 16) + cfg.width * cfg.mlp_ratio * (2 * cfg.width + 4)


def _check_activations(count: float, name: str, what: str) -> None:
    if count > MAX_ACTIVATIONS:
        raise ValueError(f"{name}: {what} are too much to compute.")
