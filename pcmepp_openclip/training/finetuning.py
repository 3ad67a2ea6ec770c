"""The flags of a fine-tuning recipe and of the optimizer.

These are learning rates by layer, a step schedule, frozen epochs, averaged weights and the best checkpoint. Any model
may use each of them, and all are off by default. Epochs are counted from 0, as in the log.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from ..system.flags import FIXED, PRIVATE, Flag, number
from ..system.text import did_you_mean

DROP_FACTOR = 0.1
TIMM, LOOKAHEAD = "timm/", "lookahead_"
BY_FLAGS = {  # arguments of an optimizer that have flags of their own
    "lr": "--lr",
    "betas": "--beta1 and --beta2",
    "eps": "--eps",
    "weight_decay": "--wd",
    "momentum": "--momentum",
}


def has_groups(config: Any) -> bool:
    """Return whether parameters have learning rates of their own."""
    factors = config.layer_decay, config.image_lr_multiplier, config.text_lr_multiplier
    return any(factor not in (None, 1.0) for factor in factors)


def frozen_epochs(config: Any) -> int:
    """Return the number of epochs at the start in which a part of the model is frozen."""
    return max(config.freeze_image_epochs or 0, config.freeze_text_epochs or 0)


def check_optimizer(config: Any) -> None:
    """Raise ValueError for an optimizer that cannot be built."""
    name = config.opt.lower()
    if name == "adamw":
        return
    known = _timm_names()
    if name.removeprefix(TIMM).removeprefix(LOOKAHEAD) not in known:
        hint = did_you_mean(TIMM + name.removeprefix(TIMM), [TIMM + each for each in known], "see timm.optim.")
        raise ValueError(f"--opt {config.opt}: there is no such optimizer; {hint}")
    if not name.startswith(TIMM):
        raise ValueError(f"--opt {config.opt} is one of timm's optimizers: write {TIMM}{name}.")
    if (config.beta1 is None) != (config.beta2 is None):
        missing = "--beta2" if config.beta2 is None else "--beta1"
        raise ValueError(f"--opt {config.opt} takes both betas or neither, for its own defaults: give {missing}.")
    if config.lr is None:
        raise ValueError(f"--opt {config.opt} has no default learning rate: give --lr.")


def _timm_names() -> list[str]:
    import timm.optim

    return [str(name) for name in timm.optim.list_optimizers()]


def _defaults(name: str) -> dict[str, Any]:
    """Return the arguments of an optimizer with their default values."""
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    if name == "adamw":
        return torch.optim.AdamW(parameter).defaults
    import timm.optim

    return timm.optim.create_optimizer_v2(parameter, name.removeprefix(TIMM), lr=1e-3).defaults


def _key_value(text: str) -> tuple[str, Any]:
    """Return the key and the number or boolean of KEY=VALUE."""
    key, _, value = text.partition("=")
    try:
        if not key.isidentifier():
            raise ValueError
        if value.lower() in ("true", "false"):
            return key, value.lower() == "true"
        return key, int(value) if value.lstrip("+-").isdigit() else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE with a number, true or false") from None


def _check_opt_kwargs(config: Any) -> str | None:
    """Make a dict of the pairs, and check each by the default of the optimizer."""
    config.opt_kwargs, name = dict(config.opt_kwargs), config.opt.lower()
    if name != "adamw" and name.removeprefix(TIMM).removeprefix(LOOKAHEAD) not in _timm_names():
        return None
    defaults = _defaults(name)
    for key, value in config.opt_kwargs.items():
        if key in BY_FLAGS:
            return f"--opt-kwargs {key}: use {BY_FLAGS[key]}."
        if key not in defaults:
            hint = did_you_mean(key, [*defaults.keys() - BY_FLAGS.keys()], "see timm.optim.")
            return f"--opt-kwargs {key}: --opt {config.opt} has no such argument; {hint}"
        if defaults[key] is not None and isinstance(defaults[key], bool) != isinstance(value, bool):
            kind = "true or false" if isinstance(defaults[key], bool) else "a number"
            return f"--opt-kwargs {key} must be {kind}, not {value}."
    return None


def _within_run(flag: str, epoch: int, config: Any, why: str) -> str | None:
    """Return what is wrong with an epoch that the run does not have."""
    return f"{flag} {epoch} is not below --epochs {config.epochs}: {why}." if epoch >= config.epochs else None


def _check_drops(config: Any) -> str | None:
    if config.lr_scheduler != "const" or config.skip_scheduler:
        flag = "--skip-scheduler" if config.skip_scheduler else f"--lr-scheduler {config.lr_scheduler}"
        return f"--lr-drop-epochs needs a constant learning rate: give --lr-scheduler const, not {flag}."
    if len(set(config.lr_drop_epochs)) < len(config.lr_drop_epochs):
        return "--lr-drop-epochs names an epoch twice: change --lr-drop-factor for a larger drop."
    return _within_run("--lr-drop-epochs", max(config.lr_drop_epochs), config, "the learning rate would never drop")


def _check_drop_factor(config: Any) -> str | None:
    if config.lr_drop_epochs is not None:
        return None
    return "--lr-drop-factor is for --lr-drop-epochs: give the epochs, or drop it."


def _check_freeze(tower: str, unlocked: str) -> Callable[[Any], str | None]:
    """Return the check of the number of epochs in which a tower is frozen.

    Arguments:
        unlocked: the flag of open_clip that leaves a part of a locked tower trained.
    """

    def check(config: Any) -> str | None:
        flag, lock = f"--freeze-{tower}-epochs", f"--lock-{tower}"
        epochs = getattr(config, f"freeze_{tower}_epochs")
        locked = getattr(config, f"lock_{tower}") and not getattr(config, unlocked)
        for other, on in ((lock, locked), ("--head-only", config.head_only)):
            if epochs and on:
                return f"{other} freezes the tower for the whole run: drop it, or {flag}."
        return _within_run(flag, epochs, config, f"the tower would never be trained; {lock} is for that")

    return check


def _check_warm_up(config: Any) -> str | None:
    if not frozen_epochs(config):
        return "--warm-up-after-freeze needs a frozen tower: give --freeze-image-epochs, or drop it."
    if config.warm_up_after_freeze == "lr" and config.skip_scheduler:
        return "--warm-up-after-freeze lr needs a schedule: drop --skip-scheduler."
    return None


def _needs_logs(flag: str, config: Any) -> str | None:
    return None if config.keeps_files else f"{flag} keeps a checkpoint of the run: set their folder with --logs."


def _check_average(config: Any) -> str | None:
    if config.lora:
        return (
            "--swa-start-epoch cannot be combined with --lora: the average of a product is not the product of "
            "averages. Drop one of them."
        )
    late = _within_run("--swa-start-epoch", config.swa_start_epoch, config, "no weights would be averaged")
    return late or _needs_logs("--swa-start-epoch", config)


def _check_best(config: Any) -> str | None:
    if not config.val_data or not config.val_frequency:
        return "--save-best chooses by a validation: give --val-data, and a --val-frequency above 0."
    return _needs_logs("--save-best", config)


FLAGS = (
    Flag(
        "--layer-decay",
        number(float, above=0, most=1),
        "multiply the learning rate by X from each block of a tower to the one before it",
        record=FIXED,
    ),
    *(
        Flag(
            f"--{tower}-lr-multiplier",
            number(float, above=0),
            f"multiply the learning rate of the {tower} tower, without heads, by X",
            record=FIXED,
        )
        for tower in ("image", "text")
    ),
    Flag(
        "--lr-drop-epochs",
        number(int, 0),
        "multiply the learning rate by --lr-drop-factor from each of these epochs on; with --lr-scheduler const",
        nargs="+",
        check=_check_drops,
    ),
    Flag(
        "--lr-drop-factor",
        number(float, above=0),
        f"the factor of --lr-drop-epochs (default: {DROP_FACTOR})",
        check=_check_drop_factor,
    ),
    *(
        Flag(
            f"--freeze-{tower}-epochs",
            number(int, 0),
            f"do not train the {tower} tower, without heads, in the first N epochs",
            check=_check_freeze(tower, unlocked),
        )
        for tower, unlocked in (("image", "lock_image_unlocked_groups"), ("text", "lock_text_unlocked_layers"))
    ),
    Flag(
        "--warm-up-after-freeze",
        None,
        "in the first epoch after the frozen ones, raise linearly from zero to its full value: the loss, as the "
        "authors' code does (the default), or the learning rate (lr), as their paper says",
        nargs="?",
        const="loss",
        choices=["loss", "lr"],
        check=_check_warm_up,
    ),
    Flag(
        "--swa-start-epoch",
        number(int, 0),
        "average the weights after each epoch from N on, see checkpoints/swa.pt",
        check=_check_average,
    ),
    Flag(
        "--save-best",
        bool,
        "keep the weights with the highest RSUM on --val-data as checkpoints/best.pt",
        check=_check_best,
        record=PRIVATE,
    ),
    Flag(
        "--opt-kwargs",
        _key_value,
        "further arguments of the optimizer, such as wd_ratio=0.1 nesterov=false of --opt timm/adamp",
        nargs="+",
        metavar="KEY=VALUE",
        record=FIXED,
        check=_check_opt_kwargs,
    ),
)
