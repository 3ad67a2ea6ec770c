"""What happens between the steps of open_clip's own loop: diagnostics, checkpoints, stopping, going on exactly.

Stock `main` is left as it is; it calls the functions of `Loop` where it would call its own. Its saving is switched
off, since it is neither atomic nor able to go on within an epoch.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import checkpoints, record, rng
from .host import training
from .hub.pusher import Pusher
from .monitor import Monitor, progress_bar
from .stops import Agreement, Stopped, kept_from_children


class Loop:
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
        self.stock_evaluate, self.keep_rng = evaluate, keep_rng
        self.resumed: dict[str, Any] | None = None  # the `training` part of the checkpoint, until it was used
        self.about: dict[str, Any] = {}  # the checkpoint's part of that name, see `record`
        self.began = 0, 0  # the batch at which the epoch was entered, and the samples of it that were seen before
        self.resumed_from: Path | None = None
        self.outdated: list[Path] = []  # files within that epoch whose names count batches of another size
        self.epoch_rng: dict[str, Any] | None = None  # at the epoch's start: stock data are shuffled by it
        self.samples_seen = self.steps_per_epoch = 0
        self.saving = False
        self.saver = checkpoints.Saver()

    @functools.cached_property
    def agreement(self) -> Agreement:
        return Agreement(self.args)

    @property
    def stop_asked(self) -> bool:
        return "agreement" in vars(self) and self.agreement.first_signal is not None

    @property
    def folder(self) -> Path:
        return Path(self.args.checkpoint_path)

    # What `main` calls, in its order.

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
            checkpoint["state_dict"] = training.plain_names(checkpoint["state_dict"])
            self.resumed = checkpoint.get("training")
            self.resumed_from = Path(path)
            self.about = checkpoint.get("about") or {}
            record.check_fixed(vars(self.args), self.about.get("hyperparameters") or {})
        return checkpoint

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
        self.agreement.expect_steps(running=False)
        train = data["train"]
        self.steps_per_epoch = train.dataloader.num_batches // self.args.accum_freq
        first = self._first_batch(train, epoch)
        restored, self.resumed = self.resumed, None

        def save(batches: int) -> None:
            complete = batches == train.dataloader.num_batches
            validated = complete and not {"val", "imagenet-val", "imagenet-v2"}.isdisjoint(data)
            dealt = train.dataloader.state(batches) if supports_position and not complete else None
            self._save(model, optimizer, scaler, *((epoch + 1, 0) if complete else (epoch, batches)), dealt, validated)

        def between_steps(batches: Any) -> Iterator[tuple[int, Any]]:
            if not supports_position:
                if first and restored and len(restored.get("epoch_rng") or ()) == self.args.world_size:
                    rng.restore(restored["epoch_rng"][self.args.rank])
                self.epoch_rng = rng.state()
            iterator = _started(batches)
            if first and not supports_position:
                logging.info("Passing over %d batches that were seen before the restart.", first)
                for _ in range(first):
                    next(iterator)
            if restored and len(restored["rng"]) == self.args.world_size:
                rng.restore(restored["rng"][self.args.rank])
            yield from self._steps(iterator, epoch, first, batches.num_batches, tb_writer, save)

        supports_position = hasattr(train, "position")  # our loaders go on at any batch; others are wound forward
        if first and supports_position:
            train = SimpleNamespace(
                dataloader=train.dataloader, set_epoch=functools.partial(train.set_epoch, first_batch=first)
            )
        with training.steps(train.dataloader, between_steps):
            training.stock_train_one_epoch(
                model, {**data, "train": train}, loss, epoch, optimizer, scaler, *rest, tb_writer=tb_writer
            )
        self.agreement.expect_steps(running=False)
        complete = epoch + 1
        wanted = self.args.save_frequency > 0 and complete % self.args.save_frequency == 0
        if wanted or complete == self.args.epochs or self.agreement.wants_stop:
            save(train.dataloader.num_batches)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict:
        before = rng.state() if self.keep_rng else None
        self.args.save_logs = self.saving or self.args.save_logs
        try:
            return self.stock_evaluate(*args, **kwargs)
        finally:
            if "train" in args[1]:
                self.args.save_logs = False
            self.saver.wait()  # what it hands over is what was held back for this validation
            self.pusher.release()
            if before is not None:
                rng.restore(before)

    # What these are made of.

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
                bar.update(args.batch_size * args.world_size)
                if (i + 1) % accum:
                    continue
                if i + 1 == first + accum:
                    self.agreement.expect_steps(running=True)
                if logged:
                    self.monitor.report(step, self.samples_seen, tb_writer)
                stop, wants_save = self.agreement.after_step()
                if i + 1 < batches and (stop or wants_save):  # else the epoch's own checkpoint follows at once
                    save(i + 1)
                    if stop:
                        self.saver.wait()
                        self.agreement.mark("stopped", f"step {step + 1}")
                        self.agreement.gather(None)  # a rank that left before the save is done would end the others
                        raise Stopped(f"Stopped on request behind step {step + 1}; start again with --resume latest.")

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
        states, starts = zip(*self.agreement.gather((rng.state(), self.epoch_rng if batches else None)), strict=True)
        self.agreement.saved()
        if not self.saving:
            return
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
            "about": record.about(self.args, training.innermost(model), self.sources, self.about),
        }
        if scaler is not None:
            checkpoint["scaler"] = scaler.state_dict()
        path = self.folder / checkpoints.file_name(epochs, batches)
        self.saver.save(checkpoint, path, functools.partial(self._saved, path, step, self.samples_seen, validated))

    def _saved(self, path: Path, step: int, samples_seen: int, validated: bool) -> None:
        """Behind a checkpoint that is on the disk."""
        logging.info("Saved %s, %d samples seen.", path, samples_seen)
        if self.args.keep_most_recent:
            latest = path.with_name("epoch_latest.pt")
            with contextlib.suppress(FileNotFoundError):
                latest.unlink()
            os.link(path, latest)
        if checkpoints.fault(path) is None:
            self.pusher.offer(path, step, hold=validated)
            for outdated in self.outdated:
                if outdated != path:
                    outdated.unlink(missing_ok=True)
            checkpoints.prune(self.folder, path, keep_every_epoch=not self.args.delete_previous_checkpoint)


def _started(batches: Any) -> Iterator:
    """An iterator whose workers have been started, out of the way of the signals that stop a run."""
    with kept_from_children():
        iterator = iter(batches)
        head = list(itertools.islice(iterator, 1))
    return itertools.chain(head, iterator)
