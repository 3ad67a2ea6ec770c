"""The flags of a fine-tuning recipe.

These are learning rates by layer, a step schedule, frozen epochs, averaged weights and the best checkpoint. Any model
may use each of them, and all are off by default. Epochs are counted from 0, as in the log.
"""

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

from ..system.text import flag_of
from . import optimizers

DROP_FACTOR = 0.1


@dataclass(frozen=True)
class FineTuning:
    """The settings of a fine-tuning recipe. With the defaults a run is as it is without the flags.

    Arguments:
        opt_kwargs: further arguments of the optimizer.
        layer_decay: factor of the learning rate from a block of a tower to the one before it.
        image_multiplier, text_multiplier: factor of the learning rate of a tower, heads excepted.
        drop_epochs, drop_factor: the learning rate is multiplied by the factor from each of these epochs on.
        freeze_image, freeze_text: number of epochs at the start in which the backbone of a tower is not trained.
        warm_up: "loss" or "lr" if that is warmed up in the first epoch after those, else None.
        swa_start: first epoch after which the weights are averaged, or None.
        save_best: whether the weights of the best validation are kept.
    """

    opt_kwargs: dict[str, Any] = field(default_factory=dict)
    layer_decay: float = 1.0
    image_multiplier: float = 1.0
    text_multiplier: float = 1.0
    drop_epochs: tuple[int, ...] = ()
    drop_factor: float = DROP_FACTOR
    freeze_image: int = 0
    freeze_text: int = 0
    warm_up: str | None = None
    swa_start: int | None = None
    save_best: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "FineTuning":
        return cls(
            opt_kwargs=args.opt_kwargs or {},
            layer_decay=_or_default(args.layer_decay, 1.0),
            image_multiplier=_or_default(args.image_lr_multiplier, 1.0),
            text_multiplier=_or_default(args.text_lr_multiplier, 1.0),
            drop_epochs=tuple(args.lr_drop_epochs or ()),
            drop_factor=_or_default(args.lr_drop_factor, DROP_FACTOR),
            freeze_image=args.freeze_image_epochs or 0,
            freeze_text=args.freeze_text_epochs or 0,
            warm_up=args.warm_up_after_freeze,
            swa_start=args.swa_start_epoch,
            save_best=args.save_best,
        )

    @property
    def groups(self) -> bool:
        """Return whether parameters have learning rates of their own."""
        return (self.layer_decay, self.image_multiplier, self.text_multiplier) != (1.0, 1.0, 1.0)

    @property
    def frozen_epochs(self) -> int:
        """Return the number of epochs at the start in which a part of the model is frozen."""
        return max(self.freeze_image, self.freeze_text)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fine-tuning (epochs are counted from 0)")
    for flag, kind, metavar, text in (
        (
            "--layer-decay",
            float,
            "X",
            "multiply the learning rate by X from each block of a tower to the one before it",
        ),
        ("--image-lr-multiplier", float, "X", "multiply the learning rate of the image tower, without heads, by X"),
        ("--text-lr-multiplier", float, "X", "multiply the learning rate of the text tower, without heads, by X"),
        ("--lr-drop-factor", float, "X", f"the factor of --lr-drop-epochs (default: {DROP_FACTOR})"),
        ("--freeze-image-epochs", int, "N", "do not train the image tower, without heads, in the first N epochs"),
        ("--freeze-text-epochs", int, "N", "do not train the text tower, without heads, in the first N epochs"),
        ("--swa-start-epoch", int, "N", "average the weights after each epoch from N on, see checkpoints/swa.pt"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--opt-kwargs",
        nargs="+",
        action=_KeyValues,
        metavar="KEY=VALUE",
        help="further arguments of the optimizer, such as wd_ratio=0.1 nesterov=false of --opt timm/adamp",
    )
    group.add_argument(
        "--lr-drop-epochs",
        type=int,
        nargs="+",
        metavar="N",
        help="multiply the learning rate by --lr-drop-factor from each of these epochs on; with --lr-scheduler const",
    )
    group.add_argument(
        "--warm-up-after-freeze",
        nargs="?",
        const="loss",
        choices=["loss", "lr"],
        help="in the first epoch after the frozen ones, raise linearly from zero to its full value: the loss, as the "
        "authors' code does (the default), or the learning rate (lr), as their paper says",
    )
    group.add_argument(
        "--save-best",
        action="store_true",
        help="keep the weights with the highest RSUM on --val-data as checkpoints/best.pt",
    )


class _KeyValues(argparse.Action):
    """An argparse action that turns KEY=VALUE words into a dict of numbers and booleans."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        arguments: dict[str, Any] = {}
        for word in values:
            key, equals, text = word.partition("=")
            try:
                arguments[key] = {"true": True, "false": False}.get(text.lower())
                if arguments[key] is None:
                    arguments[key] = int(text) if text.lstrip("+-").isdigit() else float(text)
            except ValueError:
                equals = ""
            if not equals or not key.isidentifier():
                raise argparse.ArgumentError(self, f"{word!r} is not KEY=VALUE with a number, true or false")
        setattr(namespace, self.dest, arguments)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that makes no sense, alone or with the others."""
    for name, positive in (("layer_decay", 1.0), ("image_lr_multiplier", None), ("text_lr_multiplier", None)):
        _check_factor(args, name, positive)
    optimizers.check(args)
    _check_drops(args)
    _check_freeze(args)
    _check_average(args)
    if args.save_best:
        if not args.val_data or not args.val_frequency:
            raise ValueError("--save-best chooses by a validation: give --val-data, and a --val-frequency above 0.")
        _check_logs(args, "--save-best")


def _check_factor(args: argparse.Namespace, name: str, most: float | None) -> None:
    value = getattr(args, name)
    if value is None:
        return
    if not (value > 0 and math.isfinite(value) and (most is None or value <= most)):
        limit = "a finite number above 0" if most is None else f"above 0 and at most {most:g}"
        raise ValueError(f"{flag_of(name)} must be {limit}, not {value:g}.")


def _check_epochs(args: argparse.Namespace, name: str, epoch: int, why: str) -> None:
    """Raise ValueError unless the run has an epoch of that index."""
    if epoch < 0:
        raise ValueError(f"{flag_of(name)} must be at least 0, not {epoch}.")
    if epoch >= args.epochs:
        raise ValueError(f"{flag_of(name)} {epoch} is not below --epochs {args.epochs}: {why}.")


def _check_drops(args: argparse.Namespace) -> None:
    if args.lr_drop_epochs is None:
        if args.lr_drop_factor is not None:
            raise ValueError("--lr-drop-factor is for --lr-drop-epochs: give the epochs, or drop it.")
        return
    _check_factor(args, "lr_drop_factor", None)
    if args.lr_scheduler != "const" or args.skip_scheduler:
        flag = "--skip-scheduler" if args.skip_scheduler else f"--lr-scheduler {args.lr_scheduler}"
        raise ValueError(f"--lr-drop-epochs needs a constant learning rate: give --lr-scheduler const, not {flag}.")
    for epoch in args.lr_drop_epochs:
        _check_epochs(args, "lr_drop_epochs", epoch, "the learning rate would never drop")
    if len(set(args.lr_drop_epochs)) < len(args.lr_drop_epochs):
        raise ValueError("--lr-drop-epochs names an epoch twice: change --lr-drop-factor for a larger drop.")


def _check_freeze(args: argparse.Namespace) -> None:
    for name, locked, lock in (
        ("freeze_image_epochs", args.lock_image and not args.lock_image_unlocked_groups, "--lock-image"),
        ("freeze_text_epochs", args.lock_text and not args.lock_text_unlocked_layers, "--lock-text"),
    ):
        epochs = getattr(args, name)
        if epochs is None:
            continue
        _check_epochs(args, name, epochs, f"the tower would never be trained; {lock} is for that")
        for flag, on in ((lock, locked), ("--head-only", args.head_only)):
            if epochs and on:
                raise ValueError(f"{flag} freezes the tower for the whole run: drop it, or {flag_of(name)}.")
    if args.warm_up_after_freeze and not FineTuning.from_args(args).frozen_epochs:
        raise ValueError("--warm-up-after-freeze needs a frozen tower: give --freeze-image-epochs, or drop it.")
    if args.warm_up_after_freeze == "lr" and args.skip_scheduler:
        raise ValueError("--warm-up-after-freeze lr needs a schedule: drop --skip-scheduler.")


def _check_average(args: argparse.Namespace) -> None:
    if args.swa_start_epoch is None:
        return
    _check_epochs(args, "swa_start_epoch", args.swa_start_epoch, "no weights would be averaged")
    if args.lora:
        raise ValueError(
            "--swa-start-epoch cannot be combined with --lora: the average of a product is not the "
            "product of averages. Drop one of them."
        )
    _check_logs(args, "--swa-start-epoch")


def _check_logs(args: argparse.Namespace, flag: str) -> None:
    if not args.logs or args.logs.lower() == "none":
        raise ValueError(f"{flag} keeps a checkpoint of the run: set their folder with --logs.")
