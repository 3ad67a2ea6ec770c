"""The training loop of `pcmepp train`, from the flags to the last checkpoint.

`Training.run` is the run: `_build` makes the model, the optimizer and the data, `_train_epoch` takes the steps of an
epoch, `_validate` measures the model after it. A step is `compute_gradients` and `_update`. What needs no step to be
understood has a module of its own: `waits` waits for batches, `checkpoint` saves and restores the run, `recipe` does
what the flags for fine-tuning ask for, `monitor` watches the loss, and `coordination` lets all ranks save or stop at
the same step.

With the same flags, data and seed the weights are those of `open_clip_train.main`, to the bit.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import build
from ..host import training as host
from ..host.data import image_and_text
from ..host.parallel import is_compiled
from ..models.lora import stock_state_dict
from ..runs import checkpoints, record, rng
from ..runs.lock import FolderLock, take_folder
from . import augment, validation_data
from .caching import cached_data
from .checkpoint import CheckpointWriter, EpochStart, NotSaved, ResumedRun, trained_state
from .config import RunConfig
from .coordination import RankCoordinator, Stopped
from .memory import full_length_pass, is_wanted
from .monitor import Monitor, StepLog, last_checkpoint
from .push import Pusher
from .recipe import Recipe
from .validation import Validator
from .waits import Stalled, StopAsked, Waiter

PER_STEP = ("logit_scale", "logit_bias")  # what a model returns once for all samples of a batch


class Training:
    """One training run on one rank. It locks its run folder when it is created.

    Arguments:
        config: all flags, once `host.set_up` has completed them.
        spec: the training data.
        description: what may be published about the run, saved with its weights.
        pusher: receives every finished checkpoint.
    """

    def __init__(self, config: RunConfig, spec: Any, description: record.RunDescription, pusher: Pusher):
        self.config, self.spec, self.description, self.pusher = config, spec, description, pusher
        self.computing = host.computing(config)
        self.device, self.autocast, self.dtype = self.computing.values()
        self.recipe = Recipe(config, self._weights_alone)
        self.lock: FolderLock | None = take_folder(config.folder) if config.rank == 0 else None
        ranks = config.folder, config.rank, config.world_size, config.distributed
        self.coordinator = RankCoordinator(*ranks, config.save_every_minutes, config.rank_timeout_minutes)
        self.writer = CheckpointWriter(config, pusher, self.lock)
        self.waiter = Waiter(config, self.coordinator.stop_asked)
        self.validator = Validator(config, self.waiter)
        self.saves = config.rank == 0 and config.keeps_files
        self.resumed: ResumedRun | None = None
        self.start_epoch = self.samples_seen = self.steps_per_epoch = 0
        self.trained = self.unsaved = False  # whether there was an epoch, and a step since the last checkpoint
        self.tried_full_length = False
        self.save_epoch: Callable[[], None] = lambda: None  # saves the state at the end of the last epoch

    def run(self) -> None:
        """Train all epochs, or validate once if there are no training data."""
        self._build()
        if self.optimizer is None:
            self._validate(self.start_epoch)
            return
        if self.resumed and any(self.coordinator.gather(self.resumed.is_unvalidated(self.start_epoch))):
            logging.info("Epoch %d is trained, but its validation was interrupted: repeating it.", self.start_epoch - 1)
            record.end_last_line(self.config.checkpoints / record.RESULTS)
            self.trained = True
            self._validate(self.start_epoch)
        for epoch in range(self.start_epoch, self.config.epochs):
            if self.config.rank == 0:
                logging.info("Start epoch %d", epoch)
            self._train_epoch(epoch)
            self._validate(epoch + 1)
        self._finish()

    # Before the first step.

    def _build(self) -> None:
        """Build everything that a step needs, in open_clip's order, which decides the random numbers of each part."""
        config = self.config
        config.resume = self._checkpoint_to_resume()
        model, *transforms = host.build_model(config, self.device)
        host.log_model(config, model)
        self.inner: Any = model
        self.model: Any = host.distribute(model, config, self.device)
        self.optimizer: Any = None
        self.scaler: Any = None
        if config.trains:
            self.optimizer, self.scaler = host.build_optimizer(config, self.model)
            self.recipe.set_up_optimizer(self.optimizer, model)
        if config.resume is not None:
            self.resumed = ResumedRun(config.resume, config, self.description.hyperparameters)
            self.resumed.restore(self.model, self.optimizer, self.scaler, self.recipe)
            self.samples_seen, self.start_epoch = self.resumed.training.get("samples_seen", 0), self.resumed.epoch
        tokenizer = host.build_tokenizer(config)
        self.augment = augment.batch_augmentation(config, tokenizer)
        self.data = self._read_data(transforms, tokenizer)
        self.tokenizer = tokenizer
        if self.optimizer is not None:
            self._plan_steps()
        self.tb_writer = host.open_trackers(config, self.data, self.saves)
        self.model = host.compiled(self.model, config)
        if self.optimizer is not None:
            self._watch(host.build_loss(config))

    def _checkpoint_to_resume(self) -> str | None:
        """Return the checkpoint that --resume names; of --resume latest rank 0 chooses the newest that is whole."""
        if self.config.resume != "latest":
            return self.config.resume
        path = None
        if self.config.rank == 0:
            path = checkpoints.newest_good(self.config.checkpoints)
            logging.info("The checkpoint to resume from: %s.", path or "none yet")
        path = self.coordinator.gather(path)[0]
        return None if path is None else str(path)

    def _read_data(self, transforms: list[Any], tokenizer: Any) -> dict[str, Any]:
        """Return the training and validation data by open_clip's keys."""
        config, make_train = self.config, None
        if config.cache_tokens:
            make_train = functools.partial(cached_data, self)
        val_data = self.spec.places.get("val_data")
        make_validation = validation_data.maker(config, val_data)
        makers = make_train, make_validation
        out = build.get_data(host.stock_get_data, self.spec, config, transforms, self.start_epoch, tokenizer, *makers)
        if "val" in out and make_validation is None:
            validation_data.describe(out["val"].dataloader, val_data)
        return out

    def _plan_steps(self) -> None:
        batches, accum = self.data["train"].dataloader.num_batches, self.config.accum_freq
        if batches < accum:
            raise ValueError(
                f"--accum-freq {accum} is more than the {batches} batches of an epoch, which would have no step: "
                "lower it, --global-batch-size or --batch-size, or train on more samples."
            )
        self.steps_per_epoch = batches // accum
        steps = self.steps_per_epoch * self.config.epochs
        self.schedule = self.recipe.schedule(
            host.build_schedule(self.config, self.optimizer, self.steps_per_epoch), self.optimizer, steps
        )

    def _watch(self, loss: nn.Module) -> None:
        """Train by this loss; watch it, and write down what becomes of it."""
        config = self.config
        steps = config.epochs * self.steps_per_epoch
        history = config.checkpoints / record.HISTORY if self.saves else None
        self.monitor = Monitor(loss, config, self.config.pcmepp_cfg, self.scaler, steps, history)
        self.log = StepLog(config, self.tb_writer)
        if self.saves:
            self.recipe.start(self.data["val"].dataloader if "val" in self.data else None)
            self.pusher.start()

    # The steps of an epoch.

    def _train_epoch(self, epoch: int) -> None:
        config, train, accum = self.config, self.data["train"], self.config.accum_freq
        start = self.resumed.enter_epoch(train, epoch) if self.resumed else EpochStart()
        epoch_rng = None
        if not self._starts_anywhere:  # open_clip's own loaders shuffle by these; a resumed epoch is as it was before
            if start.batch and "epoch_rng" in start.states:
                rng.restore(start.states["epoch_rng"], config.device)
            epoch_rng = rng.state(config.device)
        self.trained, self.writer.outdated = True, start.outdated
        self.coordinator.expect_steps(running=False)
        self.model.train()
        frozen = self.recipe.frozen_epoch(self.inner, epoch, self.steps_per_epoch)
        per_batch, batches = config.samples_per_batch, train.dataloader.num_batches
        done = start.batch  # batches that are part of a step
        save = functools.partial(self._save, epoch, start, epoch_rng)
        images, texts, features = [], [], []  # of the batches of a step
        try:
            with self.log.start_epoch(epoch, train.dataloader, self.steps_per_epoch, start.batch) as bar:
                for i, batch in self._batches(epoch, start):
                    step = epoch * self.steps_per_epoch + i // accum
                    logged = self.log.is_due(i // accum)
                    self.monitor.before_step(step, epoch, logged)
                    if self.augment is not None:
                        batch = self.augment(batch, epoch, i)
                    self._try_full_length(batch)
                    if not self.config.skip_scheduler:
                        self.schedule(step)
                    images.append(batch[0].to(device=self.device, dtype=self.dtype, non_blocking=True))
                    texts.append(batch[1].to(device=self.device, non_blocking=True))
                    self.log.has_data()
                    self.optimizer.zero_grad()
                    if accum > 1:
                        features.append(features_of(self.model, images[-1], texts[-1], self.autocast))
                    if len(images) == accum:
                        losses, scale = compute_gradients(
                            *(self.model, self.monitor, images, texts, features, self.autocast),
                            scaler=self.scaler,
                            factor=frozen.factor(step),
                        )
                        frozen.drop_gradients()
                        self._update()
                        self.log.step_done(step, i // accum, len(images[-1]), losses, scale, self.optimizer)
                    self.samples_seen += per_batch
                    bar.update(per_batch)
                    if len(images) < accum:
                        continue
                    images, texts, features = [], [], []
                    done, self.unsaved = i + 1, True
                    if done == start.batch + accum:
                        self.coordinator.expect_steps(running=True)
                    if logged:
                        self.monitor.report(step, self.samples_seen, self.tb_writer)
                    stop, wants_save = self.coordinator.after_step()
                    if done < batches:  # otherwise the checkpoint at the end of the epoch follows at once
                        if stop:
                            self._stop(functools.partial(save, done), step + 1)
                        if wants_save:
                            save(done)
        except StopAsked:
            if not self.coordinator.all_wait():
                raise Stalled(
                    f"Asked to stop while rank {config.rank} waited for data that another rank had: nothing could be "
                    f"saved. {last_checkpoint(config.checkpoints)} Start again with --resume latest."
                ) from None
            self.samples_seen -= len(images) * per_batch
            self._stop(functools.partial(save, done), epoch * self.steps_per_epoch + done // accum)
        self.save_epoch = functools.partial(save, batches)
        self.coordinator.expect_steps(running=False)
        self.recipe.end_epoch(self.inner, epoch)
        complete, frequency = epoch + 1, config.save_frequency
        if (frequency > 0 and complete % frequency == 0) or complete == config.epochs or self.coordinator.wants_stop:
            self.save_epoch()

    @property
    def _starts_anywhere(self) -> bool:
        """Return whether the training data can be entered at any batch; of others the batches before it are read."""
        return hasattr(self.data["train"], "position")

    def _batches(self, epoch: int, start: EpochStart) -> Iterator[tuple[int, Any]]:
        """Yield (index, batch) of an epoch from its start on, with the random numbers of the checkpoint if resumed."""
        train = self.data["train"]
        train.set_epoch(epoch, **({"first_batch": start.batch} if self._starts_anywhere else {}))
        iterator = self.waiter.epoch(train.dataloader, epoch)
        if start.batch and not self._starts_anywhere:
            logging.info("Skipping %d batches that were seen before the restart.", start.batch)
            for _ in range(start.batch):
                next(iterator)
        if "rng" in start.states:
            rng.restore(start.states["rng"], self.config.device)
        yield from enumerate(map(image_and_text, iterator), start.batch)

    def _update(self) -> None:
        """Take the step: clip the gradients, update the weights, and keep the scale of the logits below 100."""
        clip = self.config.grad_clip_norm
        if self.scaler is not None and clip is not None:
            self.scaler.unscale_(self.optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip, norm_type=2.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        host.clamp_logit_scale(self.inner)

    def _try_full_length(self, batch: Any) -> None:
        """Fail before the first step if the longest texts will not fit into the memory of the device.

        A compiled model is left out: its memory is not that of the eager one.
        """
        tried, self.tried_full_length = self.tried_full_length, True
        if not tried and not is_compiled(self.model) and is_wanted(self.inner, batch[1], self.device):
            loss, accum = self.monitor.loss, self.config.accum_freq
            full_length_pass(self.inner, loss, self.optimizer, batch, accum_freq=accum, **self.computing)

    # After the steps.

    def _validate(self, epochs: int) -> None:
        """Validate the model after so many epochs, where there are data for it; on all ranks, of which rank 0 works."""
        if not self.config.validates:
            return
        # open_clip's validation moves the random numbers on, and plain models train as they do there.
        before = rng.state(self.config.device) if self.config.pcmepp_cfg is not None else None
        validate = functools.partial(
            self.validator.validate, self.model, self.data, epochs, self.config, self.tokenizer, self.tb_writer
        )
        try:
            metrics, stopped = validate(recorded=self.saves)
            if self.optimizer is not None and not stopped and not self.validator.unrecorded:
                self.recipe.validated(self.inner, epochs, metrics)
                average = functools.partial(validate, recorded=False)
                stopped = self.recipe.validate_average(self.inner, epochs, average)
            if any(self.coordinator.gather(stopped)):
                self._stop(self.save_epoch, epochs * self.steps_per_epoch)
            if self.saves and self.optimizer is not None and not self.recipe.unsaved:
                self.validator.complete(epochs)
        finally:
            self.writer.wait()  # it hands over the checkpoint that was held back for this validation
            self.pusher.release()
            if before is not None:
                rng.restore(before, self.config.device)
        if self.config.distributed:
            dist.barrier()

    def _weights_alone(self, model: nn.Module, state_dict: dict[str, Any], epochs: int) -> dict[str, Any]:
        """Return a checkpoint of weights alone, after so many epochs, which is not to be resumed."""
        state = {"step": epochs * self.steps_per_epoch, "samples_seen": self.samples_seen}
        metadata = self.description.metadata(model, self.resumed.metadata if self.resumed else {})
        name = self.config.name
        return {"epoch": epochs, "name": name, "state_dict": state_dict, "training": state, "about": metadata}

    def _save(self, epoch: int, start: EpochStart, epoch_rng: Any, done: int) -> None:
        """Save a checkpoint after `done` batches of the epoch; called on every rank."""
        config, train = self.config, self.data["train"]
        complete = done == train.dataloader.num_batches
        epochs, batches = (epoch + 1, 0) if complete else (epoch, done)
        self.monitor.check()
        mine = rng.state(config.device), None if complete else epoch_rng
        states, starts = zip(*self.coordinator.gather(mine), strict=True)
        self.coordinator.saved()
        self.unsaved = False
        if not self.saves:
            return
        first, seen = (0, 0) if complete else (start.batch, start.samples_before)
        checkpoint = self._weights_alone(self.inner, stock_state_dict(self.inner), epochs)
        checkpoint |= trained_state(self.inner, self.optimizer, self.scaler) | self.recipe.state_dict()
        checkpoint["training"] |= {
            "step": epochs * self.steps_per_epoch + batches // config.accum_freq,
            "samples_in_epoch": seen + (batches - first) * config.samples_per_batch,
            "data": train.dataloader.state(done) if self._starts_anywhere and not complete else None,
            "rng": list(states),
            "epoch_rng": None if None in starts else list(starts),
        }
        self.coordinator.saved(well=self.writer.write(checkpoint, batches, complete and config.validates))

    def _stop(self, save: Callable[[], None], step: int) -> NoReturn:
        """Save the current state and end the run after `step` steps; called on every rank."""
        self.coordinator.expect_steps(running=False)
        if self.unsaved:
            save()
        for problem in self.coordinator.gather(self.writer.last_problem()):  # no rank leaves before the save is done
            if problem:
                raise NotSaved(problem)
        self.coordinator.mark("stopped", f"step {step}")
        self.coordinator.gather(None)
        raise Stopped(f"Stopped on request after step {step}; start again with --resume latest.")

    def _finish(self) -> None:
        """Mark the run as done, if its last state is on disk."""
        host.close_trackers(self.config)
        if not self.saves:
            return
        if not self.trained and not (self.resumed and self.resumed.own):
            raise ValueError(
                f"--resume {self.config.resume} has completed all --epochs {self.config.epochs}: nothing is "
                "left to train; raise --epochs."
            )
        if not self.trained:
            logging.info(
                "This run has completed all --epochs %d: nothing is left to train. Raise --epochs to continue it.",
                self.config.epochs,
            )
        problem = self.writer.last_problem() or self.validator.unrecorded or self.recipe.problem
        if problem:
            raise NotSaved(problem)
        self.coordinator.mark("done", f"{self.samples_seen} samples")

    def leave(self) -> None:
        """Called on the way out, however the run ends."""
        self.coordinator.leave(failed=sys.exc_info()[0] not in (None, Stopped))

    def release(self) -> None:
        """Give the run folder back."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None


@torch.no_grad()
def features_of(model: Any, images: Any, texts: Any, autocast: Callable) -> dict[str, Tensor]:
    """Return what the loss needs of a batch as negatives of the other batches of its step."""
    with autocast():
        out = model(images, texts)
    return {name: value for name, value in out.items() if name not in PER_STEP}


def compute_gradients(
    model: Any,
    loss: nn.Module,
    images: list[Any],
    texts: list[Any],
    features: list[dict[str, Tensor]],
    autocast: Callable,
    scaler: Any = None,
    factor: float = 1.0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the gradients of a step: one forward and backward pass per batch, with the others as constants.

    Arguments:
        images, texts: the batches of the step.
        features: `features_of` each of them; empty if the step has one batch.
        factor: what the loss is multiplied by before it is differentiated.

    Returns:
        The terms of the loss in the last pass with their sum, and the scale of the logits.
    """
    for j in range(len(images)):
        with autocast():
            out = model(images[j], texts[j])
            scale = out["logit_scale"]
            for name in features[j] if features else ():
                before, after = ([other[name] for other in part] for part in (features[:j], features[j + 1 :]))
                out[name] = torch.cat([*before, out[name], *after])
            losses = loss(**out, output_dict=True)
            total = sum(losses.values())
        backward(total if factor == 1 else total * factor, scaler)
    return {**losses, "loss": total}, scale


def backward(loss: Tensor, scaler: Any) -> None:
    """Compute the gradients of a loss, scaled for fp16 if there is a scaler."""
    (loss if scaler is None else scaler.scale(loss)).backward()
