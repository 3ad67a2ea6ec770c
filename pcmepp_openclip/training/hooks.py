"""What happens around the steps of open_clip's own loop: diagnostics, checkpoints, stopping, exact resuming.

open_clip's `main` runs unmodified; in place of some of its functions it calls the methods of `TrainingHooks` (see
`host.training`). Its own saving is switched off, since it is neither atomic nor able to resume within an epoch.
"""

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ..host import training
from ..host.calls import VALIDATION, EpochCall, ValidationCall
from ..host.flags import RunSettings
from ..host.weights import plain_names
from ..runs import checkpoints, record, rng
from ..runs.lock import FolderLock, take_folder
from .augment import BatchAugmentation
from .coordination import RankCoordinator, Stopped
from .finetuning import FineTuning
from .full_length import full_length_pass, is_wanted
from .monitor import Monitor
from .push import Pusher
from .recipe import Recipe
from .resuming import ResumedRun, restore_lora
from .revalidation import Validator
from .saving import CheckpointWriter, NotSaved, checkpoint_of, weights_of
from .steps import Batches, EpochStart, EpochSteps, Progress
from .waits import Waiter


class TrainingHooks:
    """One training run. It locks its run folder when it is created.

    Arguments:
        description: what may be published about the run, saved with its weights.
        pcmepp_cfg: the `pcmepp_cfg` of the model, None for a plain model.
        evaluate: open_clip's `evaluate` or one with its signature.
        keep_rng: whether the state of the random number generators is restored after a validation. open_clip does not
            restore it, and plain models should train as they do there.
        pusher: receives every finished checkpoint.
        finetuning: the flags for fine-tuning.
    """

    def __init__(
        self,
        settings: RunSettings,
        description: record.RunDescription,
        pcmepp_cfg: dict | None,
        evaluate: Callable[..., dict],
        keep_rng: bool,
        pusher: Pusher,
        finetuning: FineTuning,
    ):
        self.settings, self.description, self.pcmepp_cfg, self.pusher = settings, description, pcmepp_cfg, pusher
        self.keep_rng = keep_rng
        self.recipe = Recipe(finetuning, settings, pcmepp_cfg, weights=self._weights)
        self.lock: FolderLock | None = take_folder(settings.folder) if settings.rank == 0 else None
        self.writer = CheckpointWriter(settings, pusher, self.lock)
        self.waiter = Waiter(lambda: self.coordinator.stop_asked)
        self.batches = Batches(settings, self.waiter)
        self.validator = Validator(settings, evaluate, self.waiter, self.batches)
        self.progress = Progress()
        self.monitor: Monitor | None = None  # set by `watch_loss`, before the first epoch
        self.saves = False  # whether this rank writes checkpoints
        self.resumed: ResumedRun | None = None
        self.revalidate = False  # whether the first epoch only needs to be validated
        self.trained = False  # whether an epoch was started
        self.tried_full_length = False
        self.steps_per_epoch = 0
        self.validation: Any = None  # the loader of --val-data, set by `check_data`
        self.augment: BatchAugmentation | None = None  # set before the first epoch
        self.save_epoch: Callable[[], None] = lambda: None  # the state at the end of the epoch, on all ranks

    @functools.cached_property
    def coordinator(self) -> RankCoordinator:
        settings = self.settings
        return RankCoordinator(
            folder=settings.folder,
            rank=settings.rank,
            world_size=settings.world_size,
            distributed=settings.distributed,
            save_every_minutes=settings.save_every_minutes,
            timeout_minutes=settings.rank_timeout_minutes,
        )

    @property
    def stop_asked(self) -> bool:
        return "coordinator" in vars(self) and self.coordinator.first_signal is not None

    # What `main` calls, in this order.

    def newest_checkpoint(self) -> Path | None:
        return checkpoints.newest_good(self.settings.checkpoints)

    def load_checkpoint(self, path: str) -> dict:
        """The checkpoint to resume from. Checkpoints of stock open_clip work as well."""
        local = Path(path).is_file()
        checkpoint = checkpoints.load(Path(path)) if local else training.stock_pt_load(path, map_location="cpu")
        hyperparameters, resumed = self.description.hyperparameters, None
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
            resumed = ResumedRun(Path(path), checkpoint, self.settings, hyperparameters)
            if "optimizer" not in checkpoint and self.settings.trains:
                raise ValueError(f"--resume {path} holds weights alone, which cannot be resumed: use --pretrained.")
            self.recipe.resume(checkpoint)
        restore_lora(path, checkpoint, expected="lora" in hyperparameters)
        if resumed is not None:
            self.resumed, self.progress.samples_seen = resumed, resumed.samples_seen
            if any(self.coordinator.gather(resumed.is_unvalidated(checkpoint.get("epoch", 0)))):
                # `main` repeats the last epoch: `train_epoch` returns at once, and `validate` follows.
                checkpoint["epoch"] -= 1
                self.revalidate = True
        return checkpoint

    def set_up_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.recipe.set_up_optimizer(optimizer, model)

    def schedule(self, stock: Callable[[int], float], optimizer: torch.optim.Optimizer, steps: int) -> Callable:
        return self.recipe.schedule(stock, optimizer, steps)

    def check_data(self, data: dict) -> None:
        self.validation = data["val"].dataloader if "val" in data else None
        batches, accum = data["train"].dataloader.num_batches if "train" in data else None, self.settings.accum_freq
        if batches is not None and batches < accum:
            raise ValueError(
                f"--accum-freq {accum} is more than the {batches} batches of an epoch, which would have no step: "
                "lower it, --global-batch-size or --batch-size, or train on more samples."
            )

    def watch_loss(self, loss: nn.Module, saves: bool) -> nn.Module:
        self.monitor = Monitor(loss, self.settings, self.pcmepp_cfg)
        self.saves = saves
        if saves:
            self.recipe.start(self.validation)
            self.monitor.history = self.settings.checkpoints / record.HISTORY
        return self.monitor.loss

    def train_epoch(self, epoch: EpochCall) -> None:
        assert self.monitor is not None
        if self.saves:
            self.pusher.start()
        self.monitor.loss.scaler = epoch.scaler
        self.coordinator.expect_steps(running=False)
        train = epoch.data["train"]
        self.trained = True
        batches = train.dataloader.num_batches
        self.steps_per_epoch = batches // self.settings.accum_freq
        self.monitor.steps = self.settings.epochs * self.steps_per_epoch
        if self.revalidate:
            self.revalidate = False
            logging.info("Epoch %d is trained, but its validation was interrupted: repeating it.", epoch.index)
            record.end_last_line(self.settings.checkpoints / record.RESULTS)
            return
        start = self.resumed.enter_epoch(train, epoch.index) if self.resumed else EpochStart()
        self.writer.outdated = start.outdated
        supports_position = hasattr(train, "position")  # our loader can start at any batch; others skip batches

        def save(done: int) -> None:
            complete = done == batches
            validated = complete and not set(VALIDATION).isdisjoint(epoch.data)
            dealt = train.dataloader.state(done) if supports_position and not complete else None
            self._save(epoch, start, done, steps.start_rng, dealt, complete, validated)

        steps = EpochSteps(
            *(epoch.index, start, self.settings, self.coordinator, self.monitor, self.progress, self.batches),
            save=save,
            stop=self._stop,
            supports_position=supports_position,
            tb_writer=epoch.tb_writer,
            augment=self.augment,
            before_first=functools.partial(self._try_full_length, epoch),
        )
        self.save_epoch = functools.partial(save, batches)
        model, watched, per_epoch = training.innermost(epoch.model), self.monitor.loss, self.steps_per_epoch
        backward = self.recipe.around_backward(model, epoch.index, per_epoch, step=lambda: watched.step)
        epoch.run(steps, first_batch=start.batch if supports_position else 0, backward=backward)
        self.coordinator.expect_steps(running=False)
        complete, frequency = epoch.index + 1, self.settings.save_frequency
        self.recipe.end_epoch(model, epoch.index)
        wanted = frequency > 0 and complete % frequency == 0
        if wanted or complete == self.settings.epochs or self.coordinator.wants_stop:
            self.save_epoch()

    def validate(self, call: ValidationCall) -> dict:
        before = rng.state(self.settings.device) if self.keep_rng else None
        try:
            if "train" not in call.data:
                return call.run(self.validator.evaluate)
            metrics, stopped = self.validator.validate(call, self.saves)
            if not stopped and not self.validator.unrecorded:
                model, average = training.innermost(call.model), call.unrecorded()
                self.recipe.validated(model, call.epoch, metrics)
                validate = functools.partial(self.validator.validate, average, saves=False)
                stopped = self.recipe.validate_average(model, call.epoch, validate)
            if any(self.coordinator.gather(stopped)):
                self._stop(self.save_epoch, call.epoch * self.steps_per_epoch)
            if self.saves and not self.recipe.unsaved:
                self.validator.complete(call)
            return metrics
        finally:
            self.writer.saver.wait()  # it hands over the checkpoint that was held back for this validation
            self.pusher.release()
            if before is not None:
                rng.restore(before, self.settings.device)

    # What `command` calls when `main` has returned or failed.

    @property
    def complete(self) -> bool:
        """Whether `main` has trained, and this rank is the one that saves."""
        return self.monitor is not None and self.saves

    def leave(self) -> None:
        if "coordinator" in vars(self):
            self.coordinator.leave(failed=sys.exc_info()[0] not in (None, Stopped))

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def finish(self) -> None:
        """Mark the run as done, if its last state is on disk."""
        if not self.trained and not (self.resumed and self.resumed.own):
            raise ValueError(
                f"--resume {self.settings.resume} has completed all --epochs {self.settings.epochs}: nothing is "
                "left to train; raise --epochs."
            )
        if not self.trained:
            logging.info(
                "This run has completed all --epochs %d: nothing is left to train. Raise --epochs to continue it.",
                self.settings.epochs,
            )
        problem = self.writer.last_problem() or self.validator.unrecorded or self.recipe.problem
        if problem:
            raise NotSaved(problem)
        self.coordinator.mark("done", f"{self.progress.samples_seen} samples")

    # Private helpers.

    def _try_full_length(self, epoch: EpochCall, batch: Any) -> None:
        """Before the first step of the process; not for a compiled model, whose memory is not that of the eager one."""
        assert self.monitor is not None
        model: Any = training.innermost(epoch.model)
        tried, self.tried_full_length = self.tried_full_length, True
        if not tried and not epoch.is_compiled and is_wanted(model, batch[1], epoch.computing["device"]):
            accum_freq, loss = self.settings.accum_freq, self.monitor.loss.loss
            full_length_pass(model, loss, epoch.optimizer, batch, accum_freq=accum_freq, **epoch.computing)

    def _weights(self, model: nn.Module, state_dict: dict[str, Any], epochs: int) -> dict[str, Any]:
        """A checkpoint of weights alone, after so many epochs."""
        state = {"step": epochs * self.steps_per_epoch, "samples_seen": self.progress.samples_seen}
        about = self.description.metadata(model, self.resumed.about if self.resumed else {})
        return weights_of(state_dict, self.settings.name, epochs, state, about)

    def _save(
        self,
        epoch: EpochCall,
        start: EpochStart,
        done: int,
        start_rng: dict | None,
        dealt: dict | None,
        complete: bool,
        validated: bool,
    ) -> None:
        """On every rank: save a checkpoint after `done` batches of the epoch. `dealt` is the state of the loader."""
        assert self.monitor is not None
        settings, (epochs, batches) = self.settings, ((epoch.index + 1, 0) if complete else (epoch.index, done))
        self.monitor.check()
        mine = rng.state(settings.device), None if complete else start_rng
        states, starts = zip(*self.coordinator.gather(mine), strict=True)
        self.coordinator.saved()
        self.progress.unsaved = False
        if not self.saves:
            return
        first, seen = (0, 0) if complete else (start.batch, start.samples_before)
        state = {
            "step": epochs * self.steps_per_epoch + batches // settings.accum_freq,
            "samples_seen": self.progress.samples_seen,
            "samples_in_epoch": seen + (batches - first) * settings.samples_per_batch,
            "data": dealt,
            "rng": list(states),
            "epoch_rng": None if None in starts else list(starts),
        }
        resumed = self.resumed.about if self.resumed else {}
        about = self.description.metadata(training.innermost(epoch.model), resumed)
        checkpoint = checkpoint_of(epoch.model, epoch.optimizer, epoch.scaler, settings.name, epochs, state, about)
        self.recipe.extend(checkpoint)
        self.coordinator.saved(well=self.writer.write(checkpoint, batches, validated))

    def _stop(self, save: Callable[[], None], step: int) -> NoReturn:
        """Called on every rank: save the current state and end the run after `step` steps."""
        self.coordinator.expect_steps(running=False)
        if self.progress.unsaved:
            save()
        for problem in self.coordinator.gather(self.writer.last_problem()):  # no rank leaves before the save is done
            if problem:
                raise NotSaved(problem)
        self.coordinator.mark("stopped", f"step {step}")
        self.coordinator.gather(None)
        raise Stopped(f"Stopped on request after step {step}; start again with --resume latest.")
