"""What a run says when the memory of its GPU is not enough."""

import re

from ..host.flags import MemoryFlags
from ..system.errors import RunFailed


class OutOfMemory(RunFailed):
    """A tensor did not fit into the memory of the GPU."""


def out_of_memory_message(error: BaseException, flags: MemoryFlags, forecast: str | None = None) -> str:
    """One paragraph for a user: what the card has, what the run was expected to take, and the flags that help.

    Arguments:
        error: torch's, whose text has the numbers.
        flags: those of the run that decide how much memory it takes.
        forecast: one sentence on the memory that the run was expected to take, or None.
    """
    text = str(error)
    total, wanted = (re.search(rf"{words} ([\d.]+ \w+)", text) for words in ("total capacity of", "Tried to allocate"))
    card = f" of {total[1]}" if total else ""
    found = f"The memory of the GPU{card} is not enough" + (f": {wanted[1]} more did not fit." if wanted else ".")
    advice = [f"lower --batch-size ({flags.batch_size}) and raise --accum-freq ({flags.accum_freq}) by the same factor"]
    if not flags.grad_checkpointing:
        advice.append("add --grad-checkpointing")
    if flags.precision == "fp32":
        advice.append("use --precision amp_bf16")
    *most, last = advice
    what = f"{', '.join(most)}, or {last}" if most else last
    return " ".join(filter(None, (found, forecast, f"{what[0].upper()}{what[1:]}.")))
