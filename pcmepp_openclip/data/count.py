"""`pcmepp data count`: read shards once, in parallel, and write down what is in them."""

import concurrent.futures
import multiprocessing
import signal
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..stops import end_children
from . import causes
from .decode import BadImage, decode_image, open_image
from .shards import IMAGE_SUFFIXES, TEXT_SUFFIX, ShardError, find_fault, read_groups
from .sizes import SIZES, folder_of, merge_json, report_path, writable, write_json
from .sources import Source, label, shard_key

SMALLEST_DECODING = 1  # the codec's smallest scale: damage shows at any


@dataclass
class ShardCount:
    """What a shard holds.

    Arguments:
        unusable: indices of groups by cause.
        problem: why it could not be read to its end, if so; then all that follows is unknown.
        sides: shorter sides of the usable images. words: numbers of words of the usable captions.
        suffixes: of all members.
    """

    shard: str
    samples: int = 0
    bytes: int = 0
    unusable: dict[str, list[int]] = field(default_factory=dict)
    problem: str | None = None
    cause: str | None = None
    sides: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    suffixes: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> int:
        return self.samples - sum(map(len, self.unusable.values()))


def count_shard(shard: str, max_pixels: int, retries: int = 5, most: int | None = None) -> ShardCount:
    """Read a shard as training would, every image decoded; only its first `most` samples if given."""
    count = ShardCount(shard)
    groups = read_groups(shard, lambda *_: None, retries=retries)
    try:
        for group in groups:
            count.samples += 1
            count.bytes += sum(len(data) for data in group.members.values() if data)
            count.suffixes.update(list(group.members))
            cause = find_fault(group)
            if cause is None:
                image = next(data for suffix in IMAGE_SUFFIXES if (data := group.members.get(suffix)) is not None)
                try:
                    width, height = open_image(image, max_pixels).size
                    decode_image(image, at_least=SMALLEST_DECODING, max_pixels=max_pixels)
                    count.sides.append(min(width, height))
                    count.words.append(len((group.members[TEXT_SUFFIX] or b"").split()))
                except BadImage as error:
                    cause = error.cause
            if cause is not None:
                count.unusable.setdefault(cause, []).append(group.number)
            if count.samples == most:
                break
    except ShardError as error:
        count.cause = error.cause if count.samples or error.cause != causes.TRUNCATED_SHARD else causes.NOT_A_TAR
        count.problem = error.where
    finally:
        groups.close()
    return count


def count_source(
    source: Source, workers: int, max_pixels: int, retries: int = 5, progress: bool = True
) -> list[ShardCount]:
    """All shards of a source, in order."""
    from tqdm import tqdm

    context = multiprocessing.get_context("fork")  # spares each worker the import of open_clip
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(source.shards)), mp_context=context, initializer=_deaf_to_ctrl_c
    ) as pool:
        try:
            futures = [pool.submit(count_shard, shard, max_pixels, retries) for shard in source.shards]
            done = concurrent.futures.as_completed(futures)
            for _ in tqdm(done, total=len(futures), desc=source.name, unit="shard", disable=not progress):
                pass
            return [future.result() for future in futures]
        except KeyboardInterrupt:  # else what they read now would be waited for
            end_children()
            raise


def _deaf_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def report(counts: list[ShardCount]) -> dict[str, Any]:
    """The report of a source, or of a folder of it, as JSON."""
    lost = Counter({cause: 0 for count in counts for cause in count.unusable})
    for count in counts:
        lost.update({cause: len(indices) for cause, indices in count.unusable.items()})
    return {
        "samples": sum(count.samples for count in counts),
        "usable": sum(count.usable for count in counts),
        "unusable": dict(lost),
        "bytes": sum(count.bytes for count in counts),
        "shorter_side_pixels": _spread([side for count in counts for side in count.sides]),
        "caption_words": _spread([words for count in counts for words in count.words]),
        "unreadable_shards": {shard_key(c.shard): f"{c.cause}: {c.problem}" for c in counts if c.cause is not None},
        "shards": {
            shard_key(count.shard): {
                "samples": count.samples,
                "usable": count.usable,
                "unusable": count.unusable,
                "bytes": count.bytes,
            }
            for count in counts
        },
    }


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    values = sorted(values)
    return {
        "least": values[0],
        "5%": values[len(values) // 20],
        "median": statistics.median(values),
        "95%": values[-1 - len(values) // 20],
        "most": values[-1],
    }


def write(source: Source, counts: list[ShardCount], output: Path | None) -> list[Path]:
    """sizes.json and its report beside the shards, folder by folder; or in one file for shards without a folder."""
    if output is None and not all(writable(shard) for shard in source.shards):
        raise ValueError(
            f"There is no folder to write to beside the shards of '{source.name}': add --output "
            f"{source.name}.sizes.json, and pass that to training with --train-data-sizes."
        )
    places: dict[Path, list[ShardCount]] = {}
    for count in counts:
        places.setdefault(output or folder_of(count.shard) / SIZES, []).append(count)
    for place, found in places.items():
        keys = [shard_key(count.shard) for count in found]
        if len(set(keys)) != len(keys):
            raise ValueError(f"{place} cannot hold two shards of the same name: count their folders one by one.")
        if not place.parent.is_dir():
            raise ValueError(f"There is no folder {place.parent} to write {place.name} to.")
        new = report(found)
        path = Path(report_path(str(place)))
        old = merge_json(path, {}).get("shards") if path.exists() else None
        if isinstance(old, dict):
            new["shards"] = {**old, **new["shards"]}
        write_json(path, new)
        write_json(place, merge_json(place, {shard_key(count.shard): count.usable for count in found}))
    return list(places)


def lines(source: Source, counts: list[ShardCount]) -> list[str]:
    """The report for people."""
    found = report(counts)
    out = [f"{source.name}: {found['usable']} usable pairs of {found['samples']} samples in {len(counts)} shards"]
    out += [f"  not usable: {number} {cause}" for cause, number in found["unusable"].items()]
    for count in [count for count in counts if count.cause is not None][:10]:
        out.append(f"  {count.cause}, {count.usable} pairs before that: {count.problem or label(count.shard)}")
    out.append(f"  {found['bytes'] / 1e6:.1f} MB")
    for what, key in (("shorter side of images, pixels", "shorter_side_pixels"), ("caption, words", "caption_words")):
        if found[key]:
            out.append(f"  {what}: " + ", ".join(f"{name} {value:g}" for name, value in found[key].items()))
    if not found["usable"] and found["samples"]:
        suffixes = Counter(suffix for count in counts for suffix in count.suffixes)
        out.append(f"  found are .{', .'.join(suffixes)}; needed are .txt and one of .{', .'.join(IMAGE_SUFFIXES)}")
    return out
