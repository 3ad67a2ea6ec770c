"""A training set with the noise that `pcmepp train --noise-ratio` gives it: where the files are read."""

from dataclasses import dataclass

from ..data.caption_table import check_local, check_readable, read_table
from ..data.captioned import ImageRef
from ..data.noise import exchange
from ..data.sizes import read_sizes
from ..data.sources import label, local_path, parse_sources


@dataclass
class NoisyPairs:
    """Images with one caption each, and whether it is that of another image."""

    images: list[ImageRef]
    captions: list[str]
    wrong: list[bool]


def read_noisy_pairs(pattern: str, ratio: float, seed: int, flag: str = "--noisy-pairs") -> tuple[str, NoisyPairs]:
    """The names of the sources, and all pairs of counted local shards with their noise.

    Arguments:
        pattern: as in `--train-data`, whose noise depends on all sources and their order.
        ratio, seed: of the noise.
    """
    sources = parse_sources(pattern, flag)
    for source in sources:
        check_local(source, flag)
    sizes = [read_sizes(source) for source in sources]
    givers = exchange(check_readable(sources, sizes, flag), ratio, seed)
    if not givers:
        raise ValueError(f"--noise-ratio {ratio:g} leaves all captions of {flag} where they are: raise it.")
    samples = {sample.number: sample for sample in read_table(sources, sizes, every=False, progress=True)}
    found = NoisyPairs([], [], [])
    for number, sample in samples.items():
        if sample.image is None:
            raise ValueError(f"{flag}: {label(sample.shard)} is compressed: unpack it first, as with gunzip.")
        giver = samples.get(givers.get(number, number), sample)
        found.images.append(ImageRef(local_path(sample.shard), *sample.image))
        found.captions.append(giver.captions[0])
        found.wrong.append(giver is not sample)
    return "+".join(source.name for source in sources), found
