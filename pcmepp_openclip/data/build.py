"""Arguments to the DataInfo that open_clip's training loop takes."""

import argparse
import copy
import logging
import math
from collections.abc import Callable
from typing import Any

from ..system.redact import real, redact, redact_logs
from .batches import LoaderSpec
from .loader import Loader, TallyReducer
from .plan import Shard, lane_count
from .spec import DataSpec, is_ours, resolve


def get_data(
    stock: Callable, args: argparse.Namespace, preprocess_fns: Any, epoch: int = 0, tokenizer: Any = None
) -> dict[str, Any]:
    """open_clip's `get_data`, with webdataset shards for training read by this package.

    Arguments:
        stock: `open_clip_train.data.get_data`, for everything else.
    """
    rest = copy.copy(args)
    rest.val_data = real(getattr(args, "val_data", None))
    if (rest.val_data or "") != redact(rest.val_data or ""):
        redact_logs()  # open_clip quotes the URL of a shard that fails
    if not is_ours(args):
        return stock(rest, preprocess_fns, epoch=epoch, tokenizer=tokenizer)
    rest.train_data = None
    ours = {"train": train_data(args, preprocess_fns[0], epoch, tokenizer)}
    return {**ours, **stock(rest, preprocess_fns, epoch=epoch, tokenizer=tokenizer)}


def train_data(args: argparse.Namespace, transform: Any, epoch: int, tokenizer: Any) -> Any:
    from ..host import data as host_data

    setup = resolve(args)
    job = make_job(args, setup, transform, tokenizer)
    if args.rank == 0:
        _announce(setup, job)
    position = host_data.Position(epoch)
    loader = Loader(job, args.workers, position, max_bad=args.train_data_max_bad_fraction, gather=TallyReducer())
    return host_data.TrainData(dataloader=loader, shared_epoch=position.epoch, position=position)


def make_job(args: argparse.Namespace, setup: DataSpec, transform: Any, tokenizer: Any) -> LoaderSpec:
    from ..host import data as host_data

    shards = tuple(
        Shard(number, shard, sizes[i] if sizes else None)
        for number, (source, sizes) in enumerate(zip(setup.sources, setup.sizes, strict=True))
        for i, shard in enumerate(source.shards)
    )
    batches = math.ceil(setup.samples / (args.batch_size * args.world_size))
    uncut = setup.shares is None and any(shard.size is None for shard in shards)
    if uncut:  # whole shards only: a line needs all counts
        shards = tuple(shard._replace(size=None) for shard in shards)
    cut = not args.no_trim_captions and host_data.takes_cut_texts(args.model)
    transform, normalization = host_data.split_transform(transform)
    empty = tokenizer([""])[0]  # begins with its tokens, ends with padding
    return LoaderSpec(
        shards=shards,
        names=tuple(source.name for source in setup.sources),
        shares=None if setup.shares is None else tuple(setup.shares),
        seed=args.seed,
        rank=args.rank,
        world_size=args.world_size,
        batch_size=args.batch_size,
        samples=setup.samples,
        batches=batches,
        lanes=lane_count(batches, args.workers, len(shards) // args.world_size if uncut else None),
        shuffle=args.train_data_shuffle_buffer,
        retries=args.train_data_retries,
        max_empty_shards=args.train_data_max_empty_shards,
        max_pixels=args.train_data_max_pixels,
        at_least=host_data.input_size(args.model, args.force_image_size) if args.train_data_reduced_decoding else None,
        upright=args.train_data_exif_orientation,
        transform=transform,
        normalization=normalization,
        tokenizer=tokenizer,
        context_length=len(empty),
        pad=int(empty[-1]) if cut else None,
    )


def _announce(setup: DataSpec, job: LoaderSpec) -> None:
    for number, (source, sizes) in enumerate(zip(setup.sources, setup.sizes, strict=True)):
        counted = "not counted" if sizes is None else f"{sum(size.samples for size in sizes)} usable samples"
        share = "" if setup.shares is None else f", {100 * setup.shares[number]:.2f} % of the samples wanted"
        logging.info("Data: %s: %d shards, %s%s", source.name, len(source.shards), counted, share)
    delivered = job.batches * job.batch_size * job.world_size
    if setup.shares is not None:
        logging.info("Data: resampled epochs of %d samples", delivered)
    elif job.counted:
        usable = sum(shard.size.samples for shard in job.shards if shard.size)
        again = max(0, delivered - usable)
        logging.info("Data: exact passes over %d samples; %d are seen again to fill the last batch", usable, again)
    else:
        logging.info("Data: passes over whole shards, only about exact, since not all shards are counted")
