"""A name for the weights that the means of a model depend on."""

from collections.abc import Mapping

from torch import Tensor, nn

from ..system.tensors import fingerprint
from .lora import stock_state_dict
from .pcmepp import is_gpo_mean, is_pcmepp_parameter


def bank_fingerprint(model: nn.Module) -> str:
    """The fingerprint that a bank carries, and that the model must have which the bank is used with.

    A bank holds means alone, so PCME++'s own tensors do not count, except for GPO of the means: a plain model and a
    probabilistic one of the same means share their banks, before and after the log-variances are trained. Whatever
    builds, reads or pushes a bank calls this function, or `weights_fingerprint` of the file of the weights.
    """
    return weights_fingerprint(stock_state_dict(model))


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The same of a state dict. Half precision counts as the fp32 values that it is loaded to."""
    own = {name: tensors[name] for name in sorted(tensors) if not is_pcmepp_parameter(name) or is_gpo_mean(name)}
    return fingerprint({name: x.float() if x.is_floating_point() else x for name, x in own.items()}, "bank")
