"""What happens between the steps of open_clip's own loop: diagnostics, checkpoints, stopping, going on exactly.

Stock `main` is left as it is; it calls the methods of `TrainingHooks` where it would call its own functions. Its saving
is switched off, since it is neither atomic nor able to resume within an epoch.
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from ..host import training
from ..host.weights import plain_names
from ..runs import checkpoints, record, rng
from ..runs.lock import FolderInUse, FolderLock
from ..system.errors import RunFailed
from ..system.processes import signals_blocked
from .coordination import START_UP, RankCoordinator, Stopped
from .monitor import Monitor, last_checkpoint, progress_bar
from .push import Pusher
from .waits import StopAsked, TooLong, Waiter

VALIDATION = ("val", "imagenet-val", "imagenet-v2")  # open_clip's names of its data
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
END = object()


class Stalled(RunFailed):
    """Nothing came for too long, or a stop could not be done in good order."""


class NotSaved(RunFailed):
    """The last state of a run is not on the disk."""


class TrainingHooks:
    """One training run.

    Arguments:
        args: open_clip's arguments and ours.
        evaluate: open_clip's `evaluate` or one with its signature.
        keep_rng: whether validation leaves the random numbers of training alone. Stock's does not, and plain models
            are to train as they do there.
        sources: of the training data, for the record.
        pusher: what is told of every finished checkpoint.
    """

    def __init__(self, args: Any, evaluate: Callable, keep_rng: bool, sources: list[dict], pusher: Pusher):
        self.args, self.sources, self.pusher = args, sources, pusher
        self.monitor = Monitor(args)
        self.evaluate_fn, self.keep_rng = evaluate, keep_rng
        self.resumed: dict[str, Any] | None = None  # the `training` part of the checkpoint, until it was used
        self.about: dict[str, Any] = {}  # the checkpoint's part of that name, see `record`
        self.began = 0, 0  # the batch at which the epoch was entered, and the samples of it that were seen before
        self.resumed_from: Path | None = None
        self.outdated: list[Path] = []  # files within that epoch whose names count batches of another size
        self.epoch_rng: dict[str, Any] | None = None  # at the epoch's start: stock data are shuffled by it
        self.samples_seen = self.steps_per_epoch = 0
        self.saving = False
        self.saver = checkpoints.Saver()
        self.first_wait: float | None = None  # seconds until the first batch came
        self.unsaved = False  # steps since the last checkpoint
        self.unrecorded = ""  # why the last validation has left no trace
        self.trained = False  # whether an epoch was begun
        self.own = False  # whether it was resumed from the run's own folder
        self.revalidate = False  # whether the first epoch is one that is only to be validated
        self.lock: FolderLock | None = None
        self.waiter = Waiter(lambda: self.coordinator.stop_asked)
        self.save_epoch: Callable[[], None] = lambda: None  # the state at the end of the epoch, on all ranks

    @functools.cached_property
    def coordinator(self) -> RankCoordinator:
        return RankCoordinator(self.args)

    @property
    def stop_asked(self) -> bool:
        return "coordinator" in vars(self) and self.coordinator.first_signal is not None

    @property
    def folder(self) -> Path:
        return Path(self.args.checkpoint_path)

    # What `main` calls, in its order.

    def setup_logging(self, stock: Callable, *args: Any) -> None:
        """The first call when the run folder is known: it is this run's alone from now on."""
        stock(*args)
        if self.args.rank == 0:
            folder = Path(self.args.logs) / self.args.name
            lock = FolderLock(folder)
            lock.take()
            self.lock = lock
            for name in ("done", "stopped"):  # of an earlier start
                (folder / name).unlink(missing_ok=True)

    def get_latest_checkpoint(self, path: str, remote: bool) -> str | None:
        if remote:
            return training.stock_get_latest_checkpoint(path, remote)
        found = checkpoints.newest_good(Path(path))
        return str(found) if found else None

    def pt_load(self, path: str, map_location: Any = None) -> dict:
        """The checkpoint to resume from. Those of stock open_clip are taken as well."""
        local = Path(path).is_file()
        checkpoint = checkpoints.load(Path(path)) if local else training.stock_pt_load(path, map_location)
        if "state_dict" in checkpoint:
            checkpoint["state_dict"] = plain_names(checkpoint["state_dict"])
            self.resumed = checkpoint.get("training")
            self.resumed_from = Path(path)
            self.about = checkpoint.get("about") or {}
            record.check_fixed(vars(self.args), self.about.get("hyperparameters") or {})
            self.samples_seen = (self.resumed or {}).get("samples_seen", 0)
            self.own = Path(path).absolute().parent == self.folder.absolute()
            if any(self.coordinator.gather(self._lacks_validation(Path(path), checkpoint))):
                # For `main` the last epoch is still to do: `train_one_epoch` has nothing to train, `evaluate` follows.
                checkpoint["epoch"] -= 1
                self.revalidate = True
        return checkpoint

    def get_data(self, get: Callable, *args: Any, **kwargs: Any) -> dict:
        data = get(*args, **kwargs)
        if "train" in data and data["train"].dataloader.num_batches < self.args.accum_freq:
            raise ValueError(
                f"--accum-freq {self.args.accum_freq} is more than the {data['train'].dataloader.num_batches} batches "
                "of an epoch, which would have no step: lower it or --batch-size, or train on more samples."
            )
        return data

    def train_one_epoch(
        self,
        model: Any,
        data: dict,
        loss: Any,
        epoch: int,
        optimizer: Any,
        scaler: Any,
        *rest: Any,
        tb_writer: Any = None,
    ) -> None:
        if self.args.save_logs:
            self.saving, self.args.save_logs = True, False  # see above
            self.monitor.history = self.folder / record.HISTORY
            self.pusher.start()
        self.coordinator.expect_steps(running=False)
        train = data["train"]
        self.trained = True
        self.steps_per_epoch = train.dataloader.num_batches // self.args.accum_freq
        if self.revalidate:
            self.revalidate = False
            logging.info("Epoch %d is trained, but its validation was cut off: it is done again.", epoch)
            record.end_last_line(self.folder / record.RESULTS)
            return
        first = self._first_batch(train, epoch)
        restored, self.resumed = self.resumed, None

        def save(batches: int) -> None:
            complete = batches == train.dataloader.num_batches
            validated = complete and not set(VALIDATION).isdisjoint(data)
            dealt = train.dataloader.state(batches) if supports_position and not complete else None
            self._save(model, optimizer, scaler, *((epoch + 1, 0) if complete else (epoch, batches)), dealt, validated)

        def between_steps(batches: Any) -> Iterator[tuple[int, Any]]:
            if not supports_position:
                if first and restored and len(restored.get("epoch_rng") or ()) == self.args.world_size:
                    rng.restore(restored["epoch_rng"][self.args.rank])
                self.epoch_rng = rng.state()
            stall, since = 60 * self.args.rank_timeout_minutes, time.monotonic()
            # Buffers are filled before an epoch's first batch, which then takes about as long as the first time.
            longest = START_UP.total_seconds() if self.first_wait is None else max(stall, 10 * self.first_wait)
            iterator = self._waited(batches, f"a batch of epoch {epoch}", longest, stall)
            try:
                with signals_blocked():  # the workers are started here
                    head = list(itertools.islice(iterator, 1))
                self.first_wait = self.first_wait or time.monotonic() - since
                iterator = itertools.chain(head, iterator)
                if first and not supports_position:
                    logging.info("Passing over %d batches that were seen before the restart.", first)
                    for _ in range(first):
                        next(iterator)
                if restored and len(restored["rng"]) == self.args.world_size:
                    rng.restore(restored["rng"][self.args.rank])
                yield from self._steps(iterator, epoch, first, batches.num_batches, tb_writer, save)
            except StopAsked:
                if not self.coordinator.all_wait():
                    raise Stalled(
                        f"Asked to stop while rank {self.args.rank} waited for data that another rank had: nothing "
                        f"could be saved. {last_checkpoint(self.args)} Start again with --resume latest."
                    ) from None
                self.samples_seen -= self.accumulated * self.args.batch_size * self.args.world_size
                step = epoch * self.steps_per_epoch + self.batches // self.args.accum_freq
                self._stop(functools.partial(save, self.batches), step)

        self.batches, self.accumulated = first, 0
        self.save_epoch = functools.partial(save, train.dataloader.num_batches)
        supports_position = hasattr(train, "position")  # our loaders go on at any batch; others are wound forward
        if first and supports_position:
            train = SimpleNamespace(
                dataloader=train.dataloader, set_epoch=functools.partial(train.set_epoch, first_batch=first)
            )
        with training.steps(train.dataloader, between_steps):
            training.stock_train_one_epoch(
                model, {**data, "train": train}, loss, epoch, optimizer, scaler, *rest, tb_writer=tb_writer
            )
        self.coordinator.expect_steps(running=False)
        complete = epoch + 1
        wanted = self.args.save_frequency > 0 and complete % self.args.save_frequency == 0
        if wanted or complete == self.args.epochs or self.coordinator.wants_stop:
            self.save_epoch()

    def evaluate(self, model: Any, data: dict, epoch: int, *args: Any, **kwargs: Any) -> dict:
        before = rng.state() if self.keep_rng else None
        self.args.save_logs = self.saving or self.args.save_logs
        try:
            if "train" not in data:
                return self.evaluate_fn(model, data, epoch, *args, **kwargs)
            evaluate = functools.partial(self.evaluate_fn, model, data, epoch, *args, **kwargs)
            return self._validate(data, epoch, evaluate)
        finally:
            if "train" in data:
                self.args.save_logs = False
            self.saver.wait()  # what it hands over is what was held back for this validation
            self.pusher.release()
            if before is not None:
                rng.restore(before)

    # What `train` calls when `main` has returned or failed.

    @property
    def complete(self) -> bool:
        """Whether this process answers for a training run that `main` has brought to its end."""
        return hasattr(self.monitor, "loss") and bool(self.saving or self.args.save_logs)

    def leave(self) -> None:
        if "coordinator" in vars(self):
            self.coordinator.leave(failed=sys.exc_info()[0] not in (None, Stopped))

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def finish(self) -> None:
        """The run is done if its last state is on the disk."""
        if not self.trained and not self.own:
            raise ValueError(
                f"--resume {self.args.resume} has all of the --epochs {self.args.epochs} behind it: nothing is left to "
                "train; raise --epochs."
            )
        problem = self._last_problem() or self.unrecorded
        if problem:
            raise NotSaved(problem)
        self.coordinator.mark("done", f"{self.samples_seen} samples")

    # What these are made of.

    def _validate(self, data: dict, epoch: int, evaluate: Callable[[], dict]) -> dict:
        """A validation that ends when the run is to stop. It is done again when the run goes on."""
        metrics, stopped, self.unrecorded = {}, False, ""
        if self.saving:
            record.append_line(self.folder / record.VALIDATED, {"epoch": epoch, "complete": False})
        watch = contextlib.ExitStack()
        if "val" in data:
            limit = START_UP.total_seconds()
            batches = functools.partial(self._waited, what="a batch of the validation", first=limit, later=limit)
            steps = lambda loader: enumerate(batches(loader, patience=0.0))  # noqa: E731
            watch.enter_context(training.steps(data["val"].dataloader, steps))
        try:
            with watch, signals_blocked(), self.waiter.waiting(patience=0.0):
                metrics = evaluate()
        except StopAsked:
            stopped = True
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.unrecorded = f"The validation of epoch {epoch} could not be written down ({error}): free space and "
            self.unrecorded += "start again with --resume latest, which does it again."
            logging.error("VALIDATION NOT SAVED. %s", self.unrecorded)
        if any(self.coordinator.gather(stopped)):
            self._stop(self.save_epoch, epoch * self.steps_per_epoch)
        if self.saving and not self.unrecorded:
            record.append_line(self.folder / record.VALIDATED, {"epoch": epoch, "complete": True})
        return metrics

    def _lacks_validation(self, path: Path, checkpoint: dict) -> bool:
        """Whether a checkpoint of this run folder is of the end of an epoch whose validation was cut off."""
        args = self.args
        validates = args.val_data or args.imagenet_val or args.imagenet_v2
        trains = args.train_data or args.dataset_type == "synthetic"
        epochs = checkpoint.get("epoch", 0)
        if args.rank != 0 or not (self.own and validates and trains) or checkpoints.position(path) != (epochs, 0):
            return False
        return epochs > 0 and not any(
            line["epoch"] == epochs and line.get("complete")
            for line in record.read_lines(self.folder / record.VALIDATED, "epoch", last=epochs)
        )

    def _waited(self, batches: Any, what: str, first: float, later: float, **waiting: Any) -> Iterator[Any]:
        """Batches of a loader, with a word where they are waited for; StopAsked, or Stalled after so many seconds for
        the first batch and for later ones."""
        iterator, seconds = None, first
        while True:
            try:
                with self.waiter.waiting(what, seconds, **waiting):
                    iterator = iterator or iter(batches)
                    batch = next(iterator, END)
            except TooLong:
                raise Stalled(
                    f"Rank {self.args.rank} waited {seconds:.0f} s for {what}, and it did not come: the data or its "
                    f"workers are stuck. {last_checkpoint(self.args)} See --rank-timeout-minutes."
                ) from None
            if batch is END:
                return
            seconds = later
            yield batch

    def _stop(self, save: Callable[[], None], step: int) -> NoReturn:
        """On every rank: leave, with a checkpoint of the state of now, after so many steps."""
        self.coordinator.expect_steps(running=False)
        if self.unsaved:
            save()
        for problem in self.coordinator.gather(self._last_problem()):  # no rank leaves before the save is done
            if problem:
                raise NotSaved(problem)
        self.coordinator.mark("stopped", f"step {step}")
        self.coordinator.gather(None)
        raise Stopped(f"Stopped on request after step {step}; start again with --resume latest.")

    def _last_problem(self) -> str | None:
        """Why the last checkpoint is not on the disk, after more tries."""
        if self.saver.insist(60 * self.args.save_retry_minutes):
            return None
        return (
            f"The last state of the run could not be saved to {self.saver.failed}, see above. "
            f"{last_checkpoint(self.args)} Free space, then start again with --resume latest."
        )

    def _first_batch(self, train: Any, epoch: int) -> int:
        """The batch of the epoch to go on at, after which there is room for the samples that are left of it."""
        self.began, self.outdated = (0, 0), []
        if not self.resumed:
            return 0
        args, batches = self.args, train.dataloader.num_batches
        self._note_changes(self.resumed["step"])
        self.samples_seen = self.resumed["samples_seen"]
        seen = self.resumed["samples_in_epoch"]
        first = min(seen // (args.batch_size * args.world_size) // args.accum_freq * args.accum_freq, batches)
        if seen:
            at, how = first, "with fresh draws"
            if not args.dataset_resampled:
                at, how = self._resume_data(train, epoch, first)
            if at is None:
                twice = (train.dataloader.num_samples - seen) * seen // train.dataloader.num_samples
                logging.warning(
                    "Resuming within the epoch at batch %d of %d, but not with the samples that were left, since %s: "
                    "about %d samples of this epoch are seen twice, and as many are not seen.",
                    *(first, batches, how, max(0, twice)),
                )
            else:
                first = at
                logging.info("Resuming within the epoch at batch %d of %d, %s.", first, batches, how)
            self.outdated = self._outdated(first)
        if len(self.resumed["rng"]) != args.world_size:
            logging.info(
                "Resuming on %d ranks a run of %d: samples seen are carried over, random numbers start anew.",
                args.world_size,
                len(self.resumed["rng"]),
            )
        self.began = first, seen
        return first

    def _note_changes(self, step: int) -> None:
        """Say, and keep for the record, which hyperparameters are others than before."""
        before, now = self.about.get("hyperparameters") or {}, record.hyperparameters(vars(self.args))
        changed = record.changes(now, before)
        for verb, names in (
            ("are others than before", changed.keys() - set(record.AT_START)),
            ("have no effect, since the weights are those of the checkpoint", changed.keys() & set(record.AT_START)),
        ):
            values = ", ".join(f"{name} {changed[name][1]} (was {changed[name][0]})" for name in sorted(names))
            if values:
                logging.warning("Resuming at step %d, these %s: %s.", step, verb, values)
        kept = {name: pair for name, pair in changed.items() if name not in record.AT_START}
        if kept:
            self.about["changes"] = [*(self.about.get("changes") or []), {"step": step, **kept}]

    def _outdated(self, first: int) -> list[Path]:
        """Where batches have another size now, the new files of the epoch may come before the old by their names. The
        old must go then, or the next restart would take them for the newest."""
        assert self.resumed_from is not None
        newest = checkpoints.position(self.resumed_from)
        if newest is None or newest[1] == first or self.resumed_from.absolute().parent != self.folder.absolute():
            return []
        found = [(checkpoints.position(path) or (0, 0), path) for path in checkpoints.newest_first(self.folder)]
        return [path for where, path in found if (newest[0], 0) < where <= newest]

    def _resume_data(self, train: Any, epoch: int, first: int) -> tuple[int | None, str]:
        """The batch at which exactly the samples that are left follow, or None; and how, or why not."""
        assert self.resumed is not None
        args, state = self.args, self.resumed.get("data")
        if state is not None and hasattr(train, "position"):
            return train.dataloader.resume(epoch, state, args.accum_freq)
        # Of other data, or of an earlier version.
        before = {**(self.about.get("hyperparameters") or {}), "world_size": len(self.resumed["rng"])}
        flags = {"seed": "--seed", "batch_size": "--batch-size", "world_size": "the number of ranks"}
        changed = [flag for name, flag in flags.items() if before.get(name, getattr(args, name)) != getattr(args, name)]
        if changed:
            return None, f"{' and '.join(changed)} changed"
        return first, "with the samples that were left"

    def _steps(
        self, iterator: Iterator, epoch: int, first: int, batches: int, tb_writer: Any, save: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        args, accum = self.args, self.args.accum_freq
        per_epoch = batches // accum
        with contextlib.closing(progress_bar(args, epoch, batches, first)) as bar:
            for i, batch in enumerate(iterator, first):
                in_epoch = i // accum
                step = epoch * per_epoch + in_epoch
                logged = in_epoch % args.log_every_n_steps == 0 or in_epoch + 1 == per_epoch
                self.monitor.loss.before_step(step, logged)
                yield i, batch
                self.samples_seen += args.batch_size * args.world_size
                self.accumulated += 1
                bar.update(args.batch_size * args.world_size)
                if (i + 1) % accum:
                    continue
                self.batches, self.accumulated, self.unsaved = i + 1, 0, True
                if i + 1 == first + accum:
                    self.coordinator.expect_steps(running=True)
                if logged:
                    self.monitor.report(step, self.samples_seen, tb_writer)
                stop, wants_save = self.coordinator.after_step()
                if i + 1 < batches:  # else the epoch's own checkpoint follows at once
                    if stop:
                        self._stop(functools.partial(save, i + 1), step + 1)
                    if wants_save:
                        save(i + 1)

    def _save(
        self,
        model: Any,
        optimizer: Any,
        scaler: Any,
        epochs: int,
        batches: int,
        dealt: dict | None,
        validated: bool = False,
    ) -> None:
        """On every rank: a checkpoint of `epochs` complete epochs and `batches` of the next one, whose samples were
        `dealt` out so. `validated` if `evaluate` follows, whose metrics belong on its model card."""
        self.monitor.check()
        states, starts = zip(*self.coordinator.gather((rng.state(), self.epoch_rng if batches else None)), strict=True)
        self.coordinator.saved()
        self.unsaved = False
        if not self.saving:
            return
        if self.lock is not None and self.lock.lost:
            raise FolderInUse(f"{self.lock.folder} was taken over by another run ({self.lock.lost}): this one ends.")
        step = epochs * self.steps_per_epoch + batches // self.args.accum_freq
        first, seen = self.began if batches else (0, 0)
        checkpoint = {
            "epoch": epochs,
            "name": self.args.name,
            "state_dict": training.innermost(model).state_dict(),
            "optimizer": optimizer.state_dict(),
            "training": {
                "step": step,
                "samples_seen": self.samples_seen,
                "samples_in_epoch": seen + (batches - first) * self.args.batch_size * self.args.world_size,
                "data": dealt,
                "rng": list(states),
                "epoch_rng": None if None in starts else list(starts),
            },
            "about": record.run_metadata(self.args, training.innermost(model), self.sources, self.about),
        }
        if scaler is not None:
            checkpoint["scaler"] = scaler.state_dict()
        path = self.folder / checkpoints.file_name(epochs, batches)
        self.saver.save(checkpoint, path, functools.partial(self._saved, path, step, self.samples_seen, validated))
        self.coordinator.saved(well=self.saver.writing)

    def _saved(self, path: Path, step: int, samples_seen: int, validated: bool) -> None:
        """Behind a checkpoint that is on the disk."""
        logging.info("Saved %s, %d samples seen.", path, samples_seen)
        if self.args.keep_most_recent:
            latest = path.with_name("epoch_latest.pt")
            with contextlib.suppress(FileNotFoundError):
                latest.unlink()
            try:
                os.link(path, latest)
            except OSError:  # a file system without links
                shutil.copyfile(path, latest)
        problem = checkpoints.fault(path)
        if problem is not None:
            raise OSError(f"it was written, but cannot be read back: {problem}")
        self.pusher.offer(path, step, hold=validated)
        for outdated in self.outdated:
            if outdated != path:
                outdated.unlink(missing_ok=True)
        checkpoints.prune(self.folder, path, keep_every_epoch=not self.args.delete_previous_checkpoint)
