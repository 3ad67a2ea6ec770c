"""Webdataset shards to batches, in the order of the way of a batch.

`sources` (what --train-data names) -> `streams` (bytes) -> `shards` (samples) -> `plan` and `feeds` (which, in which
order) -> `decode` and `batches` (in the workers) -> `loader` (in the training process). `sizes` and `count` are the
manifest, `check` is what runs before anything is built, `training` is the way in.
"""

from .arguments import add_arguments
from .check import check
from .redact import printable, protect, redact
from .setup import describe, sources
from .training import get_data

__all__ = ["add_arguments", "check", "describe", "get_data", "printable", "protect", "redact", "sources"]
