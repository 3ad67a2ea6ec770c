"""Flags to a `DataSpec`: sources with sizes, the mix and the length of an epoch, or one sentence that says why not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..system.redact import redact
from .arguments import captions_per_epoch, reads_shards
from .caption_table import check_names, check_readable
from .captions import ALL, FIRST
from .check import check_several_captions, check_shards, check_source
from .mixing import natural_mix, parse_mix
from .sizes import ShardSize, count_command, read_sizes
from .sources import Source, parse_sources


@dataclass(frozen=True)
class DataSpec:
    """The training data of a run, resolved once per rank. Its `repr` shows no credentials.

    Arguments:
        config: all flags of the run.
        places: --train-data, --val-data and --train-data-sizes as the user wrote them; `config` has them without
            credentials.
        sources: the sources; none if the training data are read by open_clip.
        sizes: the sizes of the shards of each source, None for a source that was not counted.
        shares: the wanted share of each source in a resampled epoch; None for an exact pass.
        samples: the samples per epoch over all ranks, before the last batch is filled; an image counts once per
            caption.
        samples_per_step: an epoch is filled up to a multiple of it, so that its steps do not depend on the ranks.
    """

    config: Any = field(repr=False)
    places: Mapping[str, str] = field(default_factory=dict, repr=False)
    sources: list[Source] = field(default_factory=list)
    sizes: list[list[ShardSize] | None] = field(default_factory=list, repr=False)
    shares: list[float] | None = None
    samples: int = 0
    samples_per_step: int = 1

    def filled(self, samples: int) -> int:
        """Return a number of samples, filled up to whole steps."""
        return -(-samples // self.samples_per_step) * self.samples_per_step

    @property
    def totals(self) -> list[int | None]:
        """Return the usable samples of each source, None for a source that was not counted."""
        return [None if sizes is None else _total(sizes) for sizes in self.sizes]

    @property
    def source_shares(self) -> dict[str, float]:
        """Return the share of each source in an epoch by name, empty if it is not known."""
        names, totals = [source.name for source in self.sources], self.totals
        if self.shares is not None:
            return dict(zip(names, self.shares, strict=True))
        if len(names) == 1:
            return {names[0]: 1.0}
        known = [total for total in totals if total is not None]
        if len(known) < len(totals):
            return {}
        return {name: total / sum(known) for name, total in zip(names, known, strict=True)}


def resolve(
    config: Any, places: Mapping[str, str], *, ranks: int = 1, samples_per_step: int = 1, check: bool = False
) -> DataSpec:
    """Parse the sources, read their sizes and compute the mix and the length of an epoch; ValueError for a mistake.

    Arguments:
        config, places: see `DataSpec`; the flags are checked.
        ranks: the number of processes that train.
        samples_per_step: the --global-batch-size. Without it this is 1, and an epoch may end within a step.
        check: whether to look into the shards, too. One rank is enough for that.
    """
    train_data = places.get("train_data")
    if train_data is None or not reads_shards(config.dataset_type, train_data):
        return DataSpec(config, places)
    sources = parse_sources(train_data)
    if check:
        for source in sources:
            check_source(source, config.train_data_max_pixels, min(2, config.train_data_retries))
        if config.captions != FIRST:
            check_several_captions(sources, config.captions, min(2, config.train_data_retries))
    sizes_files = _sizes_files(places.get("train_data_sizes"), sources)
    sizes = [read_sizes(source, sizes_files.get(source.name)) for source in sources]
    shares, samples = _shares(config, sources, sizes), _samples(config, sources, sizes)
    if samples_per_step > samples:
        raise ValueError(
            f"An epoch of {samples:,} samples is smaller than the global batch of {samples_per_step:,}: lower "
            "--global-batch-size."
        )
    spec = DataSpec(config, places, sources, sizes, shares, samples, samples_per_step)
    spec = replace(spec, samples=spec.filled(samples))
    _check_captions(spec)
    if check and not config.dataset_resampled:
        check_shards(sum(len(source.shards) for source in sources), config.workers, ranks)
    return spec


def check_counted(spec: DataSpec, flag: str) -> None:
    """Raise ValueError if a source was not counted, which `flag` needs."""
    for source, sizes in zip(spec.sources, spec.sizes, strict=True):
        if sizes is None:
            raise ValueError(f"{flag} needs counts, which source '{source.name}' lacks: run `{count_command(source)}`.")


def _check_captions(spec: DataSpec) -> None:
    config = spec.config
    if config.captions == ALL:
        check_counted(spec, "--captions all")
    if config.multi_positives:
        for source in spec.sources:
            check_names(source, "--multi-positives")
    if config.noise_ratio:
        total = check_readable(spec.sources, spec.sizes, "--noise-ratio")
        if int(config.noise_ratio * total) < 2:
            raise ValueError(
                f"--noise-ratio {config.noise_ratio:g} of {total} samples are not two that could exchange their "
                "captions: raise it."
            )


def _sizes_files(text: str | None, sources: list[Source]) -> dict[str, str]:
    files = {}
    for part in text.split(",") if text else ():
        name, equals, path = part.strip().partition("=")
        if not equals:
            raise ValueError(f"--train-data-sizes: '{redact(part)}' is not NAME=FILE, as in cc3m=cc3m.sizes.json.")
        if name not in [source.name for source in sources]:
            raise ValueError(
                f"--train-data-sizes: --train-data has no source '{name}'; "
                f"it has {', '.join(source.name for source in sources)}."
            )
        files[name] = path
    return files


def _shares(config: Any, sources: list[Source], sizes: list[list[ShardSize] | None]) -> list[float] | None:
    names = [source.name for source in sources]
    mix, factors = config.train_data_mix, config.train_data_upsampling_factors
    if not config.dataset_resampled:
        return None
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


def _samples(config: Any, sources: list[Source], sizes: list[list[ShardSize] | None]) -> int:
    for source, counted in zip(sources, sizes, strict=True):
        if counted is None and config.train_num_samples is None:
            how = " and pass its file with --train-data-sizes" if "--output" in count_command(source) else ""
            raise ValueError(
                f"--train-data: source '{source.name}' was not counted: run `{count_command(source)}`{how}, "
                "or give --train-num-samples."
            )
        if counted is not None and _total(counted) == 0:
            raise ValueError(
                f"--train-data: source '{source.name}' has no usable sample according to its sizes.json: "
                f"see the report next to it, or run `{count_command(source)}` again."
            )
    return config.train_num_samples or captions_per_epoch(config) * sum(_total(counted) for counted in sizes)


def _total(sizes: list[ShardSize] | None) -> int:
    return sum(size.samples for size in sizes or ())


def summarize(spec: DataSpec) -> list[dict]:
    """Return name, samples and share of each source for the record of a run, None for a number that is not known."""
    return [
        {"name": source.name, "samples": total, "share": spec.source_shares.get(source.name)}
        for source, total in zip(spec.sources, spec.totals, strict=True)
    ]
