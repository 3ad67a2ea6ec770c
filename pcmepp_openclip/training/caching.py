"""The training data of a run from a cache of its frozen towers' output, which is filled before the first epoch."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..encode import token_pass, tokens
from .coordination import Stopped
from .model_flags import tower_config
from .waits import StopAsked


def cached_data(run: Any, preprocess_fns: Any, epoch: int, tokenizer: Any) -> Any:
    """Return what `tokens.train_data` returns. A request to stop during the first pass ends the run with exit code 75.

    Arguments:
        run: the `Training`.
        preprocess_fns: the image transforms of training and of validation.
    """
    config, coordinator = run.config, run.coordinator

    def wait_for(batches: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from run.waiter.patient(batches, "a batch of samples to cache")
        except StopAsked:
            return

    ranks: Any = SimpleNamespace(
        rank=coordinator.rank,
        world_size=coordinator.world_size,
        gather=coordinator.gather,
        stop_asked=coordinator.stop_asked,
        pass_on_stop=coordinator.ask_stop,
        wait_for=wait_for,
    )
    towers = tokens.Towers(run.inner, tower_config(config), config.precision, **run.computing)
    try:
        return tokens.train_data(
            *(Path(config.cache_tokens), run.spec, towers, preprocess_fns[1], epoch, tokenizer, ranks)
        )
    except token_pass.Interrupted:
        logging.info("Cache: stopped before all tokens were computed; what is complete is kept.")
        coordinator.mark("stopped", "while tokens were cached")
        coordinator.gather(None)
        raise Stopped(
            "Stopped on request while tokens were cached; start again with --resume latest to continue."
        ) from None
