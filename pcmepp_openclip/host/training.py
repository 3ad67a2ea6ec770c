"""The host boundary for training: the seams of `open_clip_train`, of which stock `main` is run unmodified.

`main` and its loop look names up in their modules when they need them. While `run_main` runs some of these names are
ours; afterwards they are the stock ones again.
"""

import builtins
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import open_clip_train.logger
import open_clip_train.main
import open_clip_train.params
import open_clip_train.train
import torch
from open_clip_train.distributed import world_info_from_env  # noqa: F401  for `train`
from torch import nn

from .weights import plain_names

stock_parse_args = open_clip_train.params.parse_args
stock_train_one_epoch = open_clip_train.train.train_one_epoch
stock_evaluate = open_clip_train.train.evaluate
stock_get_data = open_clip_train.main.get_data
stock_get_latest_checkpoint = open_clip_train.main.get_latest_checkpoint
stock_pt_load = open_clip_train.main.pt_load
_stock_load_optimizer = torch.optim.Optimizer.load_state_dict

OPTIMIZER_FLAGS = ("lr", "betas", "eps", "weight_decay", "momentum")  # as torch and timm name what the flags set


def trains_on_cpu(args: Any) -> bool:
    """Whether stock `main` will take the CPU: asked for by --device, or for want of the device that is."""
    kind = args.device.partition(":")[0]
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available())


@contextlib.contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """The attributes of `module` given by keyword, while the context lasts."""
    missing = object()
    before = {name: vars(module).get(name, missing) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(module, name)
            else:
                setattr(module, name, value)


def run_main(argv: list[str], **names: Callable) -> int:
    """open_clip's `main`, with some of the functions that it calls replaced by name; its exit code."""
    for name in names:
        if not hasattr(open_clip_train.main, name):
            raise ImportError(f"open_clip_train.main has no {name}: this open_clip is not supported.")
    with (
        replaced(open_clip_train.main, **names),
        replaced(torch.nn.parallel, DistributedDataParallel=DDP),
        replaced(torch.optim.Optimizer, load_state_dict=_load_optimizer),
    ):
        return open_clip_train.main.main(argv) or 0


def _load_optimizer(optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
    """torch's, which takes the checkpoint's --wd, --beta1, ... over those of the command line, with these kept."""
    wanted = [{name: group[name] for name in OPTIMIZER_FLAGS if name in group} for group in optimizer.param_groups]
    _stock_load_optimizer(optimizer, state_dict)
    for group, flags in zip(optimizer.param_groups, wanted, strict=True):
        group.update(flags)


def stock_setup_logging(*args: Any) -> None:
    """open_clip's, which turns every logger up, less the pages that torch's compiler then prints at exit."""
    from ..system.redact import redact_logs

    open_clip_train.logger.setup_logging(*args)
    redact_logs()
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch._", "torch.fx")):
            logging.getLogger(name).setLevel(logging.WARNING)


def steps(batches: Iterable, hook: Callable[[Iterable], Iterator]) -> contextlib.AbstractContextManager:
    """While it lasts, the training loop's `enumerate(batches)` is `hook(batches)`: code between the steps."""

    def enumerate_(iterable: Iterable, *args: Any) -> Iterator:
        return hook(iterable) if iterable is batches else builtins.enumerate(iterable, *args)

    return replaced(open_clip_train.train, enumerate=enumerate_)


def metrics_of(compute: Callable) -> contextlib.AbstractContextManager:
    """While it lasts, `compute(image_features, text_features, logit_scale)` gives the validation's metrics."""
    return replaced(open_clip_train.train, get_clip_metrics=compute)


class DDP(nn.parallel.DistributedDataParallel):
    """DDP as open_clip calls it, that also runs on CPUs and reduces gradients once for k accumulated passes.

    Arguments:
        passes: how many forward passes with gradients make a step (a class attribute, since `main` builds the
            instance; 1 where every pass is reduced, as stock open_clip does).
    """

    passes = 1

    def __init__(self, module: nn.Module, device_ids: Any = None, **kwargs: Any):
        on_cpu = next(module.parameters()).device.type == "cpu"
        super().__init__(module, device_ids=None if on_cpu else device_ids, **kwargs)
        self._pass = 0

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes names with and without the `module.` that stock open_clip saves."""
        return self.module.load_state_dict(plain_names(state_dict), *args, **kwargs)

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.passes > 1 and torch.is_grad_enabled():
            self._pass = (self._pass + 1) % self.passes
            self.require_backward_grad_sync = self._pass == 0
        return super().forward(*args, **kwargs)


def innermost(model: nn.Module) -> nn.Module:
    """The model within what `main` wraps it in: DDP, torch.compile."""
    for wrapper in ("_orig_mod", "module"):
        model = getattr(model, wrapper, model)
    return model
