"""All captions of counted local shards, read once without the images, and the captions that noise exchanges."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .captions import Unusable, sample_id
from .noise import exchange
from .shards import IMAGE_SUFFIXES, ShardError, read_groups, usable_captions
from .sizes import ShardSize, count_command
from .sources import Source, kind, label, shard_key

MAX_SAMPLES = 1_000_000  # the headers of so many samples are read in about a minute


class CaptionedSample(NamedTuple):
    """The captions of a sample, and the place of its image.

    Arguments:
        number: its number among the counted samples of all sources, in the order of `--train-data`.
        source: the index of its source.
        image: offset and length of the image's bytes in the shard; None in a compressed shard.
    """

    number: int
    source: int
    shard: str
    key: str
    captions: tuple[str, ...]
    image: tuple[int, int] | None


def check_readable(sources: Sequence[Source], sizes: Sequence[list[ShardSize] | None], flag: str) -> int:
    """Return the number of counted samples; ValueError if their captions cannot be read beforehand, as `flag` needs.

    Arguments:
        sizes: the sizes of the shards of each source, None for a source that was not counted.
    """
    total = 0
    for source, counted in zip(sources, sizes, strict=True):
        if counted is None:
            raise ValueError(f"{flag} needs counts, which source '{source.name}' lacks: run `{count_command(source)}`.")
        check_local(source, flag)
        check_names(source, flag)
        total += sum(size.samples for size in counted)
    if total > MAX_SAMPLES:
        raise ValueError(
            f"{flag} reads all captions beforehand, of at most {MAX_SAMPLES:,} samples, and there are {total:,}: "
            "give fewer shards."
        )
    return total


def check_local(source: Source, flag: str) -> None:
    """Raise ValueError if the shards of a source are not on a local disk, as `flag` needs."""
    if not all(kind(shard) == "local" for shard in source.shards):
        raise ValueError(f"{flag} reads all captions beforehand: copy source '{source.name}' to a local disk.")


def check_names(source: Source, flag: str) -> None:
    """Raise ValueError if two shards of a source have the same name, since `flag` tells samples apart by it."""
    names = [shard_key(shard) for shard in source.shards]
    if len(set(names)) != len(names):
        raise ValueError(
            f"{flag}: source '{source.name}' has two shards of the same name in different folders: make each folder a "
            "source of its own, as in a=FOLDER/{000..099}.tar::b=..."
        )


def read_table(
    sources: Sequence[Source], sizes: Sequence[list[ShardSize] | None], every: bool, progress: bool = False
) -> Iterator[CaptionedSample]:
    """Yield all counted samples that have captions, in order; see `check_readable`.

    Arguments:
        every: read all captions of a sample, see `captions.read_captions`.
        progress: show a progress bar.
    """
    from tqdm import tqdm

    shards = [
        (source_id, shard, size)
        for source_id, (source, counted) in enumerate(zip(sources, sizes, strict=True))
        for shard, size in zip(source.shards, counted or (), strict=True)
    ]
    first = 0
    for source_id, shard, size in tqdm(shards, desc="captions", unit="shard", disable=None if progress else True):
        left = size.samples
        try:
            for group in read_groups(shard, lambda *_: None, size, images=False):
                if group.index in size.unusable:
                    continue
                if not left:
                    break
                left -= 1
                try:
                    captions = usable_captions(group, every)
                except Unusable:
                    continue  # training meets it again, and counts it
                image = next((group.places[suffix] for suffix in IMAGE_SUFFIXES if suffix in group.places), None)
                yield CaptionedSample(first + group.position, source_id, shard, group.key, captions, image)
        except ShardError as error:
            if left:  # otherwise the shard was broken already when it was counted
                raise ValueError(f"The captions of {label(shard)} cannot be read ({error}).") from None
        first += size.samples


def exchanged_captions(
    sources: Sequence[Source],
    sizes: Sequence[list[ShardSize] | None],
    every: bool,
    ratio: float,
    seed: int,
    per_caption: bool = False,
    progress: bool = False,
) -> dict[int, tuple[str, ...]]:
    """Return the captions of the samples that have wrong ones, by `sample_id`.

    Arguments:
        per_caption: exchange single captions; otherwise all captions of an image move together.
    """
    samples = read_table(sources, sizes, every, progress)
    if per_caption:
        return _exchanged_singly(list(samples), ratio, seed)
    givers = exchange(sum(size.samples for counted in sizes for size in counted or ()), ratio, seed)
    chosen = {sample.number: sample for sample in samples if sample.number in givers}
    return {
        sample_id(sample.source, sample.shard, sample.key): chosen[givers[number]].captions
        for number, sample in chosen.items()
        if givers[number] in chosen
    }


def _exchanged_singly(samples: Sequence[CaptionedSample], ratio: float, seed: int) -> dict[int, tuple[str, ...]]:
    """Return the captions of the samples that have wrong ones, where single captions are exchanged.

    The rule is that of `exchange`, over all captions of all samples in order.
    """
    texts = [text for sample in samples for text in sample.captions]
    givers = exchange(len(texts), ratio, seed)
    changed, first = {}, 0
    for sample in samples:
        places = range(first, first := first + len(sample.captions))
        if any(place in givers for place in places):
            captions = tuple(texts[givers.get(place, place)] for place in places)
            changed[sample_id(sample.source, sample.shard, sample.key)] = captions
    return changed
