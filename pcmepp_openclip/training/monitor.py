"""What a user sees of a training run: diagnostics, a progress bar, and the error for a loss that is not finite."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..host.flags import RunSettings
from ..losses.collectives import all_reduce
from ..losses.pcmepp import PCMEppLoss
from ..runs import checkpoints, record
from ..system.errors import RunFailed
from .health import HealthCheck


class NonFiniteLoss(RunFailed):
    """The loss is not finite. Raised once, on all ranks, with the step and the terms."""


class Monitor:
    """Watches the loss of open_clip's loop, without changing what is computed.

    At open_clip's logging interval: PCME++'s diagnostics, averaged over ranks, to the console, TensorBoard and W&B,
    the warnings of `HealthCheck`, and the check that the loss was finite in every step since the last one. Between
    these steps nothing waits for the device.

    Arguments:
        loss: the loss to watch; train with `Monitor.loss`.
        settings: of the run.
        cfg: the model's `pcmepp_cfg`, None for a plain model.
    """

    def __init__(self, loss: nn.Module, settings: RunSettings, cfg: dict | None):
        self.loss = MonitoredLoss(loss, settings.checkpoints, settings.distributed)
        self.rank, self.wandb = settings.rank, settings.wandb
        batch = settings.samples_per_batch * settings.accum_freq
        self.health = HealthCheck(PCMEppCfg.parse(cfg).as_json(), batch, settings.warmup) if cfg else None
        self.history: Path | None = None  # the file in which the loss is recorded
        self.steps = 0  # of the whole run, set before its first epoch

    def check(self) -> None:
        """Raise on all ranks if the loss of any step so far was not finite. Waits for the device."""
        self.loss.check()

    def report(self, step: int, samples: int, tb_writer: Any) -> None:
        """On every rank, after a step at the logging interval."""
        self.check()
        seen = self.loss.diagnostics()
        if self.history is not None:
            terms = {name: value.item() for name, value in self.loss.terms.items()}
            record.append_line(self.history, {"step": step, "samples": samples, **terms, **seen})
        if not seen or self.rank != 0:
            return
        logging.info(
            f"PCME++ step {step} " + " ".join(f"{name}: {value:#.5g}".rstrip(".") for name, value in seen.items())
        )
        scalars = {f"train/{name}": value for name, value in seen.items()}
        if tb_writer is not None:
            for name, value in scalars.items():
                tb_writer.add_scalar(name, value, step)
        if self.wandb:
            import wandb

            wandb.log(scalars, step=step)
        if self.health is not None:
            for warning in self.health.warnings(step, self.steps, seen):
                logging.warning(warning)


class MonitoredLoss(nn.Module):
    """A loss that remembers, on its device, the first step at which it was not finite."""

    def __init__(self, loss: nn.Module, checkpoints: Path, distributed: bool):
        super().__init__()
        self.loss = loss
        self.checkpoints, self.distributed = checkpoints, distributed
        self.step = 0
        self.first_bad = torch.tensor(math.inf)
        self.bad_terms: dict[str, Tensor] = {}
        self.terms: dict[str, Tensor] = {}  # of the last call

    def before_step(self, step: int, epoch: int, logged: bool) -> None:
        self.step = step
        if isinstance(self.loss, PCMEppLoss):
            self.loss.step, self.loss.epoch, self.loss.diagnose = step, epoch, logged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.loss(*args, **kwargs)
        terms = {name: value.detach() for name, value in (out if isinstance(out, dict) else {"loss": out}).items()}
        with torch.no_grad():
            total = torch.stack(list(terms.values())).sum()
            if not self.bad_terms:
                self.first_bad, self.bad_terms = self.first_bad.to(total.device), terms
            good = torch.isfinite(total) | torch.isfinite(self.first_bad)
            self.bad_terms = {name: torch.where(good, self.bad_terms[name], terms[name]) for name in terms}
            self.first_bad = torch.where(good, self.first_bad, float(self.step))
        self.terms = terms
        return out

    def check(self) -> None:
        """Raise on all ranks if any of them saw a loss that is not finite. Waits for the device."""
        first_bad = self.first_bad
        if self.distributed:
            first_bad = -all_reduce(-first_bad, "max")
        if torch.isfinite(first_bad):
            terms = ", ".join(f"{name} {value.item():g}" for name, value in self.bad_terms.items())
            raise NonFiniteLoss(
                f"The loss was not finite at step {first_bad.item():.0f} ({terms}). "
                f"{last_checkpoint(self.checkpoints)} Lower --lr, lengthen --warmup, or set --grad-clip-norm 1; with "
                "--precision amp try amp_bf16."
            )

    def diagnostics(self) -> dict[str, float]:
        return self.loss.read_diagnostics() if isinstance(self.loss, PCMEppLoss) else {}


def last_checkpoint(folder: Path) -> str:
    path = checkpoints.newest_good(folder)
    return f"The last good checkpoint is {path}." if path else "No checkpoint was saved before."


def progress_bar(epoch: int, total: int, initial: int, rank: int) -> Any:
    """Samples of the epoch, samples/s and time left, on rank 0 in a terminal; elsewhere there are log lines."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        unit=" samples",
        unit_scale=True,
        desc=f"epoch {epoch}",
        disable=rank != 0 or not sys.stderr.isatty(),
        leave=False,
    )
