"""`pcmepp train ... --dry-run RANKS`: what would happen, and every mistake that can be found on one CPU in seconds."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip

from .. import data, host
from ..models import state_dict
from ..runs import checkpoints


def dry_run(args: Any, spec: data.DataSpec) -> None:
    """Print what training with these arguments would do on `args.world_size` ranks; ValueError for a mistake."""
    rows = list(describe(args, spec))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def describe(args: Any, spec: data.DataSpec) -> Iterator[tuple[str, str]]:
    model = _model(args)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield "model", f"{args.model}, {parameters:,} parameters, {trained:,} trained"
    yield "weights", _start(args, model)

    global_batch = args.batch_size * args.world_size * args.accum_freq
    yield "ranks", str(args.world_size)
    each = f"{args.batch_size} x {args.world_size} ranks x {args.accum_freq} accumulated"
    yield "global batch", f"{global_batch:,} ({each})"
    samples, sources = _samples(args, spec)
    batches = math.ceil(samples / (args.batch_size * args.world_size))
    steps = batches // args.accum_freq
    if steps == 0:
        raise ValueError(f"An epoch of {samples:,} samples is less than one global batch of {global_batch:,}.")
    total = steps * args.epochs
    if args.warmup >= total:
        raise ValueError(f"--warmup {args.warmup:,} is not below the run's {total:,} steps: lower it.")
    yield "steps", f"{steps:,} an epoch, {total:,} in {args.epochs} epochs"
    yield "warm-up", f"{args.warmup:,} steps, {100 * args.warmup / total:.1f} % of the run"
    seen = steps * global_batch * args.epochs
    yield "samples seen", f"{seen:,}"
    for name, share in sources:
        yield f"  of {name}", f"{seen * share:,.0f} ({100 * share:.1f} %)"
    yield "a checkpoint", f"about {(parameters + 2 * trained) * 4 / 1e9:.2f} GB"
    if args.pcmepp_cfg is not None and args.world_size > 1:
        dim = model.visual.output_dim
        floats = global_batch * (dim + 3)  # means and offsets of texts, and two floats a column of the softmax
        yield "gathered a step", f"{floats * 4 * args.accum_freq / 1e6:.1f} MB a rank"
    yield "output", _output(args)


def _model(args: Any) -> Any:
    """The model without memory for its weights."""
    extra = {} if args.pcmepp_cfg is None else {"pcmepp_cfg": args.pcmepp_cfg}
    size = args.force_image_size
    model = open_clip.create_model(
        args.model,
        precision=args.precision,
        device="meta",
        force_quick_gelu=args.force_quick_gelu,
        force_patch_dropout=args.force_patch_dropout,
        force_image_size=size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size,
        force_context_length=args.force_context_length,
        pretrained_text=False,
        **extra,
    )
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups)
    if args.lock_text:
        model.lock_text_tower(args.lock_text_unlocked_layers)
    return model


def _start(args: Any, model: Any) -> str:
    folder = Path(args.logs) / (args.name or "") / "checkpoints"
    if args.resume == "latest":
        found = checkpoints.newest_good(folder) if args.name else None
        if found:
            return f"resumed from {found}"
    elif args.resume:
        problem = checkpoints.fault(Path(args.resume)) if Path(args.resume).exists() else "there is no such file"
        if problem and "://" not in args.resume:
            raise ValueError(f"--resume {args.resume}: {problem}.")
        return f"resumed from {args.resume}"
    if not args.pretrained:
        return "random"
    if Path(args.pretrained).is_file():
        if args.pcmepp_cfg is not None:
            try:
                state_dict.reconcile_state_dict(model, host.read_state_dict(args.pretrained))
            except ValueError as error:
                raise ValueError(f"--pretrained {args.pretrained}: {error}") from error
        return f"from the file {args.pretrained}"
    tags = open_clip.list_pretrained_tags_by_model(args.model)
    if args.pretrained.lower().replace("-", "_") not in tags:
        raise ValueError(f"--pretrained {args.pretrained} is no file and no tag of {args.model}: {', '.join(tags)}.")
    return f"of the tag {args.pretrained} (downloaded when training starts)"


def _samples(args: Any, spec: data.DataSpec) -> tuple[int, list[tuple[str, float]]]:
    """Samples of an epoch, and the share of each source in it."""
    if spec.sources:
        return spec.samples, list(spec.source_shares.items())
    if not args.train_data and args.dataset_type != "synthetic":
        raise ValueError("There is nothing to train on: give --train-data.")
    if args.train_num_samples is None:
        raise ValueError(
            f"The length of an epoch is not known for --dataset-type {args.dataset_type}: give --train-num-samples."
        )
    return args.train_num_samples, []


def _output(args: Any) -> str:
    folder = Path(args.logs) / (args.name or "NAME (from the date)")
    if args.name and (folder / "out.log").exists() and args.resume != "latest":
        raise ValueError(f"{folder} holds an earlier run: give another --name, or --resume latest to go on with it.")
    existing = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--logs {args.logs}: {existing} cannot be written to.")
    return str(folder)
