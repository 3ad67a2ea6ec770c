"""Names for a model by everything that its embeddings depend on: its weights, its config in use and its token ids.

`bank_fingerprint` is the name by the means alone, and `model_fingerprint` by the log-variances too.
"""

from typing import Any

from torch import nn

from ..host.towers.config import config_in_use
from ..system.tensors import fingerprint
from .lora import stock_state_dict
from .pcmepp import ProbabilisticModel, is_gpo_mean, is_pcmepp_parameter

PROBES = ["", "a photo of a dog", "  Zwölf  Boxkämpfer_&amp;amp; 1 x 2 = 2!\t<b>\ufb01n</b>", "dog " * 500]
"""Texts whose token ids differ with the cleaning, the vocabulary and the context length of a tokenizer."""


def bank_fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Return the fingerprint that a bank carries, which the model that uses the bank must have.

    A bank holds means alone, so PCME++'s own tensors do not count, except for GPO of the means: a plain model and a
    probabilistic one of the same means share their banks, before and after the log-variances are trained.
    """
    return _fingerprint(model, tokenizer, means_only=True)


def model_fingerprint(model: nn.Module, tokenizer: Any) -> str:
    """Return the fingerprint of the means and the log-variances of a model."""
    return _fingerprint(model, tokenizer, means_only=False)


def _fingerprint(model: nn.Module, tokenizer: Any, means_only: bool) -> str:
    facts = [config_in_use(model), tokenizer(PROBES).tolist()]
    if not means_only and isinstance(model, ProbabilisticModel):
        facts.append(model.pcmepp_cfg.as_json())
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in sorted(stock_state_dict(model).items())
        if not means_only or not is_pcmepp_parameter(name) or is_gpo_mean(name)
    }
    return fingerprint(tensors, facts)
