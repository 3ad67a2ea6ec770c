"""Log lines, diagnostics and progress bar of a training run, and the error for a loss that is not finite."""

import logging
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PCMEppCfg
from ..losses.collectives import all_reduce
from ..losses.pcmepp import PCMEppLoss
from ..runs import checkpoints, record
from ..system.errors import RunFailed
from .config import RunConfig
from .health import HealthCheck

# The loss scale of fp16 starts at 65,536, halves with each skipped step and doubles after 2,000 good ones in a row.
# Below 1 it helps no more: gradients overflow even unscaled, or the loss itself is not finite again and again.
MIN_LOSS_SCALE = 1.0


class NonFiniteLoss(RunFailed):
    """The loss, or with fp16 its gradients, are not finite. Raised once, on all ranks, with the step and the terms."""


class Monitor(nn.Module):
    """A loss that is watched, without changing what is computed.

    It remembers, on its device, the first step at which it was not finite. One such step ends the run, unless gradients
    are scaled for fp16: a gradient that is not finite is then part of the search for the scale, and the step is
    skipped, as in stock open_clip. There the run ends when the scale has fallen below `MIN_LOSS_SCALE`.

    At the logging interval it writes PCME++'s diagnostics, averaged over ranks, to the console, TensorBoard and W&B,
    and the warnings of `HealthCheck`. Between these steps nothing waits for the device, and ranks exchange nothing for
    the log.

    Arguments:
        loss: the loss to watch.
        cfg: the model's `pcmepp_cfg`, None for a plain model.
        scaler: the scaler of the gradients, if there is one.
        steps: the steps of the whole run.
        history: the file in which the loss is recorded, if it is.
    """

    def __init__(
        self,
        loss: nn.Module,
        settings: RunConfig,
        cfg: dict | None,
        scaler: torch.amp.GradScaler | None = None,
        steps: int = 0,
        history: Path | None = None,
    ):
        super().__init__()
        self.loss, self.settings, self.scaler, self.steps, self.history = loss, settings, scaler, steps, history
        batch = settings.samples_per_step
        self.health = HealthCheck(PCMEppCfg.parse(cfg).as_json(), batch, settings.warmup) if cfg else None
        self.step = 0
        self.first_bad = torch.full((), math.inf, device=settings.device)
        self.bad_terms: dict[str, Tensor] = {}
        self.terms: dict[str, Tensor] = {}  # the terms of the last call

    def before_step(self, step: int, epoch: int, logged: bool) -> None:
        """Note which step comes next, and whether it is logged."""
        self.step = step
        if isinstance(self.loss, PCMEppLoss):
            self.loss.step, self.loss.epoch = step, epoch
            self.loss.diagnose = self.loss.global_value = logged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.loss(*args, **kwargs)
        terms = {name: value.detach() for name, value in (out if isinstance(out, dict) else {"loss": out}).items()}
        with torch.no_grad():
            total = torch.stack(list(terms.values())).sum()
            good = torch.isfinite(total) | torch.isfinite(self.first_bad)
            before = self.bad_terms or terms
            self.bad_terms = {name: torch.where(good, before[name], terms[name]) for name in terms}
            self.first_bad = torch.where(good, self.first_bad, float(self.step))
        self.terms = terms
        return out

    def check(self) -> None:
        """Raise on all ranks if one of them saw a loss that ends the run. Waits for the device."""
        skips = self.scaler is not None and self.scaler.is_enabled()
        scale = self.scaler.get_scale() if self.scaler is not None and skips else math.inf
        worst = torch.stack([-self.first_bad, torch.full_like(self.first_bad, -scale)])
        if self.settings.distributed:
            all_reduce(worst, "max")
        first_bad, scale = (-worst).tolist()
        problem = ""
        if math.isfinite(first_bad):
            problem = f"The loss was not finite at step {first_bad:.0f} ({self._non_finite_terms(first_bad)})"
        if skips and scale >= MIN_LOSS_SCALE:
            self.first_bad = torch.full_like(self.first_bad, math.inf)
            if problem and self.settings.rank == 0:
                logging.warning("%s: the step was skipped.", problem)
            return
        if skips:
            problem = (
                f"{problem or f'Gradients were not finite up to step {self.step}'}, and the loss scale of --precision "
                f"amp fell to {scale:g}, although every such step was skipped"
            )
        if problem:
            raise NonFiniteLoss(
                f"{problem}. {last_checkpoint(self.settings.checkpoints)} Lower --lr, lengthen --warmup, or set "
                "--grad-clip-norm 1; with --precision amp try amp_bf16."
            )

    def _non_finite_terms(self, step: float) -> str:
        """Return the terms that were not finite at a step, on any rank, with their values."""
        value_T = torch.stack(list(self.bad_terms.values()))
        if self.settings.distributed:
            value_T = all_reduce(torch.where(self.first_bad == step, value_T, 0), "sum")
        values = zip(self.bad_terms, value_T.tolist(), strict=True)
        return ", ".join(f"{name} {x:g}" for name, x in values if not math.isfinite(x)) or "the sum of its terms"

    def report(self, step: int, samples: int, tb_writer: Any) -> None:
        """Check and log the last step. Called on every rank, after a step at the logging interval."""
        self.check()
        seen = self.loss.read_diagnostics() if isinstance(self.loss, PCMEppLoss) else {}
        if self.history is not None:
            terms = {name: value.item() for name, value in self.terms.items()}
            record.append_line(self.history, {"step": step, "samples": samples, **terms, **seen})
        if not seen or self.settings.rank != 0:
            return
        logging.info(
            f"PCME++ step {step} " + " ".join(f"{name}: {value:#.5g}".rstrip(".") for name, value in seen.items())
        )
        track({f"train/{name}": value for name, value in seen.items()}, step, tb_writer, self.settings.wandb)
        for warning in self.health.warnings(step, self.steps, seen) if self.health is not None else ():
            logging.warning(warning)


class Average:
    """The last value of a series, and the average since it was reset."""

    def __init__(self) -> None:
        self.value = self.total = self.count = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self.value, self.total, self.count = value, self.total + value * weight, self.count + weight

    @property
    def mean(self) -> float:
        """Return the average of what was added."""
        return self.total / self.count


class StepLog:
    """Writes open_clip's line about a step to the log, TensorBoard and W&B, on rank 0 at --log-every-n-steps.

    The terms of the loss are those of rank 0 at the logged steps.
    """

    def __init__(self, settings: RunConfig, tb_writer: Any):
        self.settings, self.tb_writer = settings, tb_writer

    def start_epoch(self, epoch: int, loader: Any, steps: int, first_batch: int) -> Any:
        """Start an epoch of so many steps at a batch of the loader.

        Returns a context, the bar of its samples, samples/s and time left, which shows only on rank 0 in a terminal.
        """
        from tqdm import tqdm

        self.epoch, self.samples, self.steps = epoch, loader.num_samples, steps
        self.terms: dict[str, Average] = {}
        self.batch_time, self.data_time, self.since = Average(), Average(), time.time()
        per_batch = self.settings.samples_per_batch
        return tqdm(
            total=loader.num_batches * per_batch,
            initial=first_batch * per_batch,
            unit=" samples",
            unit_scale=True,
            desc=f"epoch {epoch}",
            disable=self.settings.rank != 0 or not sys.stderr.isatty(),
            leave=False,
        )

    def is_due(self, step: int) -> bool:
        """Return whether a step of the epoch is logged."""
        return step % self.settings.log_every_n_steps == 0 or step + 1 == self.steps

    def has_data(self) -> None:
        """Note that a batch has arrived."""
        self.data_time.add(time.time() - self.since)

    def step_done(
        self, step: int, in_epoch: int, size: int, losses: dict[str, Tensor], scale: Tensor, optimizer: Any
    ) -> None:
        """Note that a step is done, and log it if it is due. Only then the device is waited for.

        Arguments:
            step, in_epoch: its index in the run and in the epoch.
            size: number of samples in a batch of this rank.
            losses: the terms of the loss.
            scale: the scale of the logits.
        """
        settings = self.settings
        self.batch_time.add(time.time() - self.since)
        self.since = time.time()
        if settings.rank != 0 or not self.is_due(in_epoch):
            return
        for name, value in losses.items():
            self.terms.setdefault(name, Average()).add(value.item(), size)
        scale_now, lr = scale.item(), optimizer.param_groups[0]["lr"]
        done = (in_epoch + 1) * size * settings.accum_freq * settings.world_size
        per_gpu = settings.accum_freq * settings.batch_size / self.batch_time.value
        speed = per_gpu * settings.world_size
        terms = " ".join(f"{name.capitalize()}: {x.value:#.5g} ({x.mean:#.5g})" for name, x in self.terms.items())
        logging.info(
            f"Train Epoch: {self.epoch} [{done:>{len(str(self.samples))}}/{self.samples} "
            f"({100 * (in_epoch + 1) / self.steps:.0f}%)] Data (t): {self.data_time.mean:.3f} "
            f"Batch (t): {self.batch_time.mean:.3f}, {speed:#g}/s, {per_gpu:#g}/s/gpu "
            f"LR: {lr:5f} Logit Scale: {scale_now:.3f} {terms}"
        )
        values = {"data_time": self.data_time.value, "batch_time": self.batch_time.value}
        values |= {"samples_per_second": speed, "samples_per_second_per_gpu": per_gpu, "scale": scale_now, "lr": lr}
        values |= {name: x.value for name, x in self.terms.items()}
        track({f"train/{name}": value for name, value in values.items()}, step, self.tb_writer, settings.wandb)
        self.batch_time, self.data_time = Average(), Average()


def track(values: dict[str, float], step: int, tb_writer: Any, wandb: bool) -> None:
    """Send scalars to TensorBoard, if there is a writer, and to W&B, if it is used."""
    for name, value in values.items() if tb_writer is not None else ():
        tb_writer.add_scalar(name, value, step)
    if wandb:
        from wandb import log

        log({**values, "step": step}, step=step)


def last_checkpoint(folder: Path) -> str:
    path = checkpoints.newest_good(folder)
    return f"The last good checkpoint is {path}." if path else "No checkpoint was saved before."
