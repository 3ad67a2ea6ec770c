"""Low-rank adaptation (LoRA, Hu et al. 2022): a tower computes with W + B A in place of a weight W.

A and B are trained and of a low rank, W is frozen. B starts at zero, so that the model starts as it was.

The sum is a parametrization of torch's, so that all code that reads `.weight` reads it: a layer of its own, and code
that takes a weight out of a layer, as torch's attention, timm's EVA and the attention pool of a ResNet do. Layers that
wrap another one, such as those of `peft`, do not reach such code.

    add_lora(model, rank=8, kept=...)      # adds A and B
    stock_state_dict(model)                # the model without LoRA: names of open_clip's, weights W + B A
    lora_state_dict(model)                 # W, A and B, which a resumed run needs
    whole_state_dict(stock, lora)          # both together, as the model with LoRA loads them
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..gaussian import full_precision

ARRAYS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # weights of attention without layers
_OWN, _ORIGINAL = "parametrizations.", ".original"  # torch's names: PATH.parametrizations.NAME.original


class LowRank(nn.Module):
    """The sum of a weight W [O, ...] and B A, where A is [R, I], B is [O, R], I the size of a row of W and R the rank.

    The sum is taken in fp32 and has the dtype of W: in bf16 small steps of A and B add up, those of W would be lost.
    """

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, weight[0].numel(), device=weight.device))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        with full_precision(weight):
            return (weight + (self.lora_B @ self.lora_A).view_as(weight)).to(weight.dtype)


def add_lora(model: nn.Module, rank: int, kept: Callable[[str], bool]) -> None:
    """Freeze a model, except for some parameters, and add A and B to every frozen dense weight.

    Dense weights are those of linear layers, of convolutions that are not grouped, and of attention. ValueError if
    there is no such weight.

    Arguments:
        rank: the rank of A and B. Weights of no higher rank stay as they are.
        kept: a function that returns whether the parameter of a name is trained as it is.
    """
    adapted = [(module, name) for path, module, name in _dense_weights(model) if not kept(path)]
    adapted = [(module, name) for module, name in adapted if _full_rank(getattr(module, name)) > rank]
    if not adapted:
        raise ValueError(f"--lora {rank} is no less than the rank of any weight: lower it.")
    for path, parameter in model.named_parameters():
        parameter.requires_grad = kept(path)
    for module, name in adapted:
        parametrize.register_parametrization(module, name, LowRank(getattr(module, name), rank), unsafe=True)


def _dense_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name in the model, the module and the attribute of each dense weight."""
    for path, module in model.named_modules():
        dense = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        for name in ("weight",) if dense else ARRAYS:
            if isinstance(getattr(module, name, None), nn.Parameter):
                yield f"{path}.{name}", module, name


def _full_rank(weight: Tensor) -> int:
    return min(weight.shape[0], weight[0].numel())


@torch.no_grad()
def stock_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model without LoRA, with all changes merged; without LoRA, the model's own."""
    tensors: dict[str, Tensor] = {}
    for path, tensor in model.state_dict().items():
        if _OWN not in path:
            tensors[path] = tensor
        elif path.endswith(_ORIGINAL):
            owner, name = _stock_name(path).rpartition(".")[::2]
            tensors[f"{owner}.{name}"] = getattr(model.get_submodule(owner), name)
    return tensors


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that `stock_state_dict` lacks: W, A and B, or {} for a model without LoRA."""
    return {path: tensor for path, tensor in model.state_dict().items() if _OWN in path}


def whole_state_dict(stock: dict[str, Any], lora: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of a model with LoRA from the results of the two functions above."""
    merged = {_stock_name(path) for path in lora if path.endswith(_ORIGINAL)}
    return {**{path: tensor for path, tensor in stock.items() if path not in merged}, **lora}


def _stock_name(path: str) -> str:
    return path.replace(_OWN, "").removesuffix(_ORIGINAL)
