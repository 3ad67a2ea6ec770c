"""The tallies of all ranks, added up at the end of an epoch."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ..system import network
from .tally import Tally

TIMEOUT_S = 120.0  # the time after which a rank that does not answer is left out


class TallyReducer:
    """Adds up tallies over the ranks, without those that do not answer in time.

    They travel through the store of the process group, by way of rank 0. No collective is involved, so that a rank that
    is late or gone cannot break those of the training.
    """

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._store: Any = network.run_store() if several else None
        self._calls = 0

    def __call__(self, tally: Tally) -> tuple[Tally, int]:
        """Return the sum, and the number of ranks in it. Must be called on all ranks."""
        if self._store is None:
            return tally, 1
        self._calls += 1
        prefix = f"pcmepp/tally/{self._calls}"
        try:
            return self._add_up(prefix, tally) if dist.get_rank() == 0 else self._ask(prefix, tally)
        except RuntimeError as error:
            return _only_own(tally, type(error).__name__)

    def _add_up(self, prefix: str, tally: Tally) -> tuple[Tally, int]:
        keys = [f"{prefix}/{rank}" for rank in range(1, dist.get_world_size())]
        if not network.wait_for_keys(self._store, keys, TIMEOUT_S):
            keys = [key for key in keys if self._store.check([key])]
        total = Tally()
        for part in (tally, *self._take(keys)):
            total.add(part)
        self._store.set(prefix, json.dumps([len(keys) + 1, total.to_plain()]))
        return total, len(keys) + 1

    def _take(self, keys: list[str]) -> Iterator[Tally]:
        for key in keys:
            yield Tally.from_plain(json.loads(self._store.get(key)))
            self._store.delete_key(key)

    def _ask(self, prefix: str, tally: Tally) -> tuple[Tally, int]:
        self._store.set(f"{prefix}/{dist.get_rank()}", json.dumps(tally.to_plain()))
        if not network.wait_for_keys(self._store, [prefix], TIMEOUT_S):
            return _only_own(tally, "rank 0 did not answer")
        ranks, total = json.loads(self._store.get(prefix))
        return Tally.from_plain(total), ranks


def _only_own(tally: Tally, why: Any) -> tuple[Tally, int]:
    logging.warning("Data: the summaries of the ranks could not be gathered (%s)", why)
    return tally, 1
