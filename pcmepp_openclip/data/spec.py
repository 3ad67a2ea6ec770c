"""The arguments of a run to sources with sizes, a wanted mix and a number of samples; or one sentence why not."""

import argparse
import re
from dataclasses import dataclass

from ..system.redact import real, redact
from .mixing import natural_mix, parse_mix
from .sizes import ShardSize, count_command, read_sizes
from .sources import Source, parse_sources


@dataclass(frozen=True)
class DataSpec:
    """Arguments:
    sizes: by source, None for one that was not counted.
    shares: of a resampled epoch, by source; None for an exact pass.
    samples: of an epoch, over all ranks, before the last batch is filled.
    """

    sources: list[Source]
    sizes: list[list[ShardSize] | None]
    shares: list[float] | None
    samples: int


def is_ours(args: argparse.Namespace) -> bool:
    """Whether the training data are webdataset shards; anything else is open_clip's."""
    data = real(getattr(args, "train_data", None))
    if not data or args.dataset_type not in ("webdataset", "auto"):
        return False
    return args.dataset_type == "webdataset" or not re.search(r"\.[ct]sv$", data)


def resolve(args: argparse.Namespace) -> DataSpec:
    text = real(args.train_data)
    assert text
    sources = parse_sources(text)
    given = _given_sizes(real(args.train_data_sizes), sources)
    sizes = [read_sizes(source, given.get(source.name)) for source in sources]
    shares = _shares(args, sources, sizes)
    return DataSpec(sources, sizes, shares, _samples(args, sources, sizes))


def _given_sizes(text: str | None, sources: list[Source]) -> dict[str, str]:
    given = {}
    for part in text.split(",") if text else ():
        name, equals, path = part.strip().partition("=")
        if not equals:
            raise ValueError(f"--train-data-sizes: '{redact(part)}' is not NAME=FILE, as in cc3m=cc3m.sizes.json.")
        if name not in [source.name for source in sources]:
            raise ValueError(
                f"--train-data-sizes: --train-data has no source '{name}'; "
                f"it has {', '.join(source.name for source in sources)}."
            )
        given[name] = path
    return given


def _shares(args: argparse.Namespace, sources: list[Source], sizes: list[list[ShardSize] | None]) -> list[float] | None:
    names = [source.name for source in sources]
    mix, factors = args.train_data_mix, args.train_data_upsampling_factors
    if not args.dataset_resampled:
        for flag, value in (("--train-data-mix", mix), ("--train-data-upsampling-factors", factors)):
            if value is not None:
                raise ValueError(f"{flag} needs --dataset-resampled: an exact pass sees every sample once.")
        return None
    if mix is not None and factors is not None:
        raise ValueError("Give --train-data-mix (by samples) or --train-data-upsampling-factors, not both.")
    if mix is not None:
        return parse_mix(mix, names)
    if len(sources) == 1:
        return [1.0]
    for source, counted in zip(sources, sizes, strict=True):
        if counted is None:
            raise ValueError(
                f"The mix of the sources is not known, since '{source.name}' was not counted: give --train-data-mix, "
                f"or run `{count_command(source)}`."
            )
    return natural_mix([_total(counted) for counted in sizes], factors)


def _samples(args: argparse.Namespace, sources: list[Source], sizes: list[list[ShardSize] | None]) -> int:
    if args.train_num_samples is not None and args.train_num_samples < 1:
        raise ValueError(f"--train-num-samples must be at least 1, not {args.train_num_samples}.")
    for source, counted in zip(sources, sizes, strict=True):
        if counted is None and args.train_num_samples is None:
            how = " and pass its file with --train-data-sizes" if "--output" in count_command(source) else ""
            raise ValueError(
                f"--train-data: source '{source.name}' was not counted: run `{count_command(source)}`{how}, "
                "or give --train-num-samples."
            )
        if counted is not None and _total(counted) == 0:
            raise ValueError(
                f"--train-data: source '{source.name}' has no usable sample by its sizes.json: "
                f"see the report beside it, or run `{count_command(source)}` again."
            )
    return args.train_num_samples or sum(_total(counted) for counted in sizes)


def _total(sizes: list[ShardSize] | None) -> int:
    return sum(size.samples for size in sizes or ())


def training_sources(args: argparse.Namespace) -> list[dict] | None:
    """What the training data are, for people: each source's name, samples and share of an epoch, None for what is
    not known. None altogether if the data are open_clip's."""
    if not is_ours(args):
        return None
    setup = resolve(args)
    totals = [None if sizes is None else _total(sizes) for sizes in setup.sizes]
    shares = dict((describe_data(args) or (0, []))[1]) or ({setup.sources[0].name: 1.0} if len(totals) == 1 else {})
    return [
        {"name": source.name, "samples": total, "share": shares.get(source.name)}
        for source, total in zip(setup.sources, totals, strict=True)
    ]


def describe_data(args: argparse.Namespace) -> tuple[int, list[tuple[str, float]]] | None:
    """Samples of an epoch and the share of each source in it where that is known; None if the data are open_clip's."""
    if not is_ours(args):
        return None
    setup = resolve(args)
    names = [source.name for source in setup.sources]
    if setup.shares is not None:
        return setup.samples, list(zip(names, setup.shares, strict=True))
    if any(sizes is None for sizes in setup.sizes):
        return setup.samples, []
    counts = [sum(size.samples for size in sizes or ()) for sizes in setup.sizes]
    return setup.samples, [(name, count / sum(counts)) for name, count in zip(names, counts, strict=True)]
