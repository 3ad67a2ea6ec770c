"""`pcmepp data count`: read all shards once, in parallel, and record what they hold."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..system.files import write_whole
from ..system.processes import end_children
from . import defects
from .captions import Unusable
from .decode import BadImage, decode_image, open_image
from .shards import IMAGE_SUFFIXES, ShardError, read_groups, usable_pair
from .sizes import SIZES, OffsetRecorder, folder_of, merge_json, report_path, writable, write_json
from .sources import Source, label, shard_key, shown

if TYPE_CHECKING:
    import pandas

PROBE_BYTES = 1024  # about the most that the entries of a shard in sizes.json and the report take
SMALLEST_DECODING = 1  # asks for the codec's smallest scale, since damage shows at any scale


@dataclass
class ShardCount:
    """The content of a shard.

    Arguments:
        unusable: indices of groups by cause.
        problem, cause: why it could not be read to its end, if so. The rest of the shard is then unknown.
        sides: the shorter sides of the usable images.
        words: the number of words of each usable caption.
        suffixes: the suffixes of all members, counted.
        offsets: the offsets of groups, in a tar that can be entered there.
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
    offsets: OffsetRecorder = field(default_factory=OffsetRecorder)

    @property
    def usable(self) -> int:
        return self.samples - sum(map(len, self.unusable.values()))


def count_shard(shard: str, max_pixels: int, retries: int = 5, limit: int | None = None) -> ShardCount:
    """Read a shard as training would and decode every image, up to `limit` samples."""
    count = ShardCount(shard)
    groups = read_groups(shard, lambda *_: None, retries=retries)
    try:
        for group in groups:
            count.samples += 1
            count.bytes += sum(len(data) for data in group.members.values() if data)
            count.suffixes.update(list(group.members))
            if group.offset is not None:
                count.offsets.add(group.index, group.offset)
            try:
                image, captions = usable_pair(group)
                width, height = open_image(image, max_pixels).size
                decode_image(image, at_least=SMALLEST_DECODING, max_pixels=max_pixels)
                count.sides.append(min(width, height))
                count.words.append(len(captions[0].split()))
            except (Unusable, BadImage) as error:
                count.unusable.setdefault(error.cause, []).append(group.index)
            if count.samples == limit:
                break
    except ShardError as error:
        count.cause = error.cause if count.samples or error.cause != defects.TRUNCATED_SHARD else defects.NOT_A_TAR
        count.problem = error.where
    finally:
        groups.close()
    return count


def count_source(
    source: Source, workers: int, max_pixels: int, retries: int = 5, progress: bool = True
) -> list[ShardCount]:
    """Count all shards of a source, and return the counts in order."""
    from tqdm import tqdm

    context = multiprocessing.get_context("fork")  # spares each worker the import of open_clip
    with concurrent.futures.ProcessPoolExecutor(
        min(workers, len(source.shards)), mp_context=context, initializer=_ignore_ctrl_c
    ) as pool:
        try:
            futures = [pool.submit(count_shard, shard, max_pixels, retries) for shard in source.shards]
            done = concurrent.futures.as_completed(futures)
            for _ in tqdm(done, total=len(futures), desc=source.name, unit="shard", disable=not progress):
                pass
            return [future.result() for future in futures]
        except concurrent.futures.process.BrokenProcessPool:
            raise ValueError(
                f"A process that counted '{source.name}' was killed, perhaps for lack of memory: use fewer --workers."
            ) from None
        except KeyboardInterrupt:  # otherwise the pool would wait for the shards that are being read
            end_children()
            raise


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def report(counts: list[ShardCount]) -> dict[str, Any]:
    """Return the report of a source, or of one of its folders, for JSON."""
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
                "stride": count.offsets.stride,
                "offsets": count.offsets.offsets,
            }
            for count in counts
        },
    }


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    quantiles = np.quantile(values, [0, 0.05, 0.5, 0.95, 1]).tolist()
    return dict(zip(("min", "5%", "median", "95%", "max"), quantiles, strict=True))


def shard_table(source: Source, counts: list[ShardCount]) -> "pandas.DataFrame":
    """Return one row per shard: samples, usable ones, lost ones by cause, bytes, medians of its images and captions."""
    import pandas

    rows = [
        {
            "source": source.name,
            "shard": shard_key(count.shard),
            "samples": count.samples,
            "usable": count.usable,
            **{cause: len(indices) for cause, indices in count.unusable.items()},
            "bytes": count.bytes,
            "median_shorter_side_pixels": np.median(count.sides) if count.sides else None,
            "median_caption_words": np.median(count.words) if count.words else None,
            "problem": f"{count.cause}: {count.problem}" if count.cause else "",
        }
        for count in counts
    ]
    table = pandas.DataFrame(rows)
    causes = sorted({cause for count in counts for cause in count.unusable})
    table[causes] = table[causes].fillna(0).astype(int)
    first = ["source", "shard", "samples", "usable"]
    return table[[*first, *causes, *(name for name in table.columns if name not in (*first, *causes))]]


def write_table(tables: "list[pandas.DataFrame]", path: Path) -> None:
    """Write all tables as one file, .csv or .html by its name; ValueError if it cannot be written."""
    import pandas

    table = pandas.concat(tables, ignore_index=True)
    causes = [name for name in table.columns if not all(name in part.columns for part in tables)]
    table[causes] = table[causes].fillna(0).astype(int)
    write = {".csv": table.to_csv, ".html": table.to_html}[path.suffix]
    write_whole(path, lambda temporary: write(temporary, index=False))


def check_places(source: Source, output: Path | None) -> None:
    """Raise ValueError if the counts of a source could not be written. It is called before the work, not after it."""
    for place, shards in _places(source, output).items():
        keys = [shard_key(shard) for shard in shards]
        if len(set(keys)) != len(keys):
            raise ValueError(f"{place} cannot hold two shards with the same name: count their folders one by one.")
        if not place.parent.is_dir():
            raise ValueError(f"There is no folder {place.parent} to write {place.name} to.")
        probe = place.with_name(f"{place.name}.{os.getpid()}.probe")
        try:
            probe.write_bytes(bytes(PROBE_BYTES * len(shards)))
        except OSError as error:
            raise ValueError(
                f"{place} cannot be written ({error.strerror}): add --output {source.name}.sizes.json, and pass that "
                "to training with --train-data-sizes."
            ) from None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        for path in (place, Path(report_path(str(place)))):  # existing entries are kept, so they must be readable
            merge_json(path, {})


def _places(source: Source, output: Path | None) -> dict[Path, list[str]]:
    """Return the sizes.json files of a source, and the shards of each."""
    if output is None and not all(writable(shard) for shard in source.shards):
        raise ValueError(
            f"There is no folder to write to next to the shards of '{source.name}': add --output "
            f"{source.name}.sizes.json, and pass that to training with --train-data-sizes."
        )
    places: dict[Path, list[str]] = {}
    for shard in source.shards:
        places.setdefault(output or folder_of(shard) / SIZES, []).append(shard)
    return places


def write_counts(source: Source, counts: list[ShardCount], output: Path | None) -> list[Path]:
    """Write sizes.json and its report next to the shards of each folder, or to `output`.

    Counts that cannot be written there after all are elsewhere elsewhere; the ValueError says where.
    """
    places = _places(source, output)
    of_shard = {count.shard: count for count in counts}
    elsewhere: list[Path] = []
    problem = ""
    for place, shards in places.items():
        of_place = [of_shard[shard] for shard in shards]
        try:
            _write(place, of_place)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or getattr(error.__cause__, "strerror", None) or error
            problem = problem or f"{place} could not be written ({reason})"
            elsewhere.append(_keep(f"{source.name}{f'.{len(elsewhere)}' if elsewhere else ''}.{SIZES}", of_place))
    if elsewhere:
        raise ValueError(
            f"{problem}: the counts are kept in {', '.join(map(str, elsewhere))}; copy them, or pass them to training "
            "with --train-data-sizes."
        )
    return list(places)


def _write(place: Path, counts: list[ShardCount]) -> None:
    new = report(counts)
    path = Path(report_path(str(place)))
    old = merge_json(path, {}).get("shards") if path.exists() else None
    if isinstance(old, dict):
        new["shards"] = {**old, **new["shards"]}
    write_json(path, new)
    write_json(place, merge_json(place, {shard_key(count.shard): count.usable for count in counts}))


def _keep(name: str, counts: list[ShardCount]) -> Path:
    """Write the counts to a new folder, here or among the temporary files."""
    for where in (os.getcwd(), tempfile.gettempdir(), "/dev/shm"):
        with contextlib.suppress(OSError, ValueError):
            place = Path(tempfile.mkdtemp(prefix="pcmepp-counts-", dir=where)) / name
            _write(place, counts)
            return place
    sizes = json.dumps({shard_key(count.shard): count.usable for count in counts})
    raise ValueError(f"No disk takes the counts, so here they are, for a sizes.json: {sizes}")


def summary_lines(source: Source, counts: list[ShardCount]) -> list[str]:
    """Return the report as text."""
    summary = report(counts)
    out = [f"{source.name}: {summary['usable']} usable pairs of {summary['samples']} samples in {len(counts)} shards"]
    out += [f"  unusable: {lost} {cause}" for cause, lost in summary["unusable"].items()]
    for count in [count for count in counts if count.cause is not None][:10]:
        out.append(f"  {count.cause}, {count.usable} pairs before that: {count.problem or label(count.shard)}")
    out.append(f"  {summary['bytes'] / 1e6:.1f} MB")
    for title, key in (
        ("shorter side of the images in pixels", "shorter_side_pixels"),
        ("words per caption", "caption_words"),
    ):
        if summary[key]:
            out.append(f"  {title}: " + ", ".join(f"{name} {value:g}" for name, value in summary[key].items()))
    if not summary["usable"] and summary["samples"]:
        suffixes = sorted({shown(suffix) for count in counts for suffix in count.suffixes})[:20]
        out.append(
            f"  the suffixes are .{', .'.join(suffixes)}; required are .txt and one of .{', .'.join(IMAGE_SUFFIXES)}"
        )
    return out
