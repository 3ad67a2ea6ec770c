"""The loader that the training loop iterates over. It collects batches from workers, and summarizes each epoch."""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..models.batches import LabelledImages
from .batches import Batch, Failure, LoaderSpec, RemainingEpoch, WorkerBatches, lane_of
from .gathering import TallyReducer
from .plan import ExactPass
from .remaining import Assignment, content_probes, remaining_after, shards_digest
from .sources import label
from .tally import Tally
from .to_device import ToDevice

MIN_SAMPLES_TO_JUDGE = 1000  # samples met before the share of bad ones may end a run


class Loader:
    """The loader of an epoch's batches (images, texts). The training loop asks for `num_batches` and `num_samples`.

    With several captions of an image in a batch, `images` are `LabelledImages`, whose ids are equal for the same image.

    Each worker is a DataLoader of its own, and they are asked in the order of the lanes. A single DataLoader would take
    turns among its workers, so that the order of the batches would depend on their number.

    `last` is the summary of the last complete epoch, over all ranks on each of them.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        workers: int,
        position: Callable[[], tuple[int, int]],
        *,
        max_bad: float,
        gather: TallyReducer,
        to_device: ToDevice,
    ):
        self.num_batches = spec.batches
        self.num_samples = spec.batches * spec.batch_size * spec.captions.rows * spec.world_size
        self.last: Tally | None = None
        self._spec, self._position, self._max_bad, self._gather = spec, position, max_bad, gather
        self._to_device = to_device
        self._noted: set[tuple[int, str]] = set()
        self._remaining: RemainingEpoch | None = None
        self._past: list[Assignment] = []  # the assignments of samples in the epoch of `_remaining` so far
        count = self._count = min(workers, spec.lanes)
        busy = -(-spec.lanes // -(-spec.lanes // count)) if count else 0  # this many workers would be as fast
        if busy < workers and spec.rank == 0:
            logging.info(
                "Data: an epoch of %d batches in %d lanes is no faster with %d workers than with %d",
                *(spec.batches, spec.lanes, workers, busy),
            )
        self._workers = self._make_workers()

    def _make_workers(self) -> list[DataLoader]:
        count = self._count
        return [
            DataLoader(
                WorkerBatches(self._spec, worker, max(1, count), self._position, self._remaining),
                batch_size=None,
                num_workers=min(1, count),
                persistent_workers=count > 0,
                pin_memory=self._to_device.copies,
                generator=torch.Generator(),  # leave the training process's random numbers alone
            )
            for worker in range(max(1, count))
        ]

    def __len__(self) -> int:
        return self.num_batches

    def state(self, batches: int) -> dict[str, Any]:
        """Return the state that `resume` needs to continue after `batches` batches, in plain types for a checkpoint."""
        remaining = self._remaining_of(self._position()[0])
        first = remaining.first if remaining else 0
        assignments = [*(self._past if remaining else ()), self._assignment(first, batches - first)]
        return {
            "kind": self._spec.kind,
            "shards": shards_digest(self._spec.shards),
            "probes": {} if self._spec.kind == "draws" else self._probes,
            "deals": [assignment._asdict() for assignment in assignments],
        }

    def resume(self, epoch: int, state: dict[str, Any] | None, multiple_of: int = 1) -> tuple[int | None, str]:
        """Continue an epoch where a loader with that state left off.

        With the same seed, batch size and number of ranks the batches are those that would have followed. With other
        settings the remaining samples are distributed again, from a batch on that leaves enough room for them.

        Arguments:
            multiple_of: the index of the first batch is a multiple of it.

        Returns:
            The index of the batch to continue at, and how the epoch continues; None and the reason if it is not known
            which samples remain.
        """
        spec = self._spec
        if state is None or state["kind"] != spec.kind:
            return None, "its checkpoint does not say which samples were seen"
        if state["shards"] != shards_digest(spec.shards):
            return None, "the shards or their counts are not the same"
        self._compare(state["probes"])
        assignments = [Assignment(**assignment) for assignment in state["deals"]]
        last = assignments[-1]
        now = self._assignment(last.first, last.taken)
        same = last == now and (last.first + last.taken) % multiple_of == 0
        changes = _changes(last, now, spec.captions.rows)
        if spec.kind != "pass":
            return (last.taken, "with the samples that were left") if same else (None, changes)
        base = ExactPass(spec.shards, assignments[0].seed, epoch)
        past = assignments[:-1] if same else assignments
        line = remaining_after(base, past, epoch)
        if same:
            first, begins, how = last.first, last.first + last.taken, "with the samples that were left"
        else:
            seen = sum(assignment.samples for assignment in assignments)
            wanted = max(spec.samples - seen, len(line) if spec.samples >= len(base) else 0)
            per_batch = spec.batch_size * spec.world_size
            first = begins = max(0, spec.batches - -(-wanted // per_batch)) // multiple_of * multiple_of
            again = max(0, (spec.batches - first) * per_batch - len(line))
            how = f"with the {len(line)} samples that were left, dealt out anew ({changes}); {again} are seen again"
        if past:
            self._remaining, self._past = RemainingEpoch(epoch, first, line, assignments[0].seed), past
            self._workers = self._make_workers()
        return begins, how

    def _remaining_of(self, epoch: int) -> RemainingEpoch | None:
        return self._remaining if self._remaining and self._remaining.epoch == epoch else None

    def _assignment(self, first: int, taken: int) -> Assignment:
        spec = self._spec
        return Assignment(
            spec.seed, spec.world_size, spec.batch_size, spec.lanes, spec.shuffle, spec.batches, first, taken
        )

    @functools.cached_property
    def _probes(self) -> dict[int, int]:
        return content_probes(self._spec.shards)

    def _compare(self, before: dict[int, int]) -> None:
        """Warn about shards whose content changed since the epoch began."""
        if self._spec.rank == 0:
            replaced = [index for index, probe in self._probes.items() if before.get(index, probe) != probe]
            if replaced:
                logging.warning(
                    "Data: %d of %d shards that were looked at do not hold what they held when the run was stopped, "
                    "for example %s: the epoch continues at the same positions, with their new samples.",
                    *(len(replaced), len(self._probes), label(self._spec.shards[replaced[0]].place)),
                )

    def __iter__(self) -> Iterator[tuple[Tensor | LabelledImages, Tensor]]:
        epoch, first_batch = self._position()
        tally = Tally()
        for batch in self._to_device(self._arriving(epoch, first_batch, tally)):
            yield _labelled(batch), batch.texts
        self._summarise(epoch, tally)
        assert self.last is not None
        self._judge(self.last, 1)

    def _arriving(self, epoch: int, first_batch: int, tally: Tally) -> Iterator[Batch]:
        """Yield the batches as the workers deliver them, and add their counts to `tally`."""
        remaining = self._remaining_of(epoch)
        workers = [iter(worker) for worker in self._workers]
        for index in range(first_batch, self.num_batches):
            item: Batch | Failure = next(workers[lane_of(index, self._spec, remaining) % len(workers)])
            if isinstance(item, Failure):
                raise ValueError(item.message)
            tally.add(item.tally)
            self._warn_once(item.tally)
            self._judge(tally, MIN_SAMPLES_TO_JUDGE)
            yield item

    def _warn_once(self, tally: Tally) -> None:
        """Warn about each cause once. The summary of the epoch has the counts."""
        for (source, cause), where in tally.first.items():
            if (source, cause) not in self._noted:
                self._noted.add((source, cause))
                if self._spec.rank == 0:
                    logging.warning(
                        "Data: %s: %s: %s (further ones are only counted)", self._spec.names[source], cause, where
                    )

    def _judge(self, tally: Tally, enough: int) -> None:
        tally.judge(list(self._spec.names), self._max_bad, enough)

    def _summarise(self, epoch: int, tally: Tally) -> None:
        self.last, ranks = self._gather(tally)
        if self._spec.rank == 0:
            names, shares = list(self._spec.names), self._spec.shares
            wanted = None if shares is None else dict(zip(names, shares, strict=True))
            whose = "" if ranks == self._spec.world_size else f" (of {ranks} of {self._spec.world_size} ranks)"
            for line in self.last.lines(names, wanted):
                logging.info("Data of epoch %d%s: %s", epoch, whose, line)


def _labelled(batch: Batch) -> Tensor | LabelledImages:
    if batch.sample_id is None:
        return batch.images
    return LabelledImages(batch.images, batch.sample_id, batch.sample_id, torch.ones(len(batch.images)))


def _changes(before: Assignment, now: Assignment, rows: int) -> str:
    """Return the settings that changed, as flags.

    Arguments:
        rows: the number of samples of an image in a batch.
    """
    before, now = (assignment._replace(batch_size=assignment.batch_size * rows) for assignment in (before, now))
    words = {"seed": "--seed", "batch_size": "--batch-size", "shuffle": "--train-data-shuffle-buffer"}
    changes = [f"{words[name]} {getattr(before, name)} is now {getattr(now, name)}" for name in words]
    changes = [text for text, name in zip(changes, words, strict=True) if getattr(before, name) != getattr(now, name)]
    if before.world_size != now.world_size:
        changes.append(f"{before.world_size} ranks are now {now.world_size}")
    if before == now:
        changes.append("--accum-freq changed")
    return ", ".join(changes) or "its batches are distributed differently over the workers"
