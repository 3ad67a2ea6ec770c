"""Webdataset shards to batches, in the order of the way of a batch.

`sources` (what --train-data names) -> `streams` (bytes) -> `shards` (samples) -> `plan` and `feeds` (which, in which
order) -> `decode` and `batches` (in the workers) -> `loader` (in the training process). `sizes` and `count` are the
manifest, `check` is what runs before anything is built, `build` is the way in.
"""

from ..system.redact import printable
from .arguments import DataFlags, add_arguments
from .build import get_data
from .spec import DataSpec, resolve, summarize

__all__ = ["DataFlags", "DataSpec", "add_arguments", "get_data", "printable", "resolve", "summarize"]
