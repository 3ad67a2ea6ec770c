"""`pcmepp_cfg`: the block of a model's JSON config with the settings of PCME++."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from .distances import DISTANCES, get_distance, trainable
from .losses.batch import NEGATIVES, TermSettings
from .losses.terms import LOSSES, WEIGHT, loss_weights
from .system.text import did_you_mean

HEADS = ("split", "top")
CHOICES = {
    "pool": ("tower", "gpo"),
    "image_head": HEADS,
    "text_head": HEADS,
    "match_logit": ("learned", "tied", "siglip"),
    "train_means_by": ("all", "contrastive"),
    "reduction": ("mean", "sum"),
    "triplet_negatives": NEGATIVES,
}


@dataclass(frozen=True)
class PCMEppCfg:
    """The settings of PCME++.

    Keys that determine the tensors of a checkpoint have no default. Keys that are younger than the first checkpoints
    have one: the value of these checkpoints.

    Arguments:
        head_layers: the number of transformer blocks of the log-variance branch: one in the paper, two in the released
            weights.
        init_logvar_bias: the initial value of a learnable bias, [D], on the log-variances of both towers; null for no
            bias, as in the released weights. At 0 the variances drown the means (512 per side against at most 4), at
            -10 they start at 0.02 per side.
        image_head, text_head: the place where the branch of a tower begins: "split", before its last `head_layers`
            blocks, which open_clip's own transformers allow; or "top", at the tokens or the feature map that it pools.
        pool: the pooling of the tokens: "tower", as the tower itself does, with its projection; or "gpo", the
            generalized pooling operator, for the mean and the log-variance of every tower, which must have tokens.
        image_token_augment: p of the tokens of an image that GPO does not see in training, see `kept_tokens`; 0 for
            none, 0.2 in the paper.
        match_logit: "learned" for a and b of the matching logit -a d + b as parameters of their own; "tied" for
            2a = match_ratio * exp(logit_scale), a constant to the gradient, and a learned b - 2a; or "siglip" for
            2a = exp(logit_scale) and b = logit_bias + 2a, which is SigLIP's logit where the variances are zero.
        match_ratio: 2a / exp(logit_scale) if a is tied: between 0 and 1, and at 1 the variance says nothing.
        init_match_scale, init_match_shift: the initial values of a and b if they are learned; if a is tied, the
            second is the initial value of b - 2a.
        train_means_by: the terms of the loss that train the means: "all", as in the paper, or "contrastive": then every
            other term sees the means, and the tokens that the branches read, as constants, and the means are those of
            plain CLIP.
        distance: d of the matching logit, a name in `DISTANCES`.
        reduction: the reduction of the matching loss, "mean" or "sum", see `matching_loss`.
        triplet_margin, triplet_negatives, triplet_warmup_epochs, pcme_samples, label_smoothing: see `TermSettings`.
        weights: the weights of the loss terms by key, in JSON as `contrastive_weight`, `match_weight`, `pp_weight`,
            `vib_weight` and so on for every name in `LOSSES`; a term that is not listed has its default weight.
    """

    head_layers: int
    init_logvar_bias: float | None
    image_head: str = "split"
    text_head: str = "split"
    pool: str = "tower"
    image_token_augment: float = 0.0
    match_logit: str = "learned"
    match_ratio: float = 0.5
    train_means_by: str = "all"
    init_match_scale: float = 1.0
    init_match_shift: float = 1.0
    distance: str = "csd"
    reduction: str = "mean"
    triplet_margin: float = TermSettings.triplet_margin
    triplet_negatives: str = TermSettings.triplet_negatives
    triplet_warmup_epochs: int = TermSettings.triplet_warmup_epochs
    pcme_samples: int = TermSettings.pcme_samples
    label_smoothing: float = TermSettings.label_smoothing
    weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, least in (("head_layers", 1), ("triplet_warmup_epochs", 0), ("pcme_samples", 1)):
            if type(value := getattr(self, key)) is not int or value < least:
                raise ValueError(f"pcmepp_cfg.{key} must be a whole number of at least {least}, not {value!r:.40}.")
        numbers = {
            name: getattr(self, name)
            for name in (
                *("init_match_scale", "init_match_shift", "match_ratio", "triplet_margin", "image_token_augment"),
                "label_smoothing",
            )
        } | self.weights
        if self.init_logvar_bias is not None:
            numbers["init_logvar_bias"] = self.init_logvar_bias
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"pcmepp_cfg.{key} must be a finite number, not {value!r:.40}.")
            if key in self.weights and value < 0:
                raise ValueError(f"pcmepp_cfg.{key} must be at least 0, not {value!r:.40}.")
        if not any(loss_weights(self.weights).values()):
            raise ValueError("pcmepp_cfg gives every loss term a weight of 0, so there is nothing to train.")
        if self.init_match_scale <= 0:
            raise ValueError(f"pcmepp_cfg.init_match_scale must be positive, not {self.init_match_scale!r:.40}.")
        if self.triplet_margin <= 0:
            raise ValueError(f"pcmepp_cfg.triplet_margin must be positive, not {self.triplet_margin!r:.40}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"pcmepp_cfg.label_smoothing must be at least 0 and below 0.5, not {self.label_smoothing!r:.40}."
            )
        if not 0 < self.match_ratio < 1:
            raise ValueError(f"pcmepp_cfg.match_ratio must be between 0 and 1, not {self.match_ratio!r:.40}.")
        if not 0 <= self.image_token_augment < 1:
            raise ValueError(
                f"pcmepp_cfg.image_token_augment must be at least 0 and below 1, not {self.image_token_augment!r:.40}."
            )
        if self.image_token_augment and self.pool != "gpo":
            raise ValueError(
                "pcmepp_cfg.image_token_augment needs a model that pools tokens by GPO: set pcmepp_cfg.pool to 'gpo', "
                "as PCMEpp-GPO-ViT-B-32 does, or leave it at 0."
            )
        if self.train_means_by == "contrastive" and not loss_weights(self.weights)["contrastive"]:
            raise ValueError(
                "pcmepp_cfg.train_means_by 'contrastive' needs a contrastive_weight above 0, since nothing else would "
                "train the means."
            )
        if self.train_means_by == "contrastive" and loss_weights(self.weights)["triplet"]:
            raise ValueError(
                "pcmepp_cfg.train_means_by 'contrastive' leaves nothing to the triplet loss, which depends on the "
                "means only: set it to 'all', or triplet_weight to 0."
            )
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                either = " or ".join(map(repr, choices))
                raise ValueError(f"pcmepp_cfg.{key} must be {either}, not {getattr(self, key)!r:.40}.")
        try:
            distance = get_distance(str(self.distance)[:40])
        except ValueError as error:
            raise ValueError(f"pcmepp_cfg.distance: {error}") from None
        if not distance.trainable:
            raise ValueError(
                f"pcmepp_cfg.distance '{self.distance}' is a score to rank by and cannot be trained with: choose "
                f"{', '.join(trainable(DISTANCES))}."
            )

    @property
    def term_settings(self) -> TermSettings:
        """Return the settings of single terms of the loss."""
        return TermSettings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(TermSettings)})

    @property
    def trains_matching(self) -> bool:
        """Return whether the matching loss or the pseudo-positive loss is trained."""
        weights = loss_weights(self.weights)
        return bool(weights["match"] or weights["pp"])

    @property
    def trains_clip_scale(self) -> bool:
        """Return whether the loss trains CLIP's scale of the cosine: InfoNCE and SigLIP's matching logit do."""
        by_matching = self.match_logit == "siglip" and self.trains_matching
        return bool(loss_weights(self.weights)["contrastive"]) or by_matching

    @property
    def ranks_by(self) -> str:
        """Return the name of the distance that the model is trained to rank by.

        This is the distance of the matching loss, PCME's match probability if that loss is trained in its place, or the
        cosine if nothing trains variances to rank by.
        """
        if self.trains_matching:
            return self.distance
        return "match_probability" if loss_weights(self.weights)["pcme"] else "cosine"

    @property
    def heads(self) -> dict[str, str]:
        """Return the place of the branch of each tower, by key."""
        return {"image_head": self.image_head, "text_head": self.text_head}

    def as_json(self) -> dict[str, Any]:
        """Return the block that `parse` reads, with the weight of every term."""
        weights = {name + WEIGHT: weight for name, weight in loss_weights(self.weights).items()}
        return {name: value for name, value in vars(self).items() if name != "weights"} | weights

    @classmethod
    def parse(cls, block: Any) -> "PCMEppCfg":
        """Return the checked form of a config's `pcmepp_cfg` block; a mistake is a ValueError that names the key."""
        if not isinstance(block, dict):
            raise ValueError(f"pcmepp_cfg must be a JSON object, not {type(block).__name__}.")
        settings = [f.name for f in dataclasses.fields(cls) if f.name != "weights"]
        weights = [name + WEIGHT for name in LOSSES]
        for key in block:
            if key not in settings and key not in weights:
                known = [*settings, *weights]
                hint = did_you_mean(str(key), known, otherwise=f"known keys: {', '.join(known)}.")
                raise ValueError(f"pcmepp_cfg has an unknown key {str(key)[:60]!r}; {hint}")
        for key in ("head_layers", "init_logvar_bias"):
            if key not in block:
                raise ValueError(f"pcmepp_cfg lacks '{key}', which determines the tensors of a checkpoint.")
        own_weights = {key: value for key, value in block.items() if key in weights}
        return cls(**{key: value for key, value in block.items() if key in settings}, weights=own_weights)
