"""The probabilistic CLIP: open_clip's CLIP, with a second branch in each tower that gives a log-variance."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..gaussian import Gaussian, full_precision
from ..host import towers as host
from .towers import pool_last_block, run_blocks

MIN_MATCH_SCALE = 1e-2


class PCMEppCLIP(host.CLIP):
    """A CLIP whose encoders map an image or a text to a Gaussian (PCME++, ICLR 2024).

    The mean branch is CLIP itself: same tensors, same names, same output. `pcmepp_cfg.head_layers` blocks
    before its end each tower splits off a log-variance branch: blocks of the same kind, the CLS or EOT token
    of the last one, no norm, a projection without l2 norm, and a learnable bias where the config has one.
    Both branches compute their last block for the one token that is read (`towers.py`), which makes a
    training step cheaper than plain CLIP's.

    Arguments:
        pcmepp_cfg: the config's block of that name, see `PCMEppCfg`. All others are `open_clip.CLIP`'s.

    Parameters that CLIP does not have, under the names of the released weights:
        negative_scale [1]: a of the matching logit -a d + b. A distance must count against a match, so what
            is used is max(a, 0.01), with the gradient passed straight through: the raw value may drift below
            but is never stuck there. See `match_scale`.
        shift [1]: b of the matching logit, free in sign.
        visual.uncertainty_transformer.*, visual.uncertainty_proj, uncertainty_transformer.*,
        uncertainty_text_projection: the branches; visual.uncertainty_bias and uncertainty_text_bias [D]
            exist unless `init_logvar_bias` is null.

    `encode_image`, `encode_text` and, without `output_dict`, `forward` return what CLIP returns and compute
    the mean branch only. With `output_dict`, `forward` returns what `PCMEppLoss` takes: CLIP's entries,
    `image_logvar` and `text_logvar` [N, D], and the scalars of the loss repeated for each sample,
    `clip_scale`, `match_scale`, `match_shift` [N], since open_clip's gradient accumulation concatenates
    outputs on their first dimension: the mean over the samples then has exactly the right gradient.

    Texts may be cut to any length that keeps every EOT: under the causal mask the output is the same.

    `fresh_logvar` tells whether the log-variance branch is untrained as far as loading a file can tell: `create_model`
    without weights, or with those of a plain CLIP.

    Locking a tower freezes CLIP's part of it; its log-variance branch, which has no pretrained weights to
    preserve, stays trainable.
    """

    visual: Any
    transformer: Any
    uncertainty_transformer: Any
    fresh_logvar: bool = True

    def __init__(
        self,
        embed_dim: int,
        vision_cfg: Any,
        text_cfg: Any,
        *,
        pcmepp_cfg: dict,
        quick_gelu: bool = False,
        cast_dtype: torch.dtype | None = None,
        **clip_kwargs: Any,
    ):
        self_cfg = PCMEppCfg.parse(pcmepp_cfg)
        host.check_towers(vision_cfg, text_cfg, self_cfg.head_layers)
        super().__init__(embed_dim, vision_cfg, text_cfg, quick_gelu=quick_gelu, cast_dtype=cast_dtype, **clip_kwargs)
        host.check_parts(self)
        self.pcmepp_cfg = self_cfg
        build: dict[str, Any] = {"layers": self_cfg.head_layers, "quick_gelu": quick_gelu, "cast_dtype": cast_dtype}
        self.visual.uncertainty_transformer = host.image_blocks(vision_cfg, **build)
        self.visual.uncertainty_proj = _projection(self.visual.uncertainty_transformer.width, embed_dim)
        self.uncertainty_transformer = host.text_blocks(text_cfg, **build)
        self.uncertainty_text_projection = _projection(self.uncertainty_transformer.width, embed_dim)
        bias = self_cfg.init_logvar_bias
        self.visual.uncertainty_bias = None if bias is None else nn.Parameter(torch.full((embed_dim,), float(bias)))
        self.uncertainty_text_bias = None if bias is None else nn.Parameter(torch.full((embed_dim,), float(bias)))
        self.negative_scale = nn.Parameter(torch.full((1,), float(self_cfg.init_match_scale)))
        self.shift = nn.Parameter(torch.full((1,), float(self_cfg.init_match_shift)))

    @property
    def match_scale(self) -> Tensor:
        """a of the matching logit, [1], fp32, at least `MIN_MATCH_SCALE`."""
        a = self.negative_scale.float()
        return a + (a.clamp(min=MIN_MATCH_SCALE) - a).detach()

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        mean_ND = self._image_mean(self._image_trunk(image))
        return F.normalize(mean_ND, dim=-1) if normalize else mean_ND

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        mean_ND = self._text_mean(self._text_trunk(text), text)
        return F.normalize(mean_ND, dim=-1) if normalize else mean_ND

    def encode_image_gaussian(self, image: Tensor) -> Gaussian:
        """Images [N, 3, height, width] to Gaussians with l2-normalised means."""
        x_NLC = self._image_trunk(image)
        return Gaussian(F.normalize(self._image_mean(x_NLC), dim=-1), self._image_logvar(x_NLC))

    def encode_text_gaussian(self, text: Tensor) -> Gaussian:
        """Token ids [N, L], L at most the context length, to Gaussians with l2-normalised means."""
        x_NLC = self._text_trunk(text)
        return Gaussian(F.normalize(self._text_mean(x_NLC, text), dim=-1), self._text_logvar(x_NLC, text))

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Any:
        if not self.output_dict:
            return super().forward(image, text)
        images = self.encode_image_gaussian(image) if image is not None else None
        texts = self.encode_text_gaussian(text) if text is not None else None
        samples = image.shape[0] if image is not None else text.shape[0] if text is not None else 1
        logit_scale = self.logit_scale.exp()
        out = {
            "image_features": images.mean if images else None,
            "text_features": texts.mean if texts else None,
            "logit_scale": logit_scale,
            "image_logvar": images.logvar if images else None,
            "text_logvar": texts.logvar if texts else None,
            "clip_scale": logit_scale.float().reshape(1).repeat(samples),
            "match_scale": self.match_scale.repeat(samples),
            "match_shift": self.shift.float().repeat(samples),
        }
        if self.logit_bias is not None:
            out["logit_bias"] = self.logit_bias
        return out

    def forward_intermediates(
        self, image: Tensor | None = None, text: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """CLIP's `forward_intermediates` with `image_logvar` and `text_logvar` in addition to the final features."""
        padded = text
        if text is not None:
            self._check_text(text)
            padded = F.pad(text, (0, self.context_length - text.shape[1]))  # CLIP's own takes full texts only
        splits = self._image_shared().blocks[-1], self._text_shared().blocks[-1]
        with host.outputs_of(splits[0]) as image_out, host.outputs_of(splits[1]) as text_out:
            out = super().forward_intermediates(image, padded, *args, **kwargs)
        if text is not None:
            out["text_intermediates"] = [x_NLC[:, : text.shape[1]] for x_NLC in out["text_intermediates"]]
        if "image_features" in out and image_out:
            out["image_logvar"] = self._image_logvar(image_out[-1])
        if text is not None and "text_features" in out:
            out["text_logvar"] = self._text_logvar(text_out[-1][:, : text.shape[1]], text)
        return out

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        super().lock_image_tower(unlocked_groups, freeze_bn_stats)
        for name, parameter in self.visual.named_parameters():
            if is_pcmepp_parameter(name):
                parameter.requires_grad = True

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        host.set_recompute(self.visual.uncertainty_transformer, enable)
        host.set_recompute(self.uncertainty_transformer, enable)

    # The image tower, in the order of computation.

    def _image_trunk(self, image: Tensor) -> Tensor:
        self._check_image(image)
        return run_blocks(self._image_shared(), host.embed_image(self, image), None)

    def _image_shared(self) -> host.Stack:
        return host.stack(self.visual.transformer, stop=-self.pcmepp_cfg.head_layers)

    def _image_mean(self, x_NLC: Tensor) -> Tensor:
        blocks = host.stack(self.visual.transformer, start=-self.pcmepp_cfg.head_layers)
        return host.project_image(self, pool_last_block(blocks, x_NLC, None, None))

    def _image_logvar(self, x_NLC: Tensor) -> Tensor:
        x_N1C = pool_last_block(host.stack(self.visual.uncertainty_transformer), x_NLC, None, None)
        return _logvar(x_N1C, self.visual.uncertainty_proj, self.visual.uncertainty_bias)

    # The text tower, likewise.

    def _text_trunk(self, text: Tensor) -> Tensor:
        self._check_text(text)
        return run_blocks(self._text_shared(), host.embed_text(self, text), host.text_mask(self, text.shape[1]))

    def _text_shared(self) -> host.Stack:
        return host.stack(self.transformer, stop=-self.pcmepp_cfg.head_layers)

    def _text_mean(self, x_NLC: Tensor, text: Tensor) -> Tensor:
        blocks = host.stack(self.transformer, start=-self.pcmepp_cfg.head_layers)
        return host.project_text(self, self._pool_text(blocks, x_NLC, text))

    def _text_logvar(self, x_NLC: Tensor, text: Tensor) -> Tensor:
        x_N1C = self._pool_text(host.stack(self.uncertainty_transformer), x_NLC, text)
        return _logvar(x_N1C, self.uncertainty_text_projection, self.uncertainty_text_bias)

    def _pool_text(self, blocks: host.Stack, x_NLC: Tensor, text: Tensor) -> Tensor:
        mask_LL = host.text_mask(self, text.shape[1])
        return pool_last_block(blocks, x_NLC, host.text_token(self, text), mask_LL)

    # What a user may pass by mistake.

    def _check_image(self, image: Tensor) -> None:
        expected, dtype = host.image_shape(self), host.image_dtype(self)
        if not isinstance(image, Tensor):
            raise ValueError(f"An image batch must be a tensor (use the model's preprocessing), not {type(image)}.")
        if image.ndim != 4 or tuple(image.shape[1:]) != expected:
            raise ValueError(f"An image batch must be [N, {', '.join(map(str, expected))}], not {list(image.shape)}.")
        if not image.is_floating_point():
            raise ValueError(f"An image batch must be of floats (use the model's preprocessing), not {image.dtype}.")
        if image.dtype != dtype and not torch.is_autocast_enabled(image.device.type):
            raise ValueError(f"The image batch is {image.dtype} but the model is {dtype}: cast one of them.")

    def _check_text(self, text: Tensor) -> None:
        if not isinstance(text, Tensor):
            raise ValueError(f"A text batch must be a tensor of token ids (use the tokenizer), not {type(text)}.")
        if text.ndim != 2 or not 1 <= text.shape[1] <= self.context_length:
            raise ValueError(
                f"A text batch must be token ids [N, L] with L at most {self.context_length}, not {list(text.shape)}."
            )
        if text.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"A text batch must be of int32 or int64 token ids (use the tokenizer), not {text.dtype}.")
        if text.shape[1] != self.context_length and host.text_mask(self, text.shape[1]) is None:
            raise ValueError(f"Without a causal mask texts cannot be cut: pad them to {self.context_length} tokens.")


def is_pcmepp_parameter(name: str) -> bool:
    """Whether a tensor of that name is PCME++'s own, not plain CLIP's."""
    return "uncertainty_" in name or name in ("negative_scale", "shift")


def _projection(width: int, embed_dim: int) -> nn.Parameter:
    # Random, not zero: the loss sees the dimensions only through sums, so equal ones would stay equal.
    return nn.Parameter(width**-0.5 * torch.randn(width, embed_dim))


def _logvar(x_N1C: Tensor, projection_CD: Tensor, bias_D: Tensor | None) -> Tensor:
    """The projection in fp32 whatever the precision: in bf16 a log-variance of -10 is only right to 3 %."""
    with full_precision(x_N1C):
        logvar_ND = x_N1C.squeeze(1).float() @ projection_CD.float()
        return logvar_ND if bias_D is None else logvar_ND + bias_D.float()
