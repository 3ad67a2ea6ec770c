"""Turn a `DataSpec` into the DataInfo that open_clip's training loop takes."""

import argparse
import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from ..system.redact import redact, redact_logs
from .arguments import EXACT, REDUCED, captions_per_epoch, rows_per_image
from .batches import LoaderSpec
from .caption_table import exchanged_captions
from .captions import ALL, FIRST, CaptionChoice
from .crops import RandomCrop
from .gathering import TallyReducer
from .jpeg import simplejpeg
from .loader import Loader
from .plan import Shard, lane_count
from .spec import DataSpec
from .to_device import ToDevice


def get_data(
    stock: Callable,
    spec: DataSpec,
    args: argparse.Namespace,
    preprocess_fns: Any,
    epoch: int = 0,
    tokenizer: Any = None,
    make_train: Callable[..., Any] | None = None,
    make_validation: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Return what open_clip's `get_data` returns, with webdataset shards for training read by this package.

    Arguments:
        stock: `open_clip_train.data.get_data`, for everything else.
        spec: the training data, and the original text of arguments that are redacted in `args`.
        make_train: a function of (preprocess_fns, epoch, tokenizer) that makes the training data, if these are shards
            that are not to be read in every epoch.
        make_validation: a function of (preprocess_fns, tokenizer) that makes the validation data; None if open_clip
    """
    stock_args = copy.copy(args)
    stock_args.train_data, stock_args.val_data = spec.places.get("train_data"), spec.places.get("val_data")
    if any(text and redact(text) != text for text in (stock_args.train_data, stock_args.val_data)):
        redact_logs()  # open_clip quotes the URL of a shard that fails
    ours = {}
    if spec.sources:
        stock_args.train_data = None
        if make_train is not None:
            ours["train"] = make_train(preprocess_fns, epoch, tokenizer)
        else:
            where = {"rank": args.rank, "ranks": args.world_size, "device": _device(args)}
            ours["train"] = train_data(spec, preprocess_fns[0], epoch, tokenizer, **where)
    if make_validation is not None:
        stock_args.val_data = None
        ours["val"] = make_validation(preprocess_fns, tokenizer)
    return {**ours, **stock(stock_args, preprocess_fns, epoch=epoch, tokenizer=tokenizer)}


def _device(args: argparse.Namespace) -> torch.device:
    """Return the device that trains. --device is a wish until open_clip has looked for the device."""
    device = torch.device(getattr(args, "device", "cpu"))
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def train_data(
    spec: DataSpec, transform: Any, epoch: int, tokenizer: Any, *, rank: int, ranks: int, device: torch.device
) -> Any:
    from ..host import data as host_data  # imports pandas, which commands other than training do without

    loader_spec = make_loader_spec(spec, transform, tokenizer, rank=rank, ranks=ranks)
    if rank == 0:
        _announce(spec, loader_spec)
    position = host_data.Position(epoch)
    max_bad = spec.config.train_data_max_bad_fraction
    to_device = ToDevice(device, loader_spec.normalization)
    loader = Loader(
        *(loader_spec, spec.config.workers, position), max_bad=max_bad, gather=TallyReducer(), to_device=to_device
    )
    return host_data.TrainData(dataloader=loader, shared_epoch=position.epoch, position=position)


def make_loader_spec(spec: DataSpec, transform: Any, tokenizer: Any, *, rank: int, ranks: int) -> LoaderSpec:
    from ..host import data as host_data

    config = spec.config
    passes = captions_per_epoch(config) // rows_per_image(config)
    shards = tuple(
        Shard(source_id, shard, sizes[i] if sizes else None, pass_index)
        for pass_index in range(passes)
        for source_id, (source, sizes) in enumerate(zip(spec.sources, spec.sizes, strict=True))
        for i, shard in enumerate(source.shards)
    )
    batches = math.ceil(spec.samples / (config.batch_size * ranks))  # counting samples or images makes no difference
    uncounted = spec.shares is None and any(shard.size is None for shard in shards)
    if uncounted:  # whole shards only: a line needs all counts
        shards = tuple(shard._replace(size=None) for shard in shards)
    trim = not config.no_trim_captions and host_data.takes_cut_texts(config.model)
    transform = host_data.with_crop(transform, config.crop_sides, config.flip)
    transform, normalization = host_data.split_transform(transform)
    exact, reduced = (config.train_data_decoding == value for value in (EXACT, REDUCED))
    steps = None if normalization is None else host_data.split_crop(transform)
    crop = None if steps is None else RandomCrop(*steps, exact=exact, reduced=reduced)
    empty = tokenizer([""])[0]  # begins with its tokens, ends with padding
    return LoaderSpec(
        shards=shards,
        names=tuple(source.name for source in spec.sources),
        shares=None if spec.shares is None else tuple(spec.shares),
        seed=config.seed,
        rank=rank,
        world_size=ranks,
        batch_size=config.batch_size // rows_per_image(config),
        samples=math.ceil(spec.samples / rows_per_image(config)),
        batches=batches,
        lanes=lane_count(batches, config.workers, len(shards) // ranks if uncounted else None),
        shuffle=config.train_data_shuffle_buffer,
        retries=config.train_data_retries,
        max_empty_shards=config.train_data_max_empty_shards,
        max_pixels=config.train_data_max_pixels,
        at_least=host_data.input_size(config.model, config.force_image_size) if reduced else None,
        upright=config.train_data_exif_orientation,
        transform=transform,
        crop=crop,
        normalization=normalization,
        tokenizer=tokenizer,
        context_length=len(empty),
        pad=int(empty[-1]) if trim else None,
        captions=_caption_choice(spec, progress=rank == 0),
    )


def _caption_choice(spec: DataSpec, progress: bool) -> CaptionChoice:
    config, exchanged = spec.config, {}
    if config.noise_ratio:
        how = config.captions != FIRST, config.noise_ratio, config.noise_seed or 0, config.noise_per_caption
        exchanged = exchanged_captions(spec.sources, spec.sizes, *how, progress=progress)
    return CaptionChoice(config.captions, config.seed, rows_per_image(config), exchanged)


def _announce(spec: DataSpec, loader: LoaderSpec) -> None:
    for source, total in zip(spec.sources, spec.totals, strict=True):
        counted = "not counted" if total is None else f"{total} usable samples"
        share = "" if spec.shares is None else f", wanted share {100 * spec.source_shares[source.name]:.2f} %"
        shards = f"{len(source.shards)} shard{'s' if len(source.shards) > 1 else ''}"
        logging.info("Data: %s: %s, %s%s", source.name, shards, counted, share)
    config = spec.config
    if loader.captions.exchanged:
        logging.info("Data: %d samples have captions of others (noise)", len(loader.captions.exchanged))
    if config.captions == ALL:
        how = "in the same batch" if config.multi_positives else "in passes of their own"
        logging.info("Data: each image with %d captions per epoch, %s", captions_per_epoch(config), how)
    elif config.captions != FIRST:
        logging.info("Data: one caption of each image is drawn per epoch")
    if loader.crop is not None and simplejpeg is None:
        logging.info("Data: JPEGs are decoded by Pillow; pip install 'pcmepp-openclip[jpeg]' would make that faster")
    rows = rows_per_image(config)  # samples per image, if a batch holds several captions of it
    delivered = loader.batches * loader.batch_size * rows * loader.world_size
    if spec.shares is not None:
        logging.info("Data: resampled epochs of %d samples each", delivered)
    elif loader.counted:
        usable = rows * sum(shard.size.samples for shard in loader.shards if shard.size)
        again = max(0, delivered - usable)
        logging.info(
            "Data: exact passes over %d samples per epoch; %d of them are seen twice to fill the last batch",
            min(delivered, usable),
            again,
        )
    else:
        logging.info(
            "Data: passes over whole shards, which are only approximately exact, since not all shards are counted"
        )
