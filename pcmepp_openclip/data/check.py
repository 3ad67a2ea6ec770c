"""Checks of the training data that take seconds, before a model is built. Each mistake is one sentence."""

import itertools
import os.path

from . import defects
from .captions import Unusable
from .count import ShardCount, count_shard
from .shards import IMAGE_SUFFIXES, ShardError, read_groups, usable_captions
from .sources import Source, kind, label, local_path, shown

FIRST_SAMPLES = 20  # so many samples are decoded per shard
FIRST_SHARDS = 3  # so many shards are tried until one can be read


def check_shards(shards: int, workers: int, ranks: int) -> None:
    """Raise ValueError if there are too few shards for an exact pass."""
    if shards < max(1, workers) * ranks:
        raise ValueError(
            f"--workers {workers} on {ranks} rank{'s' * (ranks > 1)} would need at least {max(1, workers) * ranks} "
            f"shards for an exact pass, --train-data has {shards}: use "
            + (f"--workers {shards // ranks}" if shards >= ranks else "fewer ranks")
            + ", more and smaller shards, or --dataset-resampled."
        )


def check_several_captions(sources: list[Source], captions: str, retries: int = 2) -> None:
    """Raise ValueError if no sample at the beginning of the sources has more than one caption."""
    for source in sources:
        groups = read_groups(source.shards[0], lambda *_: None, retries=retries, images=False)
        try:
            for group in itertools.islice(groups, FIRST_SAMPLES):
                try:
                    if len(usable_captions(group, every=True)) > 1:
                        return
                except Unusable:
                    continue
        except ShardError:
            continue  # `check_source` has found another shard that can be read
        finally:
            groups.close()
    raise ValueError(
        f"--captions {captions}: the first samples of {label(sources[0].shards[0])} have one caption each: put a list "
        '"captions" into the .json of each sample, or drop the flag.'
    )


def check_source(source: Source, max_pixels: int, retries: int = 2) -> None:
    """Raise ValueError if no shard exists, or if the first ones hold no pairs of image and caption."""
    shards = list(source.shards)
    if all(kind(shard) == "local" for shard in shards):
        shards = [shard for shard in shards if os.path.exists(local_path(shard))]
        if not shards:
            raise ValueError(
                f"--train-data: no shard of source '{source.name}' exists, the first would be "
                f"{label(source.shards[0])}; is the path right?"
            )
    looked: list[ShardCount] = []
    for shard in shards[:FIRST_SHARDS]:
        looked.append(count_shard(shard, max_pixels, retries, limit=FIRST_SAMPLES))
        if looked[-1].usable:
            return
    raise ValueError(f"--train-data: {_problem_of(source, looked)}")


def _problem_of(source: Source, looked: list[ShardCount]) -> str:
    read = [count for count in looked if count.samples]
    if not read:
        first = looked[0]
        reason = f"{first.cause}: {first.problem}" if first.cause else f"{label(first.shard)} holds no files"
        return f"no shard of source '{source.name}' can be read ({reason}); is its pattern right?"
    first = read[0]
    cause, indices = max(first.unusable.items(), key=lambda item: len(item[1]))
    where = f"the first {first.samples} samples of {label(first.shard)}"
    if cause in (defects.NO_IMAGE, defects.NO_CAPTION):
        suffixes = ", ".join(f".{shown(suffix)}" for suffix in sorted(first.suffixes)[:20])
        return (
            f"source '{source.name}' needs .txt and one of .{', .'.join(IMAGE_SUFFIXES)}, but {where} hold {suffixes} "
            f"({cause}): write the shards again with these suffixes, or choose others."
        )
    return f"source '{source.name}' has nothing usable in {where}: {len(indices)} have '{cause}'; inspect that shard."
