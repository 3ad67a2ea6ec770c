"""`pcmepp train ... --dry-run RANKS`: print what a run would do; find mistakes on one CPU in seconds."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip

from .. import data
from ..encode import tokens
from ..host import weights
from ..host.flags import empty_batch, model_without_weights, not_forecast, planned_loss
from ..models.lora import lora_state_dict
from ..runs import checkpoints
from . import param_groups
from .config import RunConfig
from .finetuning import has_groups
from .global_batch import words_with_cost


def dry_run(config: RunConfig, spec: data.DataSpec) -> None:
    """Print what training with these flags would do on `world_size` ranks; ValueError for a mistake."""
    rows = list(describe(config, spec))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def describe(config: RunConfig, spec: data.DataSpec) -> Iterator[tuple[str, str]]:
    model = model_without_weights(config)
    parameters, start = sum(p.numel() for p in model.parameters()), _start(config, model)
    if config.lora:
        model.add_lora(config.lora)
    saved = parameters + sum(tensor.numel() for tensor in lora_state_dict(model).values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield "model", f"{config.model}, {parameters:,} parameters, {trained:,} trained"
    yield "weights", start
    if has_groups(config):
        yield from (("note", line) for line in param_groups.check_blocks(model, config))
        for name, lr, count in param_groups.table(model, config, config.lr):
            yield f"  {name}", f"learning rate {lr:.4g}, {count:,} parameters"

    yield "ranks", str(config.world_size)
    yield "global batch", words_with_cost(config)
    global_batch = config.samples_per_step
    samples, sources = _samples(config, spec)
    batches = math.ceil(samples / config.samples_per_batch)
    steps = batches // config.accum_freq
    if steps == 0:
        raise ValueError(
            f"An epoch of {samples:,} samples is smaller than the global batch of {global_batch:,}: lower --batch-size."
        )
    total = steps * config.epochs
    if config.warmup >= total:
        raise ValueError(f"--warmup {config.warmup:,} is not below the {total:,} steps of the run: lower it.")
    yield "steps", f"{steps:,} per epoch, {total:,} in {config.epochs} epochs"
    yield "warm-up", f"{config.warmup:,} steps, {100 * config.warmup / total:.1f} % of the run"
    seen = steps * global_batch * config.epochs
    yield "samples seen", f"{seen:,}"
    for name, share in sources:
        yield f"  of {name}", f"{seen * share:,.0f} ({100 * share:.1f} %)"
    yield "checkpoint size", f"about {(saved + 2 * trained) * 4 / 1e9:.2f} GB"
    if config.cache_tokens is not None:
        yield "token cache", _cache(Path(config.cache_tokens), model, sum(total or 0 for total in spec.totals))
    yield "output", _output(config)
    yield from _forecast(config, model, seen)


def _forecast(config: RunConfig, model: Any, samples: int) -> Iterator[tuple[str, str]]:
    from ..forecast import report  # takes a while to import

    return report.rows(config, model, planned_loss(config), samples, not_forecast(config))


def _start(config: RunConfig, model: Any) -> str:
    if config.resume == "latest":
        path = checkpoints.newest_good(config.checkpoints) if config.name else None
        if path:
            return f"resumed from {path}"
    elif config.resume:
        problem = checkpoints.fault(Path(config.resume)) if Path(config.resume).exists() else None
        if problem:
            raise ValueError(f"--resume {config.resume}: {problem}.")
        return f"resumed from {config.resume}"
    if not config.pretrained:
        return "random"
    if Path(config.pretrained).is_file():
        if config.pcmepp_cfg is not None and not config.pretrained.endswith(weights.BIG_VISION):
            try:
                weights.fitting(model, config.pretrained)
            except ValueError as error:
                raise ValueError(f"--pretrained {config.pretrained}: {error}") from error
        return f"from the file {config.pretrained}"
    tags = open_clip.list_pretrained_tags_by_model(config.model)
    if config.pretrained.lower().replace("-", "_") not in tags:
        raise ValueError(
            f"--pretrained {config.pretrained} is neither a file nor a tag of {config.model}; tags: {', '.join(tags)}."
        )
    return f"pretrained tag {config.pretrained} (downloaded when training starts)"


def _samples(config: RunConfig, spec: data.DataSpec) -> tuple[int, list[tuple[str, float]]]:
    """Return the samples of an epoch, and the share of each source in them."""
    if spec.sources:
        return spec.samples, list(spec.source_shares.items())
    if not config.trains:
        raise ValueError("There is nothing to train on: give --train-data.")
    if config.train_num_samples is None:
        raise ValueError(
            f"The length of an epoch is not known for --dataset-type {config.dataset_type}: give --train-num-samples."
        )
    return config.train_num_samples, []


def _cache(folder: Path, model: Any, samples: int) -> str:
    image, text = empty_batch(model)
    footprint = tokens.footprint_of(model.cache_image(image), model.cache_text(text))
    images, texts = (tokens.readable_size(samples * count) for count in footprint)
    size = f"{folder}: {images} for images and at most {texts} for texts"
    if tokens.exists(folder):
        return f"{size}, some of it written already"
    return f"{size}; {tokens.readable_size(tokens.check_room(folder, samples * footprint.total))} are free"


def _output(config: RunConfig) -> str:
    folder = Path(config.logs) / (config.name or "NAME (from the date)")
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--logs {config.logs}: {existing} cannot be written to.")
    return str(folder)
