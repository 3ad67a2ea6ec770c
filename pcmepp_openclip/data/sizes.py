"""The manifest of a source: the number of usable samples in each shard.

`sizes.json`, next to the shards, has open_clip's own format: {basename: samples}. `sizes.report.json`, next to it,
holds the report of `pcmepp data count`; training takes from it the groups of a shard to skip, and offsets of groups.
Both may come from elsewhere: they are parsed as JSON and checked, and only numbers are taken from them.
"""

import bisect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.files import write_whole
from ..system.redact import redact
from .resuming import LostShard, MissingShard
from .sources import Source, kind, local_path, shard_key, shown, sibling
from .streams import read_file

SIZES = "sizes.json"
NO_FILE = object()  # unlike None, which is the content of a file with "null"
MAX_SAMPLES = 10**9  # the limit for a shard, which would have terabytes
MAX_TAR_BYTES = 1 << 50
MAX_OFFSETS = 32  # a reader that starts within a shard then reads at most about 1/16 of it needlessly


@dataclass(frozen=True)
class ShardSize:
    """A manifest's entry for a shard.

    Arguments:
        samples: the number of usable samples.
        unusable: the indices of the groups that are unusable.
        offsets: the offset in bytes of every `stride`-th group in the tar, from the first one on; empty if unknown.
    """

    samples: int
    unusable: frozenset[int] = frozenset()
    stride: int = 1
    offsets: tuple[int, ...] = ()

    def entry(self, start: int) -> tuple[int, int]:
        """Return index and offset of the last group with a known offset that is not after position `start`.

        Positions do not count the groups that are unusable, see `shards`.
        """
        unusable = sorted(self.unusable)
        for i in range(len(self.offsets) - 1, 0, -1):
            index = i * self.stride
            if index - bisect.bisect_left(unusable, index) <= start:
                return index, self.offsets[i]
        return 0, 0


UNKNOWN_SIZE = ShardSize(0)  # stands for a shard that was not counted


class OffsetRecorder:
    """Offsets of every `stride`-th group of a shard, at most `MAX_OFFSETS`: the stride doubles as the shard grows."""

    def __init__(self) -> None:
        self.stride = 1
        self.offsets: list[int] = []

    def add(self, index: int, offset: int) -> None:
        if index != len(self.offsets) * self.stride:
            return
        self.offsets.append(offset)
        if len(self.offsets) > MAX_OFFSETS:
            self.stride, self.offsets = 2 * self.stride, self.offsets[::2]


def read_sizes(source: Source, sizes_file: str | None = None) -> list[ShardSize] | None:
    """Return the size of each shard of a source, in order; None if it was never counted.

    Arguments:
        sizes_file: a sizes.json of `--train-data-sizes`, instead of the one next to the shards.
    """
    folders: dict[str | None, dict[str, ShardSize] | None] = {}
    sizes = []
    for shard in source.shards:
        place = sizes_file or sibling(shard, SIZES)
        if place not in folders:
            folders[place] = _read_folder(place, required=sizes_file is not None)
        folder = folders[place]
        if folder is None:
            return None
        key = shard_key(shard)
        if key not in folder:
            raise ValueError(f"{redact(str(place))} does not list {key}: run `{count_command(source)}` again.")
        sizes.append(folder[key])
    return sizes


def count_command(source: Source) -> str:
    """Return the command that counts a source."""
    pattern = f"{source.name}={redact(source.pattern)}"
    if all(writable(shard) for shard in source.shards):
        return f"pcmepp data count '{pattern}'"
    return f"pcmepp data count '{pattern}' --output {source.name}.sizes.json"


def writable(shard: str) -> bool:
    """Return whether a file can be written next to a shard."""
    return kind(shard) == "local"


def _read_folder(place: str | None, required: bool) -> dict[str, ShardSize] | None:
    if place is None:
        return None
    sizes = _read_json(place)
    if sizes is NO_FILE:
        if required:
            raise ValueError(f"--train-data-sizes: {redact(place)} does not exist.")
        return None
    if not isinstance(sizes, dict) or not all(_is_count(count) for count in sizes.values()):
        raise ValueError(f"{redact(place)} is not a sizes.json: it must map names of shards to integers.")
    counted = {str(name): int(count) for name, count in sizes.items()}
    for name, count in counted.items():
        if count > MAX_SAMPLES:
            raise ValueError(
                f"{redact(place)} says that {shown(name)} has more than {MAX_SAMPLES:,} samples: delete it and run "
                "`pcmepp data count` again."
            )
    entries = {name: ShardSize(count) for name, count in counted.items()}
    return {**entries, **_reported(_read_json(report_path(place)), counted)}


def report_path(place: str) -> str:
    """Return the path of the report that belongs to a sizes.json."""
    path, mark, query = place.partition("?") if kind(place) == "http" else (place, "", "")
    return path.removesuffix(".json") + ".report.json" + mark + query


def _reported(report: Any, counted: dict[str, int]) -> dict[str, ShardSize]:
    """Return the entries of a report for shards whose count in it is that of the sizes.json."""
    out = {}
    shards = report.get("shards") if isinstance(report, dict) else None
    for name, entry in shards.items() if isinstance(shards, dict) else ():
        if not isinstance(entry, dict) or name not in counted or entry.get("usable") != counted[name]:
            continue
        lists = entry.get("unusable")
        if isinstance(lists, dict) and all(isinstance(indices, list) for indices in lists.values()):
            unusable = frozenset(index for indices in lists.values() for index in indices if _is_count(index))
            out[name] = ShardSize(counted[name], unusable, *_offsets(entry))
    return out


def _offsets(entry: dict) -> tuple[int, tuple[int, ...]]:
    """Return stride and offsets of a report's entry, or none if they cannot be right."""
    stride, offsets = entry.get("stride"), entry.get("offsets")
    if type(stride) is not int or not 1 <= stride <= MAX_SAMPLES or not isinstance(offsets, list):
        return 1, ()
    if not all(type(offset) is int and 0 <= offset <= MAX_TAR_BYTES for offset in offsets[:MAX_OFFSETS]):
        return 1, ()
    return stride, tuple(offsets[:MAX_OFFSETS])


def _is_count(value: Any) -> bool:
    if isinstance(value, str):  # open_clip takes "123" as well
        return value.isascii() and value.isdigit() and len(value) < 100
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_json(place: str) -> Any:
    try:
        data = read_file(place)
    except MissingShard:
        return NO_FILE
    except LostShard as error:
        raise ValueError(f"The sizes of the shards cannot be read: {error}. Is the server up?") from None
    except OSError as error:  # the place is a folder, or the disk fails
        raise ValueError(f"{redact(place)} cannot be read: {error.strerror or type(error).__name__}.") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # a number of more digits than Python takes is a ValueError, too
        raise ValueError(f"{redact(place)} is not JSON: delete it, and run `pcmepp data count` again.") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step, so that a reader sees the old file or the new one; ValueError if it cannot be written."""
    write_whole(path, lambda temporary: temporary.write_text(json.dumps(value, indent=1), encoding="utf-8"))


def merge_json(path: Path, new: dict) -> dict:
    """Return the content of a file, with the entries of `new` added or replaced."""
    old = _read_json(str(path))
    return {**old, **new} if isinstance(old, dict) else new


def folder_of(shard: str) -> Path:
    return Path(local_path(shard)).parent
