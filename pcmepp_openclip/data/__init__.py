"""Webdataset shards to batches, in the order of the way of a batch.

`sources` (what --train-data names) -> `streams` (bytes) -> `shards` (samples) -> `plan` and `feeds` (which, in which
order) -> `decode` and `batches` (in the workers) -> `loader` (in the training process). `sizes` and `count` are the
manifest, `check` is what runs before anything is built, `build` is the way in.
"""

from ..system.redact import printable, protect, redact
from .arguments import add_arguments
from .build import get_data
from .check import check_data
from .spec import describe_data, training_sources

__all__ = [
    "add_arguments",
    "check_data",
    "describe_data",
    "get_data",
    "printable",
    "protect",
    "redact",
    "training_sources",
]
