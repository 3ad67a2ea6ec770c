"""The optimizer of a run: open_clip's AdamW or one of timm's, such as AdamP (--opt timm/adamp), and its arguments."""

import argparse
from typing import Any

import torch

from ..system.text import did_you_mean

TIMM, LOOKAHEAD = "timm/", "lookahead_"
BY_FLAGS = {  # arguments of an optimizer that have flags of their own
    "lr": "--lr",
    "betas": "--beta1 and --beta2",
    "eps": "--eps",
    "weight_decay": "--wd",
    "momentum": "--momentum",
}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for an optimizer that cannot be built, or for arguments that it does not take."""
    name = args.opt.lower()
    if name.startswith(TIMM) and (args.beta1 is None) != (args.beta2 is None):
        missing = "--beta2" if args.beta2 is None else "--beta1"
        raise ValueError(f"--opt {args.opt} takes both betas or neither, for its own defaults: give {missing}.")
    known = _timm_names() if name != "adamw" else []
    if name != "adamw" and name.removeprefix(TIMM).removeprefix(LOOKAHEAD) not in known:
        hint = did_you_mean(TIMM + name.removeprefix(TIMM), [TIMM + each for each in known], "see timm.optim.")
        raise ValueError(f"--opt {args.opt}: there is no such optimizer; {hint}")
    if name != "adamw" and not name.startswith(TIMM):
        raise ValueError(f"--opt {args.opt} is one of timm's optimizers: write {TIMM}{name}.")
    if args.opt_kwargs:
        _check_opt_kwargs(args, _defaults(name))
    if name.startswith(TIMM) and args.lr is None:
        raise ValueError(f"--opt {args.opt} has no default learning rate: give --lr.")


def _defaults(name: str) -> dict[str, Any]:
    """Return the arguments of an optimizer with their default values."""
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    if name == "adamw":
        return torch.optim.AdamW(parameter).defaults
    import timm.optim

    return timm.optim.create_optimizer_v2(parameter, name.removeprefix(TIMM), lr=1e-3).defaults


def _check_opt_kwargs(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
    for key, value in args.opt_kwargs.items():
        if key in BY_FLAGS:
            raise ValueError(f"--opt-kwargs {key}: use {BY_FLAGS[key]}.")
        if key not in defaults:
            hint = did_you_mean(key, [*defaults.keys() - BY_FLAGS.keys()], "see timm.optim.")
            raise ValueError(f"--opt-kwargs {key}: --opt {args.opt} has no such argument; {hint}")
        if defaults[key] is not None and isinstance(defaults[key], bool) != isinstance(value, bool):
            kind = "true or false" if isinstance(defaults[key], bool) else "a number"
            raise ValueError(f"--opt-kwargs {key} must be {kind}, not {value}.")


def _timm_names() -> list[str]:
    import timm.optim

    return [str(name) for name in timm.optim.list_optimizers()]
