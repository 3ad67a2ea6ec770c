"""The bytes of a shard from a local file, a URL, or the output of a `pipe:` command."""

import io
import os
from collections.abc import Callable
from typing import BinaryIO

from . import pace as pacing
from .commands import command_opener
from .pace import Pace
from .remote import remote_opener
from .resuming import MissingShard, ResumingReader
from .sources import kind, label, local_path

BUFFER_BYTES = 1 << 20


def open_shard(
    shard: str, retries: int = 5, on_retry: Callable[[], None] = lambda: None, position: int = 0
) -> BinaryIO:
    """Return the shard as a buffered file from a position on. Raises MissingShard or LostShard, also while it is read.

    It can seek forward if the bytes in between need not be read.
    """
    if kind(shard) == "local":
        try:
            file = open(local_path(shard), "rb", buffering=1 << 17)  # noqa: SIM115
            if position:
                file.seek(min(position, os.fstat(file.fileno()).st_size))  # file systems have a limit beyond the end
            return file
        except OSError as error:
            raise MissingShard(f"{label(shard)}: {error.strerror}") from None
    if kind(shard) == "pipe":
        pace = Pace(label(shard), pacing.COMMAND_PATIENCE_S)
        opener = command_opener(shard.removeprefix("pipe:"), pace)
    else:
        pace = Pace(label(shard), pacing.PATIENCE_S)
        opener = remote_opener(shard, pace)
    return io.BufferedReader(ResumingReader(opener, label(shard), pace, retries, on_retry, position), BUFFER_BYTES)


def read_file(place: str, limit: int = 1 << 26) -> bytes:
    """Return the content of a small file. Raises MissingShard if there is none."""
    with open_shard(place, retries=2) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{label(place)} is larger than {limit >> 20} MB: it cannot be a list of sizes.")
    return data
