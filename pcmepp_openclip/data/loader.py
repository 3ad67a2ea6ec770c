"""The loader that the training loop iterates over: workers in front, the summary of each epoch at its end."""

import datetime
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .batches import Batch, Failure, Job, WorkerBatches
from .tally import Tally

ENOUGH_TO_JUDGE = 1000  # samples met before the share of bad ones may end a run
GATHER_TIMEOUT = datetime.timedelta(minutes=2)


class Loader:
    """Batches (images, texts) of an epoch. `num_batches` and `num_samples` are what open_clip's loop asks for.

    Each worker is a loader of its own, asked in the order of the lanes: torch's turn-taking among workers would make
    the order of the batches depend on their number.

    `last` is the summary of the last complete epoch, over all ranks on each of them.
    """

    def __init__(
        self, job: Job, workers: int, position: Callable[[], tuple[int, int]], *, max_bad: float, gather: "Gather"
    ):
        self.num_batches, self.num_samples = job.batches, job.batches * job.batch_size * job.world_size
        self.last: Tally | None = None
        self._job, self._position, self._max_bad, self._gather = job, position, max_bad, gather
        self._told: set[tuple[int, str]] = set()
        count = min(workers, job.lanes)
        busy = -(-job.lanes // -(-job.lanes // count)) if count else 0  # so many would be as fast
        if busy < workers and job.rank == 0:
            logging.info(
                "Data: %d workers share an epoch of %d batches in %d lanes no faster than %d would",
                *(workers, job.batches, job.lanes, busy),
            )
        self._workers = [
            DataLoader(
                WorkerBatches(job, worker, max(1, count), position),
                batch_size=None,
                num_workers=min(1, count),
                persistent_workers=count > 0,
                generator=torch.Generator(),  # leave the training process's random numbers alone
            )
            for worker in range(max(1, count))
        ]

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, first_batch = self._position()
        tally = Tally()
        workers = [iter(worker) for worker in self._workers]
        for number in range(first_batch, self.num_batches):
            item: Batch | Failure = next(workers[number % self._job.lanes % len(workers)])
            if isinstance(item, Failure):
                raise ValueError(item.message)
            tally.add(item.tally)
            self._tell(item.tally)
            self._judge(tally, ENOUGH_TO_JUDGE)
            yield item.images, item.texts
        self._summarise(epoch, tally)
        assert self.last is not None
        self._judge(self.last, 1)

    def _tell(self, tally: Tally) -> None:
        """Each cause once; how often it came is said at the end of the epoch."""
        for (source, cause), where in tally.first.items():
            if (source, cause) not in self._told:
                self._told.add((source, cause))
                if self._job.rank == 0:
                    logging.warning("Data: %s: %s: %s (more are only counted)", self._job.names[source], cause, where)

    def _judge(self, tally: Tally, enough: int) -> None:
        if tally.bad_share > self._max_bad and tally.met >= enough:
            raise ValueError(
                f"--train-data: {100 * tally.bad_share:.1f} % of the samples are not usable, more than "
                f"--train-data-max-bad {self._max_bad:g} allows: {'; '.join(tally.lines(list(self._job.names))[1:])}."
            )

    def _summarise(self, epoch: int, tally: Tally) -> None:
        self.last, ranks = self._gather(tally)
        if self._job.rank == 0:
            names, shares = list(self._job.names), self._job.shares
            wanted = None if shares is None else dict(zip(names, shares, strict=True))
            whose = "" if ranks == self._job.world_size else f" (of {ranks} of {self._job.world_size} ranks)"
            for line in self.last.lines(names, wanted):
                logging.info("Data of epoch %d%s: %s", epoch, whose, line)


class Gather:
    """Adds up tallies over the ranks. A rank that does not come is not waited for for ever.

    Must be made on all ranks. It has a group of its own, on the CPU: nothing of it can come between the training's
    collectives, and its time-out is short.
    """

    def __init__(self) -> None:
        dist = torch.distributed
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=GATHER_TIMEOUT)

    def __call__(self, tally: Tally) -> tuple[Tally, int]:
        """The sum, and how many ranks are in it."""
        if self._group is None:
            return tally, 1
        tallies: list[Any] = [None] * torch.distributed.get_world_size()
        try:
            torch.distributed.all_gather_object(tallies, tally, group=self._group)
        except RuntimeError as error:
            logging.warning("Data: the ranks' summaries did not come together (%s)", type(error).__name__)
            self._group = None
            return tally, 1
        total = Tally()
        for other in tallies:
            total.add(other)
        return total, len(tallies)
