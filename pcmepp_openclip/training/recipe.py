"""The flags for fine-tuning, carried out: `Training` calls these methods.

The gradients of a frozen backbone are computed and dropped before they are clipped and before the optimizer sees them.
That is exact: an optimizer leaves a parameter without a gradient as it is, weight decay and its own state included, and
the norm that gradients are clipped by is that of the others. Parameters that did not ask for gradients would save time,
but DDP decides when it is built which gradients it waits for, and would wait for these.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import PCMEppCfg
from ..models.lora import stock_state_dict
from ..runs import checkpoints
from .config import RunConfig
from .finetuning import DROP_FACTOR, frozen_epochs, has_groups
from .param_groups import backbone_parameters, check_blocks, set_groups, table
from .schedule import scheduled
from .validation_data import digest
from .weights import AVERAGE, BestCheckpoint, WeightAverage

Weights = Callable[[nn.Module, dict[str, Any], int], dict[str, Any]]


class FrozenEpoch(NamedTuple):
    """An epoch in which some parameters are not trained, or the loss is multiplied by a factor of the step."""

    frozen: list[nn.Parameter]
    factor: Callable[[int], float]

    def drop_gradients(self) -> None:
        """Drop the gradients of what is frozen, before the others are clipped."""
        for parameter in self.frozen:
            parameter.grad = None


class Recipe:
    """The fine-tuning of one run.

    Arguments:
        weights: makes the checkpoint of a model's averaged or best weights, after so many epochs.
    """

    def __init__(self, config: RunConfig, weights: Weights):
        self.config, self.weights = config, weights
        self.distance = PCMEppCfg.parse(config.pcmepp_cfg).ranks_by if config.pcmepp_cfg else "cosine"
        averages = config.swa_start_epoch is not None and config.rank == 0  # all ranks have the same weights
        self.average = WeightAverage(config.swa_start_epoch) if averages else None
        self.best: BestCheckpoint | None = None  # set by `start`
        self.unsaved: set[Path] = set()  # files whose last save has failed

    def set_up_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Give the optimizer the arguments and groups of the flags, and log the learning rate of each group."""
        config, extra = self.config, self.config.opt_kwargs or {}
        for group in (*optimizer.param_groups, optimizer.defaults):
            group.update(extra)
        if extra and config.rank == 0:
            changes = ", ".join(f"{key}: {value}" for key, value in extra.items())
            logging.info("--opt-kwargs changes %s to %s.", type(optimizer).__name__, changes)
        if not has_groups(config):
            return
        warnings = list(check_blocks(model, config))
        if config.rank == 0:
            for line in warnings:
                logging.warning(line)
            for name, lr, count in table(model, config, optimizer.defaults["lr"]):
                logging.info("Learning rate of %s: %.4g, %d parameters.", name, lr, count)
        set_groups(optimizer, model, config)

    def schedule(self, stock: Callable[[int], float], optimizer: torch.optim.Optimizer, steps: int) -> Callable:
        """Return open_clip's schedule, changed if rates drop, differ between groups or are warmed up after a freeze."""
        config, drops = self.config, self.config.lr_drop_epochs or ()
        warm_up = frozen_epochs(config) if config.warm_up_after_freeze == "lr" else None
        if not has_groups(config) and not drops and warm_up is None:
            return stock
        per_epoch = steps // config.epochs
        return scheduled(stock, optimizer, per_epoch, drops, config.lr_drop_factor or DROP_FACTOR, warm_up)

    def load_state_dict(self, saved: dict[str, Any] | None, epochs: int) -> None:
        """Continue the average of weights from the entry of a checkpoint after so many epochs, if there is one."""
        if self.config.swa_start_epoch is not None:  # every rank finds a mistake, and one keeps the average
            (self.average or WeightAverage(self.config.swa_start_epoch)).load_state_dict(saved, epochs)

    def start(self, validation: Any) -> None:
        """Look for the best checkpoint so far. Called before the first epoch, on the rank that writes.

        Arguments:
            validation: the loader of --val-data, None without one.
        """
        if self.config.save_best:
            self.best = BestCheckpoint(self.config.checkpoints, self.distance, digest(validation))

    def frozen_epoch(self, model: nn.Module, epoch: int, steps: int) -> FrozenEpoch:
        """Return what is frozen or warmed up in an epoch of so many steps, and log it.

        At step i of the epoch that warms up, i from 0, the loss is multiplied by (i + 1) / steps.
        """
        config, log = self.config, []
        frozen_until = ("image", config.freeze_image_epochs), ("text", config.freeze_text_epochs)
        towers = [tower for tower, epochs in frozen_until if epoch < (epochs or 0)]
        frozen = [parameter for tower in towers for parameter in backbone_parameters(model, tower)]
        warms_up = config.warm_up_after_freeze == "loss" and epoch == frozen_epochs(config)
        if frozen:
            log.append(f"{len(frozen)} tensors of frozen towers are not trained")
        if warms_up:
            log.append("the loss is warmed up")
        if log and config.rank == 0:
            logging.info("Epoch %d: %s.", epoch, " and ".join(log))
        return FrozenEpoch(frozen, lambda step: (step - epoch * steps + 1) / steps if warms_up else 1.0)

    def end_epoch(self, model: nn.Module, epoch: int) -> None:
        """Add the weights to the average after the last step of an epoch.

        This comes before the epoch's checkpoint: once that is on disk, no epoch is repeated.
        """
        if self.average is not None and epoch >= self.average.start:
            self.average.add(model)
            if epoch + 1 == self.config.epochs:
                self.save_average(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint that a resumed run needs."""
        return {"swa": self.average.state_dict()} if self.average is not None and self.average.snapshots else {}

    def validated(self, model: nn.Module, epochs: int, metrics: Mapping[str, float]) -> None:
        """Keep the weights that were validated if they are the best so far."""
        if self.best is not None and self.best.is_better(metrics):
            saved = self.best.save(metrics, self.weights(model, stock_state_dict(model), epochs))
            self._note(self.best.path, saved)

    def validate_average(
        self, model: nn.Module, epochs: int, validate: Callable[[], tuple[dict[str, Any], bool]]
    ) -> bool:
        """Validate the averaged weights after the last epoch, save them, and return whether a stop interrupted it.

        Arguments:
            validate: a function that returns the metrics, and whether it was interrupted.
        """
        if self.average is None or epochs != self.config.epochs:
            return False
        logging.info("Validating the average of %d snapshots, one per epoch:", self.average.snapshots)
        with self.average.loaded(model):
            metrics, stopped = validate()
        if not stopped:
            self.save_average(model, metrics)
        return stopped

    def save_average(self, model: nn.Module, metrics: Mapping[str, float] | None = None) -> None:
        assert self.average is not None
        path = self.config.checkpoints / AVERAGE
        checkpoint = self.weights(model, self.average.averaged(model), self.config.epochs)
        if metrics is not None:
            checkpoint["metrics"] = {name: float(value) for name, value in metrics.items()}
        saved = checkpoints.save(checkpoint, path)
        if saved:
            logging.info("Saved %s, the average of %d snapshots, one per epoch.", path, self.average.snapshots)
        self._note(path, saved)

    def _note(self, path: Path, saved: bool) -> None:
        (self.unsaved.discard if saved else self.unsaved.add)(path)

    @property
    def problem(self) -> str:
        """Return why the run is not complete, or ""."""
        if not self.unsaved:
            return ""
        files = " and ".join(str(path) for path in sorted(self.unsaved))
        cure = "free some space" if self.config.validates else "free some space, delete the last checkpoint"
        return f"{files} could not be saved, see above: {cure}, and start again with --resume latest."
