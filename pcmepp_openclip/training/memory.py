"""The error message of a run whose GPU has too little memory."""

import re
from typing import Any

from ..system.errors import RunFailed


class OutOfMemory(RunFailed):
    """A tensor did not fit into the memory of the GPU."""


def out_of_memory_message(error: BaseException, config: Any, forecast: str | None = None) -> str:
    """Return a paragraph with the size of the card, the memory that was expected, and the flags that help.

    Arguments:
        error: torch's error, whose text has the numbers.
        config: all flags of the run.
        forecast: one sentence on the memory that the run was expected to take, or None.
    """
    text = str(error)
    total, wanted = (re.search(rf"{words} ([\d.]+ \w+)", text) for words in ("total capacity of", "Tried to allocate"))
    card = f" of {total[1]}" if total else ""
    problem = f"The memory of the GPU{card} is not enough" + (f": {wanted[1]} more did not fit." if wanted else ".")
    advice = [
        f"lower --batch-size ({config.batch_size}) and raise --accum-freq ({config.accum_freq}) by the same factor"
    ]
    if not config.grad_checkpointing:
        advice.append("add --grad-checkpointing")
    if config.precision == "fp32":
        advice.append("use --precision amp_bf16")
    *most, last = advice
    remedy = f"{', '.join(most)}, or {last}" if most else last
    return " ".join(filter(None, (problem, forecast, f"{remedy[0].upper()}{remedy[1:]}.")))
