"""The loader that the training loop iterates over: workers in front, the summary of each epoch at its end."""

import datetime
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .batches import Batch, Failure, LoaderSpec, Rest, WorkerBatches, lane_of
from .left import Deal, left_of, names, probes
from .plan import ExactPass
from .sources import label
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
        self,
        job: LoaderSpec,
        workers: int,
        position: Callable[[], tuple[int, int]],
        *,
        max_bad: float,
        gather: "TallyReducer",
    ):
        self.num_batches, self.num_samples = job.batches, job.batches * job.batch_size * job.world_size
        self.last: Tally | None = None
        self._job, self._position, self._max_bad, self._gather = job, position, max_bad, gather
        self._told: set[tuple[int, str]] = set()
        self._rest: Rest | None = None
        self._past: list[Deal] = []  # how the epoch of `_rest` had been dealt out before
        count = self._count = min(workers, job.lanes)
        busy = -(-job.lanes // -(-job.lanes // count)) if count else 0  # so many would be as fast
        if busy < workers and job.rank == 0:
            logging.info(
                "Data: %d workers share an epoch of %d batches in %d lanes no faster than %d would",
                *(workers, job.batches, job.lanes, busy),
            )
        self._workers = self._make_workers()

    def _make_workers(self) -> list[DataLoader]:
        count = self._count
        return [
            DataLoader(
                WorkerBatches(self._job, worker, max(1, count), self._position, self._rest),
                batch_size=None,
                num_workers=min(1, count),
                persistent_workers=count > 0,
                generator=torch.Generator(),  # leave the training process's random numbers alone
            )
            for worker in range(max(1, count))
        ]

    def __len__(self) -> int:
        return self.num_batches

    def state(self, batches: int) -> dict[str, Any]:
        """What `resume` needs to go on behind so many batches of this epoch: plain types, for a checkpoint."""
        rest = self._rest_of(self._position()[0])
        first = rest.first if rest else 0
        deals = [*(self._past if rest else ()), self._deal(first, batches - first)]
        return {
            "kind": self._job.kind,
            "shards": names(self._job.shards),
            "probes": {} if self._job.kind == "draws" else self._probes,
            "deals": [deal._asdict() for deal in deals],
        }

    def resume(self, epoch: int, state: dict[str, Any] | None, multiple_of: int = 1) -> tuple[int | None, str]:
        """Go on in an epoch where a loader with that state left off: the batch to go on at, and how that is done.

        With the same seed, batch size and number of ranks the batches are those that would have followed. With others
        the samples that are left are dealt out anew, at a batch that is a multiple of `multiple_of`, from which on
        there is room for them. None for the batch where it cannot be told which are left, and why.
        """
        job = self._job
        if state is None or state["kind"] != job.kind:
            return None, "its checkpoint does not say which samples were seen"
        if state["shards"] != names(job.shards):
            return None, "the shards or their counts are not the same"
        self._compare(state["probes"])
        deals = [Deal(**deal) for deal in state["deals"]]
        last = deals[-1]
        now = self._deal(last.first, last.taken)
        same = last == now and (last.first + last.taken) % multiple_of == 0
        changes = _changes(last, now)
        if job.kind != "pass":
            return (last.taken, "with the samples that were left") if same else (None, changes)
        base = ExactPass(job.shards, deals[0].seed, epoch)
        past = deals[:-1] if same else deals
        line = left_of(base, past, epoch)
        if same:
            first, begins, how = last.first, last.first + last.taken, "with the samples that were left"
        else:
            seen = sum(deal.samples for deal in deals)
            wanted = max(job.samples - seen, len(line) if job.samples >= len(base) else 0)
            per_batch = job.batch_size * job.world_size
            first = begins = max(0, job.batches - -(-wanted // per_batch)) // multiple_of * multiple_of
            again = max(0, (job.batches - first) * per_batch - len(line))
            how = f"with the {len(line)} samples that were left, dealt out anew ({changes}); {again} are seen again"
        if past:
            self._rest, self._past = Rest(epoch, first, line), past
            self._workers = self._make_workers()
        return begins, how

    def _rest_of(self, epoch: int) -> Rest | None:
        return self._rest if self._rest and self._rest.epoch == epoch else None

    def _deal(self, first: int, taken: int) -> Deal:
        job = self._job
        return Deal(job.seed, job.world_size, job.batch_size, job.lanes, job.shuffle, job.batches, first, taken)

    @functools.cached_property
    def _probes(self) -> dict[int, int]:
        return probes(self._job.shards)

    def _compare(self, before: dict[int, int]) -> None:
        """Say which shards hold something else than they did when the epoch began."""
        if self._job.rank == 0:
            replaced = [number for number, probe in self._probes.items() if before.get(number, probe) != probe]
            if replaced:
                logging.warning(
                    "Data: %d of %d shards that were looked at do not hold what they held when the run was stopped, "
                    "%s for one: the epoch goes on at the same places of them, with their new samples.",
                    *(len(replaced), len(self._probes), label(self._job.shards[replaced[0]].place)),
                )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, first_batch = self._position()
        rest = self._rest_of(epoch)
        tally = Tally()
        workers = [iter(worker) for worker in self._workers]
        for number in range(first_batch, self.num_batches):
            item: Batch | Failure = next(workers[lane_of(number, self._job, rest) % len(workers)])
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
                f"--train-data-max-bad-fraction {self._max_bad:g} allows: "
                f"{'; '.join(tally.lines(list(self._job.names))[1:])}."
            )

    def _summarise(self, epoch: int, tally: Tally) -> None:
        self.last, ranks = self._gather(tally)
        if self._job.rank == 0:
            names, shares = list(self._job.names), self._job.shares
            wanted = None if shares is None else dict(zip(names, shares, strict=True))
            whose = "" if ranks == self._job.world_size else f" (of {ranks} of {self._job.world_size} ranks)"
            for line in self.last.lines(names, wanted):
                logging.info("Data of epoch %d%s: %s", epoch, whose, line)


def _changes(before: Deal, now: Deal) -> str:
    """What is not as it was, in the words of the command line."""
    words = {"seed": "--seed", "batch_size": "--batch-size", "shuffle": "--train-data-shuffle-buffer"}
    found = [f"{words[name]} {getattr(before, name)} is now {getattr(now, name)}" for name in words]
    found = [text for text, name in zip(found, words, strict=True) if getattr(before, name) != getattr(now, name)]
    if before.world_size != now.world_size:
        found.append(f"{before.world_size} ranks are now {now.world_size}")
    if before == now:
        found.append("--accum-freq changed")
    return ", ".join(found) or "its batches are shared otherwise by the workers"


class TallyReducer:
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
