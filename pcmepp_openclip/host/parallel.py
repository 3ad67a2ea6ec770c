"""DDP for training, and the state of an optimizer that is resumed."""

from typing import Any

import torch
from torch import nn

from .weights import plain_names

OPTIMIZER_FLAGS = ("lr", "betas", "eps", "weight_decay", "momentum")  # torch's and timm's names of what flags set


def load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
    """Load the state of an optimizer, but keep --wd, --beta1, ... of this run, which torch would replace."""
    saved, built = len(state_dict["param_groups"]), len(optimizer.param_groups)
    if saved != built:
        raise ValueError(
            f"--resume: the optimizer of the checkpoint has {saved} groups of parameters, and that of this run has "
            f"{built}: give the same --opt, --layer-decay and multipliers, or start a new run from its weights by "
            "--pretrained."
        )
    wanted = [{name: group[name] for name in OPTIMIZER_FLAGS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    for group, kept in zip(optimizer.param_groups, wanted, strict=True):
        group.update(kept)


class DDP(nn.parallel.DistributedDataParallel):
    """DDP that also runs on CPUs, reduces gradients once for several accumulated passes, and adds them up in the same
    order in every step.

    Arguments:
        passes: number of forward passes with gradients in a step.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, passes: int = 1, **kwargs: Any):
        self.passes = passes
        on_cpu = next(module.parameters()).device.type == "cpu"
        super().__init__(module, device_ids=None if on_cpu else device_ids, **kwargs)
        self._pass = 0
        self._ordered = self.process_group.size() <= 2  # the sum of two is the same in any order

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with or without the `module.` that stock open_clip saves in front of the names."""
        return self.module.load_state_dict(plain_names(state_dict), *args, **kwargs)

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._ordered:
            self._ordered = True
            self._order_buckets(*args, **kwargs)
        if self.passes > 1 and torch.is_grad_enabled():
            self._pass = (self._pass + 1) % self.passes
            self.require_backward_grad_sync = self._pass == 0
        return super().forward(*args, **kwargs)

    def _order_buckets(self, *args: Any, **kwargs: Any) -> None:
        """Run a pass and drop its gradients. DDP notes in which order they arrive, and sorts its buckets by that once.

        The place of a gradient in its bucket determines in which order the ranks' values are added. Without this pass
        the first step after a start had another order than all others, and a resumed run differed in the last bits.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            out = super().forward(*args, **kwargs)
        values = out.values() if isinstance(out, dict) else out
        torch.stack([value.float().sum() for value in values if value.requires_grad]).sum().backward()
        for parameter in self.module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model is compiled."""
    return hasattr(model, "_orig_mod")


def innermost(model: nn.Module) -> nn.Module:
    """Return the model within DDP and torch.compile."""
    for wrapper in ("_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return model
