"""The probabilistic CLIP: open_clip's models with a second branch in each tower that gives a log-variance."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..gaussian import Gaussian
from ..host import towers
from ..host.seams import check_attributes
from ..host.towers.base import Tokens
from ..host.towers.blocks import image_blocks, text_blocks
from ..host.towers.config import check_towers
from .batches import CachedTokens, LabelledImages
from .branches import MEAN, Branch, SplitBranch, SplitGPOBranch, TopBranch, TopGPOBranch
from .gpo import kept_tokens
from .lora import add_lora

MIN_MATCH_SCALE = 1e-2
BRANCHES: dict[tuple[str, str], type[Branch]] = {
    ("split", "tower"): SplitBranch,
    ("top", "tower"): TopBranch,
    ("split", "gpo"): SplitGPOBranch,
    ("top", "gpo"): TopGPOBranch,
}
"""The kinds of branches, by their place (`image_head`, `text_head` of a config) and by the pooling (`pool`)."""


class ProbabilisticModel(nn.Module):
    """The common part of the two PCME++ classes, on top of an open_clip class.

    The mean is open_clip's own: same tensors, same names, same output. The log-variance comes from a branch of each
    tower (`image_branch`, `text_branch`), which leaves it before its last blocks (`split`) or reads the tokens that it
    pools (`top`). With `pool` "gpo" both are pooled from all tokens by GPO (see `branches`), and the mean is that one.

    Arguments:
        pcmepp_cfg: the config's block of that name, see `PCMEppCfg`. All others are open_clip's.

    Parameters that open_clip's models do not have, under the names of the released weights:
        negative_scale [1]: a of the matching logit -a d + b. A distance must count against a match, so what
            is used is max(a, 0.01), with the gradient passed straight through: the raw value may drift below
            but is never stuck there. See `match_scale`.
        shift [1]: b of the matching logit, free in sign. Only this one exists where `match_logit` is "tied", and is
            b - 2a there; neither exists where it is "siglip".
        The branches, see `is_pcmepp_parameter`: split off, `uncertainty_transformer.*`, a projection and, unless
            `init_logvar_bias` is null, a bias; on top, `uncertainty_head.*`. With GPO, `gpo_mean.*` and
            `uncertainty_gpo.*` of each tower in place of its projections.

    `encode_image`, `encode_text` and, without `output_dict`, `forward` return what open_clip's models return, and
    compute the mean branch only. With `output_dict`, `forward` returns what `PCMEppLoss` takes: CLIP's entries,
    `image_logvar` and `text_logvar` [N, D], and the scalars of the loss repeated for each sample, `clip_scale`,
    `match_scale`, `match_shift` [N], since open_clip's gradient accumulation concatenates outputs on their first
    dimension: the mean over the samples then has exactly the right gradient. For `LabelledImages` it also returns the
    ids and shares that their labels depend on.

    Texts may be cut to any length that keeps every EOT where later tokens are not seen: see `texts_may_be_cut`.

    `fresh_logvar` tells whether the log-variance branch is untrained as far as loading a file can tell: `create_model`
    without weights, or with those of a plain model.

    Locking a tower freezes open_clip's part of it; its log-variance branch, which has no pretrained weights to
    preserve, stays trainable. `freeze_towers` freezes everything else, and `add_lora` trains low-rank changes of the
    towers.
    """

    visual: Any
    logit_scale: Tensor
    logit_bias: Tensor | None
    output_dict: bool
    context_length: int
    fresh_logvar: bool = True
    head_only: bool = False
    has_lora: bool = False

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
        cfg = PCMEppCfg.parse(pcmepp_cfg)
        custom_text = isinstance(self, open_clip.CustomTextCLIP)
        check_towers(vision_cfg, text_cfg, cfg.heads, cfg.head_layers, custom_text, cfg.pool)
        if cfg.match_logit == "siglip" and clip_kwargs.get("init_logit_bias") is None:
            raise ValueError("pcmepp_cfg.match_logit 'siglip' needs a model with a logit bias: set init_logit_bias.")
        built: dict[str, Any] = {"quick_gelu": quick_gelu, "cast_dtype": cast_dtype}
        super().__init__(embed_dim, vision_cfg, text_cfg, **built, **clip_kwargs)
        check_attributes(self)
        towers.fit_image_size(self)
        self.pcmepp_cfg, self.embed_dim = cfg, embed_dim
        built["layers"] = cfg.head_layers
        self.image_branch.build(embed_dim, functools.partial(image_blocks, vision_cfg), built)
        self.text_branch.build(embed_dim, functools.partial(text_blocks, text_cfg), built)
        if cfg.match_logit == "learned":
            self.negative_scale = nn.Parameter(torch.full((1,), float(cfg.init_match_scale)))
        if cfg.match_logit != "siglip":
            self.shift = nn.Parameter(torch.full((1,), float(cfg.init_match_shift)))

    @property
    def image_branch(self) -> Branch:
        cfg = self.pcmepp_cfg
        return BRANCHES[cfg.image_head, cfg.pool](towers.image_tower(self), cfg)

    @property
    def text_branch(self) -> Branch:
        cfg = self.pcmepp_cfg
        return BRANCHES[cfg.text_head, cfg.pool](towers.text_tower(self), cfg)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ProbabilisticModel":
        """Apply `to`, `half`, `cuda` and the like to every tensor, and keep a few tensors in fp32.

        A cast to 16 bit, as for --precision pure_bf16, leaves a, b, the logit scale and bias, and the biases of the
        log-variances in fp32: they are far from 0 and change little in a step, which 16 bit would round away, so that
        they would never be trained.
        """
        scalars = [self.logit_scale, self.logit_bias, self.image_branch.bias, self.text_branch.bias]
        scalars += [getattr(self, name, None) for name in ("negative_scale", "shift")]
        kept = {id(tensor) for x in scalars if x is not None for tensor in (x, x.grad)}

        def cast(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            is_short = id(tensor) in kept and torch.finfo(new.dtype).bits < 32
            return tensor.to(new.device, torch.float32) if is_short else new

        return super()._apply(cast, recurse)

    @property
    def match_scale(self) -> Tensor:
        """Return a of the matching logit, [1], fp32, at least `MIN_MATCH_SCALE`."""
        if self.pcmepp_cfg.match_logit == "siglip":
            return self.logit_scale.float().exp().reshape(1) / 2
        if self.pcmepp_cfg.match_logit == "tied":
            return self.pcmepp_cfg.match_ratio * self.logit_scale.detach().float().exp().reshape(1) / 2
        a = self.negative_scale.float()
        return a + (a.clamp(min=MIN_MATCH_SCALE) - a).detach()

    @property
    def match_shift(self) -> Tensor:
        """Return b of the matching logit, [1], fp32.

        With b = logit_bias + exp(logit_scale) the matching logit is SigLIP's own where the variances are zero, since
        then d = 2 - 2 cos. A tied scale grows with the logit scale, up to seven times: b = shift + 2a follows it at
        once, and the logit is 2a cos - a (u_v + u_t) + shift.
        """
        if self.pcmepp_cfg.match_logit == "siglip":
            assert self.logit_bias is not None
            return self.logit_bias.float().reshape(1) + self.logit_scale.float().exp().reshape(1)
        return self.shift.float() + (2 * self.match_scale if self.pcmepp_cfg.match_logit == "tied" else 0)

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        mean_ND = self._mean(self.image_branch, image)
        return F.normalize(mean_ND, dim=-1) if normalize else mean_ND

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        mean_ND = self._mean(self.text_branch, text)
        return F.normalize(mean_ND, dim=-1) if normalize else mean_ND

    _encode_image, _encode_text = encode_image, encode_text  # the methods of open_clip 4 call these

    def encode_image_gaussian(self, image: Tensor | CachedTokens | LabelledImages) -> Gaussian:
        """Return Gaussians with l2-normalised means for images [N, 3, height, width].

        In training, `image_token_augment` drops tokens of images that come with a `token_seed_N`.
        """
        if not isinstance(image, LabelledImages):
            return self._gaussian(self.image_branch, image)
        return self._gaussian(self.image_branch, image.image_NCHW, image.token_seed_N)

    def encode_text_gaussian(self, text: Tensor | CachedTokens) -> Gaussian:
        """Return Gaussians with l2-normalised means for token ids [N, L], L at most the context length."""
        return self._gaussian(self.text_branch, text)

    def _mean(self, branch: Branch, batch: Tensor) -> Tensor:
        branch.tower.check(batch)
        return branch.mean(branch.tokens(batch))

    def _gaussian(self, branch: Branch, batch: Tensor | CachedTokens, token_seed_N: Tensor | None = None) -> Gaussian:
        if isinstance(batch, CachedTokens):
            tokens = Tokens(batch.x_NLC.to(branch.dtype), batch.text_NL)
            return Gaussian(batch.mean_ND, branch.logvar(tokens))
        branch.tower.check(batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.head_only):
            tokens = branch.tokens(batch)
            if token_seed_N is not None and self.training and (p := self.pcmepp_cfg.image_token_augment):
                tokens = tokens._replace(kept_NL=kept_tokens(token_seed_N, tokens.x_NLC.shape[1], p))
            mean_ND = F.normalize(branch.mean(tokens), dim=-1)
        if self.pcmepp_cfg.train_means_by == "contrastive":  # nothing of the tower learns from its log-variances
            tokens = tokens._replace(x_NLC=tokens.x_NLC.detach())
        return Gaussian(mean_ND, branch.logvar(tokens))

    def forward(
        self, image: Tensor | CachedTokens | LabelledImages | None = None, text: Tensor | CachedTokens | None = None
    ) -> Any:
        if not self.output_dict:
            return super().forward(image, text)
        images = self.encode_image_gaussian(image) if image is not None else None
        texts = self.encode_text_gaussian(text) if text is not None else None
        encoded = images or texts
        samples = 1 if encoded is None else encoded.mean.shape[0]
        logit_scale = self.logit_scale.exp()
        out = {
            "image_features": images.mean if images else None,
            "text_features": texts.mean if texts else None,
            "logit_scale": logit_scale,
            "image_logvar": images.logvar if images else None,
            "text_logvar": texts.logvar if texts else None,
            "clip_scale": logit_scale.float().reshape(1).repeat(samples),
            "match_scale": self.match_scale.repeat(samples),
            "match_shift": self.match_shift.repeat(samples),
        }
        if self.logit_bias is not None:
            out["logit_bias"] = self.logit_bias
        if isinstance(image, LabelledImages):
            out |= image.labels
        return out

    def forward_intermediates(
        self, image: Tensor | None = None, text: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return open_clip's `forward_intermediates` with `image_logvar` and `text_logvar` beside the final features.

        The log-variances take a forward pass of their own.
        """
        padded = text
        if text is not None:
            self.text_branch.tower.check(text)
            padded = F.pad(text, (0, max(0, self.context_length - text.shape[1])))  # open_clip takes full texts only
        stock = super().forward_intermediates  # type: ignore[misc]
        out = stock(image, padded, *args, **kwargs)
        if text is not None:
            out["text_intermediates"] = [x_NLC[:, : text.shape[1]] for x_NLC in out["text_intermediates"]]
        bound = inspect.signature(stock).bind(image, padded, *args, **kwargs).arguments
        for name, branch, batch in (("image", self.image_branch, image), ("text", self.text_branch, text)):
            if batch is None or f"{name}_features" not in out:
                continue
            tokens = branch.tokens(batch)
            out[f"{name}_logvar"] = branch.logvar(tokens)
            if self.pcmepp_cfg.pool == "gpo":  # open_clip has returned the output of its own pooling
                mean_ND = branch.mean(tokens)
                out[f"{name}_features"] = F.normalize(mean_ND, dim=-1) if bound.get("normalize", True) else mean_ND
        return out

    def lock_image_tower(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        with self.image_branch.tower.lockable():
            super().lock_image_tower(unlocked_groups, freeze_bn_stats)  # type: ignore[misc]
        for name, parameter in self.visual.named_parameters():
            if is_pcmepp_parameter(name):
                parameter.requires_grad = True

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True, **how: Any) -> None:
        super().set_grad_checkpointing(enable, **how)  # type: ignore[misc]
        self.image_branch.set_recompute(enable)
        self.text_branch.set_recompute(enable)

    # These methods are about frozen towers.

    def freeze_towers(self) -> None:
        """Train the log-variance branches and a, b alone; ValueError for a model with GPO.

        Everything else stays as it is, also in training mode: batch norms keep their statistics, nothing is dropped,
        and no graph is recorded.
        """
        if self.pcmepp_cfg.pool == "gpo":
            raise ValueError(
                "Towers cannot be frozen with pcmepp_cfg.pool 'gpo': the pooling of the means is untrained."
            )
        self.head_only = True
        trained = ("logit_scale", "logit_bias") if self.pcmepp_cfg.match_logit == "siglip" else ()
        for name, parameter in self.named_parameters():
            parameter.requires_grad = is_pcmepp_parameter(name) or name in trained
        self.train(self.training)

    def train(self, mode: bool = True) -> "ProbabilisticModel":
        super().train(mode)
        if self.head_only:
            branches = (*self.image_branch.modules, *self.text_branch.modules)
            trained = {id(self), *(id(part) for module in branches for part in module.modules())}
            for module in self.modules():
                if id(module) not in trained:
                    module.training = False
        if self.has_lora:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = False
        return self

    def add_lora(self, rank: int) -> None:
        """Train low-rank changes of the weights of both towers, see `lora`.

        The log-variance branches, a, b and the logit scale and bias are trained, too. All else is frozen, and batch
        norms keep their statistics, also in training mode.
        """
        add_lora(self, rank, kept=lambda name: is_pcmepp_parameter(name) or name in ("logit_scale", "logit_bias"))
        self.has_lora = True
        self.train(self.training)

    @torch.no_grad()
    def cache_image(self, image: Tensor) -> CachedTokens:
        """Return the part of a training step on these images that frozen towers compute."""
        return self._cached(self.image_branch, image)

    @torch.no_grad()
    def cache_text(self, text: Tensor) -> CachedTokens:
        """Return the part of a training step on these token ids that frozen towers compute."""
        return self._cached(self.text_branch, text)

    def _cached(self, branch: Branch, batch: Tensor) -> CachedTokens:
        branch.tower.check(batch)
        tokens = branch.tokens(batch)
        return CachedTokens(F.normalize(branch.mean(tokens).float(), dim=-1), tokens.x_NLC, tokens.text_NL)

    # These methods are about texts.

    @property
    def texts_may_be_cut(self) -> bool:
        """Return whether texts without their padding give the same result."""
        return self.text_branch.tower.may_be_cut

    @property
    def text_pad_id(self) -> int:
        """Return the token id that texts are padded with."""
        return self.text_branch.tower.pad_id

    def text_lengths(self, text_NL: Tensor) -> Tensor:
        """Return how many of the first tokens of each text its log-variance can depend on, [N]."""
        return self.text_branch.tower.lengths(text_NL)


class PCMEppCLIP(ProbabilisticModel, open_clip.CLIP):
    """A CLIP whose encoders map an image or a text to a Gaussian (PCME++, ICLR 2024), see `ProbabilisticModel`."""


class PCMEppCustomTextCLIP(ProbabilisticModel, open_clip.CustomTextCLIP):
    """A probabilistic CLIP whose text tower is a module of its own, such as SigLIP's or a Hugging Face model."""


def is_pcmepp_parameter(name: str) -> bool:
    """Return whether a tensor of that name is PCME++'s own, not the plain model's."""
    return "uncertainty_" in name or is_gpo_mean(name) or name in ("negative_scale", "shift")


def is_gpo_mean(name: str) -> bool:
    """Return whether a tensor of that name belongs to the pooling of the means by GPO."""
    return f"{MEAN}." in name
