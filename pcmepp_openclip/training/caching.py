"""The training data of a run from a cache of its frozen towers' output, which is filled before the first epoch."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import data
from ..encode import token_pass, tokens
from .coordination import START_UP_TIMEOUT, Stopped
from .waits import StopAsked


class RunningRanks(token_pass.Ranks):
    """The ranks of a run as the first pass over the data sees them: they agree by the run's own coordinator."""

    def __init__(self, run: Any):
        self.rank, self.world_size = run.settings.rank, run.settings.world_size
        self._coordinator, self._batches = run.coordinator, run.batches

    def gather(self, item: Any) -> list[Any]:
        return self._coordinator.gather(item)

    def stop_asked(self) -> bool:
        return self._coordinator.stop_asked

    def pass_on_stop(self) -> None:
        self._coordinator.ask_stop()

    def wait_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        limit = START_UP_TIMEOUT.total_seconds()
        try:
            yield from self._batches.of(batches, "a batch of samples to cache", first=limit, later=limit, patience=0.0)
        except StopAsked:
            return


def cached_data(
    run: Any,
    folder: Path,
    spec: data.DataSpec,
    towers: tokens.Towers,
    preprocess_fns: Any,
    epoch: int,
    tokenizer: Any,
) -> Any:
    """Return what `tokens.train_data` returns. A request to stop during the first pass ends the run with exit code 75.

    Arguments:
        preprocess_fns: the image transforms of training and of validation.
    """
    ranks = RunningRanks(run)
    try:
        return tokens.train_data(folder, spec, towers, preprocess_fns[1], epoch, tokenizer, ranks)
    except token_pass.Interrupted:
        logging.info("Cache: stopped before all tokens were computed; what is complete is kept.")
        run.coordinator.mark("stopped", "while tokens were cached")
        run.coordinator.gather(None)
        raise Stopped(
            "Stopped on request while tokens were cached; start again with --resume latest to continue."
        ) from None
