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
from ..host.flags import (
    PlannedRun,
    empty_batch,
    image_size,
    model_without_weights,
    not_forecast,
    planned_loss,
    planned_run,
)
from ..models.lora import lora_state_dict
from ..runs import checkpoints
from . import param_groups
from .finetuning import FineTuning
from .global_batch import GlobalBatch


def dry_run(args: Any, spec: data.DataSpec) -> None:
    """Print what training with these arguments would do on `args.world_size` ranks; ValueError for a mistake."""
    rows = list(describe(args, spec))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def describe(args: Any, spec: data.DataSpec) -> Iterator[tuple[str, str]]:
    run, model = planned_run(args), model_without_weights(args)
    parameters, start = sum(p.numel() for p in model.parameters()), _start(run, model)
    if args.lora:
        model.add_lora(args.lora)
    saved = parameters + sum(tensor.numel() for tensor in lora_state_dict(model).values())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield "model", f"{run.model}, {parameters:,} parameters, {trained:,} trained"
    yield "weights", start
    recipe = FineTuning.from_args(args)
    if recipe.groups:
        yield from (("note", line) for line in param_groups.check_blocks(model, recipe))
        for name, lr, count in param_groups.table(model, recipe, args.lr):
            yield f"  {name}", f"learning rate {lr:.4g}, {count:,} parameters"

    yield "ranks", str(run.world_size)
    yield "global batch", GlobalBatch.of(run).with_cost
    global_batch = GlobalBatch.of(run).samples
    samples, sources = _samples(run, spec)
    batches = math.ceil(samples / (run.batch_size * run.world_size))
    steps = batches // run.accum_freq
    if steps == 0:
        raise ValueError(
            f"An epoch of {samples:,} samples is smaller than the global batch of {global_batch:,}: lower --batch-size."
        )
    total = steps * run.epochs
    if run.warmup >= total:
        raise ValueError(f"--warmup {run.warmup:,} is not below the {total:,} steps of the run: lower it.")
    yield "steps", f"{steps:,} per epoch, {total:,} in {run.epochs} epochs"
    yield "warm-up", f"{run.warmup:,} steps, {100 * run.warmup / total:.1f} % of the run"
    seen = steps * global_batch * run.epochs
    yield "samples seen", f"{seen:,}"
    for name, share in sources:
        yield f"  of {name}", f"{seen * share:,.0f} ({100 * share:.1f} %)"
    yield "checkpoint size", f"about {(saved + 2 * trained) * 4 / 1e9:.2f} GB"
    if run.cache_tokens is not None:
        yield "token cache", _cache(Path(run.cache_tokens), model, sum(total or 0 for total in spec.totals))
    yield "output", _output(run)
    yield from _forecast(args, run, model, seen)


def _forecast(args: Any, run: PlannedRun, model: Any, samples: int) -> Iterator[tuple[str, str]]:
    from ..forecast import report  # takes a while to import

    plan = report.Plan(
        batch_size=run.batch_size,
        accum_freq=run.accum_freq,
        grad_checkpointing=run.grad_checkpointing,
        precision=run.precision,
        ranks=run.world_size,
        workers=run.workers,
        image_size=image_size(model),
        context_length=model.context_length,
        samples=samples,
        speed=run.samples_per_second_per_gpu,
        why_not=not_forecast(args),
    )
    return report.rows(plan, model, planned_loss(args))


def _start(run: PlannedRun, model: Any) -> str:
    folder = Path(run.logs) / (run.name or "") / "checkpoints"
    if run.resume == "latest":
        path = checkpoints.newest_good(folder) if run.name else None
        if path:
            return f"resumed from {path}"
    elif run.resume:
        problem = checkpoints.fault(Path(run.resume)) if Path(run.resume).exists() else "there is no such file"
        if problem and "://" not in run.resume:
            raise ValueError(f"--resume {run.resume}: {problem}.")
        return f"resumed from {run.resume}"
    if not run.pretrained:
        return "random"
    if Path(run.pretrained).is_file():
        if run.pcmepp_cfg is not None and not run.pretrained.endswith(weights.BIG_VISION):
            try:
                weights.fitting(model, run.pretrained)
            except ValueError as error:
                raise ValueError(f"--pretrained {run.pretrained}: {error}") from error
        return f"from the file {run.pretrained}"
    tags = open_clip.list_pretrained_tags_by_model(run.model)
    if run.pretrained.lower().replace("-", "_") not in tags:
        raise ValueError(
            f"--pretrained {run.pretrained} is neither a file nor a tag of {run.model}; tags: {', '.join(tags)}."
        )
    return f"pretrained tag {run.pretrained} (downloaded when training starts)"


def _samples(run: PlannedRun, spec: data.DataSpec) -> tuple[int, list[tuple[str, float]]]:
    """Return the samples of an epoch, and the share of each source in them."""
    if spec.sources:
        return spec.samples, list(spec.source_shares.items())
    if not run.trains:
        raise ValueError("There is nothing to train on: give --train-data.")
    if run.train_num_samples is None:
        raise ValueError(
            f"The length of an epoch is not known for --dataset-type {run.dataset_type}: give --train-num-samples."
        )
    return run.train_num_samples, []


def _cache(folder: Path, model: Any, samples: int) -> str:
    image, text = empty_batch(model)
    footprint = tokens.footprint_of(model.cache_image(image), model.cache_text(text))
    images, texts = (tokens.readable_size(samples * count) for count in footprint)
    size = f"{folder}: {images} for images and at most {texts} for texts"
    if tokens.exists(folder):
        return f"{size}, some of it written already"
    return f"{size}; {tokens.readable_size(tokens.check_room(folder, samples * footprint.total))} are free"


def _output(run: PlannedRun) -> str:
    folder = Path(run.logs) / (run.name or "NAME (from the date)")
    if run.name and (folder / "out.log").exists() and run.resume != "latest":
        raise ValueError(f"{folder} contains an earlier run: give another --name, or --resume latest to continue it.")
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--logs {run.logs}: {existing} cannot be written to.")
    return str(folder)
