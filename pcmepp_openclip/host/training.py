"""open_clip's training: its `main` runs unmodified, with some of the functions that it calls replaced by ours.

`main` and its loop look names up in their modules when they need them. While `run_main` runs, the names in
`seams.TRAINING` are ours; afterwards they are the stock ones again. They call the methods of a `Hooks`,
which know neither the signatures nor the flags of open_clip.
"""

import contextlib
import copy
import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import open_clip
import torch
from open_clip.tokenizer import HFTokenizer
from torch import nn

from . import flags, registration, seams
from .calls import VALIDATION, EpochCall, ValidationCall, computing, metrics_of, stock_evaluate
from .data import bounded
from .loss import create_chunked_clip_loss
from .parallel import ddp_class, innermost, load_optimizer
from .trainer import logger, main, world_info_from_env

__all__ = [
    "computing",
    "innermost",
    "metrics_of",
    "run_main",
    "stock_evaluate",
    "stock_get_data",
    "world_info_from_env",
]

stock_get_data = main.get_data
stock_pt_load = main.pt_load
SCHEDULES = {"cosine": "cosine_lr", "const": "const_lr", "const-cooldown": "const_lr_cooldown"}  # by --lr-scheduler
_stock_schedules = {name: getattr(main, name) for name in SCHEDULES.values()}
_stock_get_latest_checkpoint = main.get_latest_checkpoint


class Hooks(Protocol):
    """What `run_main` calls, in the order of a run."""

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the run folder to resume from."""

    def load_checkpoint(self, path: str) -> dict:
        """The content of a checkpoint, in the format that `main` expects."""

    def set_up_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Called once with what `main` has built, before a checkpoint is loaded into it. `model` is not wrapped."""

    def schedule(self, stock: Callable[[int], float], optimizer: torch.optim.Optimizer, steps: int) -> Callable:
        """A function of the step that sets the learning rates, by open_clip's own; `steps` is those of the run."""

    def check_data(self, data: dict) -> None:
        """Called with what `get_data` returns."""

    def watch_loss(self, loss: nn.Module, saves: bool) -> nn.Module:
        """The loss to train with. `saves` is whether this rank writes to the run folder."""

    def train_epoch(self, epoch: EpochCall) -> None: ...

    def validate(self, call: ValidationCall) -> dict:
        """The metrics."""


def run_main(
    argv: list[str], args: Namespace, begin: Callable[[flags.RunSettings], Hooks], get_data: Callable, passes: int
) -> int:
    """Run open_clip's `main` on these arguments; return its exit code.

    Arguments:
        begin: called once, when the ranks and the run folder are set up, before anything is built.
        get_data: a function with the arguments of open_clip's, and `model`, before it is wrapped.
        passes: number of forward passes with gradients per step. Only the last one reduces gradients; 1 reduces them
            in every pass, as open_clip does.
    """
    return _Main(args, begin, get_data).run(argv, passes)


class _Main:
    """The functions that `main` calls, each under its name in `main`, and a copy of the arguments.

    It is a copy because `main` writes to it, and because saving is switched off in it: `TrainingHooks` saves.
    """

    def __init__(self, args: Namespace, begin: Callable[[flags.RunSettings], Hooks], get_data: Callable):
        self.keep_latest, self.args = args.save_most_recent, copy.copy(args)
        self.args.save_most_recent = False
        self.begin, self.make_data = begin, get_data
        self.ledger = seams.Ledger()
        self.resumes_latest = args.resume == "latest"
        self.start_epoch: int | None = None  # of the checkpoint that the run was resumed from
        self.data: dict = {}
        self.model: Any = None  # before `main` wraps it
        self.optimizer_is_set_up = False
        self.saves = False
        self._hooks: Hooks | None = None

    def run(self, argv: list[str], passes: int) -> int:
        with contextlib.ExitStack() as stack:
            for seam in seams.MAIN:
                stack.enter_context(seam.replaced(self.ledger.noting(seam, getattr(self, seam.name))))
            ddp = ddp_class(passes, on_use=lambda: self.ledger.enter(seams.DDP))
            stack.enter_context(seams.DDP.replaced(ddp))
            stack.enter_context(seams.OPTIMIZER.replaced(self.ledger.noting(seams.OPTIMIZER, self.load_optimizer)))
            code = main.main(argv) or 0
        if code == 0:
            self._check_end()
        return code

    @property
    def hooks(self) -> Hooks:
        self._expect("setup_logging")
        assert self._hooks is not None
        return self._hooks

    def _expect(self, *names: str) -> None:
        """HostChanged if `main` has not called one of these functions, which should come before the current one."""
        self.ledger.expect(*(seam for seam in seams.MAIN if seam.name in names))

    def _expect_set_up(self) -> None:
        self._expect("create_model_and_transforms", "get_tokenizer", "get_data")
        if self.args.distributed and not self.args.horovod:
            self.ledger.expect(seams.DDP)
        if self.resumes_latest and self.args.rank == 0:
            self._expect("get_latest_checkpoint")
        if self.args.resume is not None:
            self._expect("pt_load")
        if self.start_epoch is not None and "train" in self.data:
            self.ledger.expect(seams.OPTIMIZER)
        if "train" in self.data:
            self._expect(SCHEDULES[self.args.lr_scheduler])

    def _check_end(self) -> None:
        self._expect("parse_args", "setup_logging")
        self._expect_set_up()
        if "train" not in self.data:
            return self._expect("evaluate")
        self._expect("create_loss")
        if (self.start_epoch or 0) < self.args.epochs:
            self._expect("train_one_epoch")
            if not self.data.keys().isdisjoint(VALIDATION):
                self._expect("evaluate")

    # What `main` calls, in this order.

    def parse_args(self, _argv: list[str]) -> Namespace:
        return self.args

    def setup_logging(self, *args: Any) -> None:
        """open_clip's, which makes every logger verbose, except that torch's compiler is kept quiet at exit."""
        from ..system.files import warn_once_of_a_full_disk
        from ..system.redact import redact_logs

        self._expect("parse_args")
        logger.setup_logging(*args)
        redact_logs()
        warn_once_of_a_full_disk()
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch._", "torch.fx")):
                logging.getLogger(name).setLevel(logging.WARNING)
        self._hooks = self.begin(flags.run_settings(self.args, self.keep_latest))

    def get_latest_checkpoint(self, path: str, remote: bool) -> str | None:
        if remote:
            return _stock_get_latest_checkpoint(path, remote)
        found = self.hooks.newest_checkpoint()
        return str(found) if found else None

    def create_model_and_transforms(self, model_name: str, *args: Any, **kwargs: Any) -> Any:
        self._expect("setup_logging")
        if self.args.pcmepp_cfg is not None and model_name == self.args.model:
            kwargs["pcmepp_cfg"] = self.args.pcmepp_cfg
        before = registration.LEDGER.calls.copy()
        try:
            model, for_training, for_validation = open_clip.create_model_and_transforms(model_name, *args, **kwargs)
        except TypeError:  # the class does not know `pcmepp_cfg`, so it is not ours
            if "pcmepp_cfg" in kwargs:
                registration.LEDGER.expect(*(x for x in seams.LIBRARY if x.name == "CLIP"), since=before)
            raise
        pretrained = args[0] if args else kwargs.get("pretrained")
        for seam, times in _library_seams(model_name, model, pretrained):
            registration.LEDGER.expect(seam, since=before, times=times)
        if model_name == self.args.model:
            self.model = model
            if self.args.head_only:
                model.freeze_towers()
                self._say_frozen("Head only: both towers are frozen", "Head only")
            if self.args.lora:
                model.add_lora(self.args.lora)
                self._say_frozen(f"LoRA of rank {self.args.lora}: the weights of both towers are frozen", "LoRA")
        return model, for_training, bounded(for_validation)

    def _say_frozen(self, what: str, flag: str) -> None:
        if self.args.rank == 0:
            trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
            logging.info("%s, %d parameters are trained.", what, trained)
            if flags.starts_random(self.args):
                logging.warning(
                    "%s: the frozen towers have random weights, which are never trained: give --pretrained, "
                    "or --resume a run.",
                    flag,
                )

    def pt_load(self, path: str, map_location: Any = None) -> dict:
        checkpoint = self.hooks.load_checkpoint(path)
        self.start_epoch = checkpoint.get("epoch")
        return checkpoint

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state_dict: dict) -> None:
        self._set_up(optimizer)
        load_optimizer(optimizer, state_dict)

    def _set_up(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.optimizer_is_set_up:
            self.hooks.set_up_optimizer(optimizer, self.model)
            self.optimizer_is_set_up = True

    def get_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
        before = registration.LEDGER.calls.copy()
        tokenizer = open_clip.get_tokenizer(*args, **kwargs)
        if isinstance(tokenizer, HFTokenizer):
            registration.LEDGER.expect(*(x for x in seams.LIBRARY if x.name == "HFTokenizer"), since=before)
        return tokenizer

    def get_data(self, *args: Any, **kwargs: Any) -> dict:
        self._expect("create_model_and_transforms", "get_tokenizer")
        self.data = self.make_data(*args, model=self.model, **kwargs)
        self.hooks.check_data(self.data)
        return self.data

    def cosine_lr(self, *args: Any) -> Callable:
        return self._schedule("cosine_lr", *args)

    def const_lr(self, *args: Any) -> Callable:
        return self._schedule("const_lr", *args)

    def const_lr_cooldown(self, *args: Any) -> Callable:
        return self._schedule("const_lr_cooldown", *args)

    def _schedule(self, name: str, optimizer: Any, lr: float, warmup: int, steps: int, *more: Any) -> Callable:
        self._expect("get_data")
        self._set_up(optimizer)
        return self.hooks.schedule(_stock_schedules[name](optimizer, lr, warmup, steps, *more), optimizer, steps)

    def create_loss(self, args: Namespace) -> nn.Module:
        """The last call before the first epoch. From here on `main` does not save."""
        self._expect("get_data")
        self.saves, args.save_logs = bool(args.save_logs), False
        loss = create_chunked_clip_loss(args) if args.chunked_clip_loss else open_clip.create_loss(args)
        return self.hooks.watch_loss(loss, self.saves)

    def train_one_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._expect_set_up()
        self._expect("create_loss")
        self.hooks.train_epoch(EpochCall(args, kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict:
        self._expect_set_up()
        call = ValidationCall(args, kwargs)
        if "train" in call.data:
            self._expect("train_one_epoch")
            call.write_results(self.saves)
        return self.hooks.validate(call)


def _library_seams(model_name: str, model: nn.Module, pretrained: str | None) -> list[tuple[seams.Seam, int]]:
    """The seams that `create_model` calls for such a model, and how often."""
    schema, colon, rest = model_name.partition(":")
    times = {"parse_model_name": 1}
    if not colon:
        times |= {"get_model_config": 1} | ({"get_pretrained_cfg": 1, "load_checkpoint": 1} if pretrained else {})
    elif schema == "hf-hub":
        times |= {"_get_hf_config": 1, "download_pretrained_from_hf": 2}  # for the config and for the weights
    elif (Path(rest) / registration.repos.CONFIG_FILE).is_file():
        times |= {"_find_checkpoint_in_dir": 1}
    for kind in ("CoCa", "CustomTextCLIP", "CLIP"):
        if isinstance(model, getattr(open_clip, kind)):
            times[kind] = 1
            break
    return [(seam, times[seam.name]) for seam in seams.LIBRARY if seam.caller and seam.name in times]
