"""`pcmepp_cfg`: the one block of a model's JSON config that says what is probabilistic about it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .system.text import did_you_mean


@dataclass(frozen=True)
class PCMEppCfg:
    """What makes a CLIP probabilistic. The keys that decide which tensors a checkpoint holds have no default.

    Arguments:
        head_layers: transformer blocks of the log-variance head. The towers split that many blocks before
            their end: one block in the paper, two in the released weights.
        init_logvar_bias: start of a learnable bias, [D], on the log-variances of both towers; null for no
            such parameter, as in the released weights. At 0 the variances drown the means (512 a side
            against at most 4), at -10 they start at 0.02 a side.
        init_match_scale, init_match_shift: start of the scale and shift of the matching logit -a d + b.
        contrastive_weight, match_weight, vib_weight, pp_weight: default weights of the loss's terms; the first is
            InfoNCE's.
        reduction: of the matching loss, "mean" or "sum", see `matching_loss`.
    """

    head_layers: int
    init_logvar_bias: float | None
    init_match_scale: float = 1.0
    init_match_shift: float = 1.0
    contrastive_weight: float = 1.0
    match_weight: float = 1.0
    vib_weight: float = 1e-6
    pp_weight: float = 0.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        if type(self.head_layers) is not int or self.head_layers < 1:
            raise ValueError(f"pcmepp_cfg.head_layers must be a whole number from 1 up, not {self.head_layers!r:.40}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("head_layers", "reduction") or (field.name == "init_logvar_bias" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"pcmepp_cfg.{field.name} must be a finite number, not {value!r:.40}.")
            if field.name.endswith("_weight") and value < 0:
                raise ValueError(f"pcmepp_cfg.{field.name} must not be negative, not {value!r:.40}.")
        if not any((self.contrastive_weight, self.match_weight, self.vib_weight, self.pp_weight)):
            raise ValueError("pcmepp_cfg gives every term of the loss a weight of 0, so there is nothing to train.")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"pcmepp_cfg.reduction must be 'mean' or 'sum', not {self.reduction!r:.40}.")
        if self.init_match_scale <= 0:
            raise ValueError(f"pcmepp_cfg.init_match_scale must be positive, not {self.init_match_scale!r:.40}.")

    @classmethod
    def parse(cls, block: Any) -> "PCMEppCfg":
        """The checked form of a config's `pcmepp_cfg` block; a mistake is a ValueError that names the key."""
        if not isinstance(block, dict):
            raise ValueError(f"pcmepp_cfg must be a JSON object, not {type(block).__name__}.")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in block:
            if key not in fields:
                hint = did_you_mean(str(key), fields, otherwise=f"known keys: {', '.join(fields)}.")
                raise ValueError(f"pcmepp_cfg has an unknown key {str(key)[:60]!r}; {hint}")
        for key in ("head_layers", "init_logvar_bias"):
            if key not in block:
                raise ValueError(f"pcmepp_cfg lacks '{key}'; it decides which tensors a checkpoint holds.")
        return cls(**block)
