"""Webdataset shards to batches, in the order of a batch's way.

- `arguments`: the flags. `sources`: what --train-data names. `mixing`: the share of each source.
- `sizes`: the manifest, sizes.json and its report. `check`: mistakes that show before a model is built.
  `validation`: whether what a run is validated on is there.
- `spec`: all of these, resolved once per rank. `build`: the way in for open_clip's training loop.
- `streams`: the bytes of a shard, by `remote` (servers and object stores) or `commands` (pipes), each with `resuming`
  after lost connections and a `pace`. `tars`: bytes to members. `shards`: members to samples. `defects`: what can be
  wrong with them.
- `captions`: the captions of a sample, and which of them a batch gets. `noise`: which captions are exchanged.
  `caption_table`: all captions of the shards, read beforehand.
- `plan`: which samples an epoch reads. `feeds`: these samples in a shuffled order. `remaining`: those that are left
  when an epoch is resumed with other settings.
- `decode`, `jpeg`, `crops`, `pixels` and `batches`: samples to batches, in the workers. `tally`: what became of the
  samples, on all ranks by `gathering`.
- `to_device`: from the workers to the device that trains.
- `loader`: the batches in the training process. `mixup` and `size_augment`: what may happen to them there.
- `captioned`: images with all of their captions, where they are evaluated, validated on, or make a bank.
- `count` and `command`: `pcmepp data count` and `pcmepp data check`.
"""

from ..system.redact import printable
from .spec import DataSpec, check_counted, resolve, summarize

__all__ = [
    "DataSpec",
    "check_counted",
    "printable",
    "resolve",
    "summarize",
]
