"""Validation that may be interrupted, by a stop request or a full disk, and is then repeated by the resumed run."""

import errno
import logging
from collections.abc import Callable
from typing import Any

from ..host.calls import ValidationCall
from ..host.flags import RunSettings
from ..runs import record
from ..system.processes import signals_blocked
from .steps import Batches
from .waits import StopAsked, Waiter

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Validator:
    """Validates a run, and records which epochs are validated.

    Arguments:
        evaluate: open_clip's `evaluate` or one with its signature.
    """

    def __init__(self, settings: RunSettings, evaluate: Callable[..., dict], waiter: Waiter, batches: Batches):
        self.evaluate, self.waiter, self.batches = evaluate, waiter, batches
        self.record = settings.checkpoints / record.VALIDATED
        self.unrecorded = ""  # why the last validation could not be recorded

    def validate(self, call: ValidationCall, saves: bool) -> tuple[dict[str, Any], bool]:
        """Return the metrics, and whether the validation was interrupted by a stop request."""
        self.unrecorded = ""
        if saves:
            record.append_line(self.record, {"epoch": call.epoch, "complete": False})
        try:
            with signals_blocked(), self.waiter.waiting(patience=0.0):
                return call.run(self.evaluate, self.batches.of_validation), False
        except StopAsked:
            return {}, True
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.unrecorded = (
                f"The validation of epoch {call.epoch} could not be saved ({error}): free some space and start again "
                "with --resume latest, which repeats it."
            )
            logging.error("VALIDATION NOT SAVED. %s", self.unrecorded)
            return {}, False

    def complete(self, call: ValidationCall) -> None:
        """Record that the validation need not be repeated."""
        if not self.unrecorded:
            record.append_line(self.record, {"epoch": call.epoch, "complete": True})


def lacks_validation(settings: RunSettings, epochs: int) -> bool:
    """Return whether the validation after `epochs` epochs was interrupted."""
    lines = record.read_lines(settings.checkpoints / record.VALIDATED, "epoch", last=epochs)
    return epochs > 0 and not any(line["epoch"] == epochs and line.get("complete") for line in lines)
