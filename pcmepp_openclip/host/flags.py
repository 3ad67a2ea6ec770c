"""The command line of a run: open_clip's own flags are parsed and checked, and make a model and a loss."""

import argparse
import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import open_clip
import torch

from ..system.flags import CommandParser
from ..system.text import flag_of
from . import seams
from .loss import create_chunked_clip_loss, create_loss
from .towers.blocks import pair
from .trainer import SCHEDULES, params

READ = (  # the flags of open_clip that are read here
    *("model", "pretrained", "precision", "device", "opt", "eps", "warmup", "seed", "report_to", "workers"),
    *("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length"),
    *("lock_image", "lock_image_unlocked_groups", "lock_text", "lock_text_unlocked_layers", "pretrained_image"),
    *("siglip", "batch_size", "accum_freq", "epochs", "log_every_n_steps"),
    *("train_data", "val_data", "imagenet_val", "imagenet_v2", "dataset_type", "dataset_resampled"),
    *("train_num_samples", "val_frequency", "logs", "name", "resume", "lr", "beta1", "beta2", "lr_scheduler"),
    *("skip_scheduler", "csv_img_key", "csv_caption_key", "csv_separator"),
    *("local_loss", "gather_with_grad"),
    *("save_frequency", "save_most_recent", "delete_previous_checkpoint"),
    *("grad_checkpointing",),
)
AT_LEAST = {
    **dict.fromkeys(("batch_size", "accum_freq", "epochs", "log_every_n_steps", "train_num_samples"), 1),
    **dict.fromkeys(("workers", "warmup", "wd"), 0),
}
NOT_SERVED = (
    *("horovod", "distill_model", "torchscript", "trace", "use_bnb_linear", "remote_sync", "copy_codebase"),
    *("fsdp", "use_naflex", "force_naflex_vision", "length_bucketing", "audio_zeroshot_dataset", "pretrained_audio"),
    # open_clip 4 has these flags.
    *("image_layer_decay", "text_layer_decay", "wd_exclude_patterns", "opt_fallback_list"),
)
SLOW_ON_CPU = ("amp", "fp16", "pure_fp16")  # "amp" is open_clip's default; bfloat16 is fast on many CPUs


def read(parser: CommandParser, argv: Sequence[str], config: Any) -> Any:
    """Parse the flags of `parser` and open_clip's own into `config`, and leave their mistakes to `parser.judge`.

    open_clip adds its flags to the parser, and its own defaults to the result. Of a flag that both have, ours counts.
    """
    group = parser.add_argument_group("all flags of open_clip")

    def add_argument(*names: str, **options: Any) -> None:
        if not {*names} & parser._option_string_actions.keys():
            group.add_argument(*names, **options)

    stand_in = Namespace(add_argument=add_argument, parse_args=lambda argv: parser.read(argv, config))
    module = Namespace(**{**vars(argparse), "ArgumentParser": lambda: stand_in})
    with mock.patch.object(params, "argparse", module):
        config = params.parse_args(argv)
    for name in READ:
        if not hasattr(config, name):
            raise seams.HostChanged(seams.lacking(f"flag {flag_of(name)}"))
    size = config.force_image_size
    if isinstance(size, (tuple, list)) and len(size) == 1:  # `main` of open_clip_train does the same later
        config.force_image_size = size[0]
    return config


def _check_number(name: str, least: int, config: Namespace) -> str | None:
    """Return what is wrong with a number that is too small, which open_clip does not check, and forget it."""
    value = getattr(config, name)
    if value is None or value >= least:
        return None
    delattr(config, name)
    return f"{flag_of(name)} must be at least {least}, not {value}."


def _check_served(config: Namespace) -> str | None:
    """Return the first flag that only open_clip's own program serves, or that the model is one of those."""
    flags = [flag_of(name) for name in NOT_SERVED if getattr(config, name, None)]
    # open_clip recognises a CoCa by its name too.
    what = "a CoCa model" if "coca" in config.model.lower() else flags[0] if flags else None
    if what is None:
        return None
    return (
        f"pcmepp train does not serve {what}: drop it, or train by open_clip's own program, "
        "`python -m pcmepp_openclip -m open_clip_train.main FLAGS`."
    )


def _check_schedule(config: Namespace) -> str | None:
    if config.lr_scheduler not in SCHEDULES:
        return f"--lr-scheduler must be {', '.join(SCHEDULES)}, not {config.lr_scheduler}."
    if config.lr_scheduler == "const-cooldown" and config.epochs_cooldown is None:
        return "--lr-scheduler const-cooldown needs --epochs-cooldown."
    return None


def _check_clipping(config: Namespace) -> str | None:
    norm = config.grad_clip_norm
    if norm is None or norm > 0:
        return None
    return f"--grad-clip-norm must be more than 0, not {norm:g}: drop it not to clip."  # less turns gradients round


CHECKS: tuple[Callable[[Any], str | None], ...] = (  # the checks of open_clip's flags
    _check_served,
    *(functools.partial(_check_number, name, least) for name, least in AT_LEAST.items()),
    _check_schedule,
    _check_clipping,
)


def trains_on_cpu(args: Namespace) -> bool:
    """Return whether the run will use the CPU, by --device or because there is no CUDA device."""
    kind = args.device.partition(":")[0]
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available())


def slow_on_cpu(args: Namespace) -> bool:
    """Return whether the run would compute in a precision that is slow on its CPU."""
    return args.precision in SLOW_ON_CPU and trains_on_cpu(args)


def check_for_pcmepp(args: Namespace) -> None:
    """Raise ValueError for --siglip, and set --eps where open_clip leaves it out for an optimizer of timm's."""
    if args.siglip:
        raise ValueError(f"{args.model} cannot be trained with --siglip: drop it, or choose a plain model.")
    if args.opt.startswith("timm/") and args.eps is None:
        args.eps = 1e-8  # open_clip passes None on, at which some of timm's optimizers fail


def starts_random(args: Namespace) -> bool:
    """Return whether the run starts with random weights. `args.resume` must be resolved to a checkpoint."""
    return not (args.pretrained or args.pretrained_image or args.resume or ":" in args.model)


def model_config(args: Namespace) -> dict:
    """Return the config of --model, changed by the flags that change it."""
    config = open_clip.get_model_config(args.model)
    if config is None:
        raise ValueError(
            f"--model {args.model} has no config of its own: name a model, and its weights by --pretrained."
        )
    for flag, key in (("force_quick_gelu", "quick_gelu"), ("force_custom_text", "custom_text")):
        if getattr(args, flag):
            config[key] = True
    if args.force_context_length and config["text_cfg"].get("hf_model_name"):
        config["text_cfg"]["context_length"] = args.force_context_length  # a Hugging Face tower does not know its own
    return config


def model_without_weights(args: Namespace) -> Any:
    """Return the model of these flags on the device "meta", which takes no memory."""
    with torch.device("meta"):
        model = open_clip.create_model(
            args.model,
            precision=args.precision,
            device="meta",
            force_quick_gelu=args.force_quick_gelu,
            force_custom_text=args.force_custom_text,
            force_patch_dropout=args.force_patch_dropout,
            force_image_size=args.force_image_size,
            force_context_length=args.force_context_length,
            pretrained_text=False,
            output_dict=True,
            **({} if args.pcmepp_cfg is None else {"pcmepp_cfg": args.pcmepp_cfg}),
        )
    if args.head_only:
        model.freeze_towers()
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups)
    if args.lock_text:
        model.lock_text_tower(args.lock_text_unlocked_layers)
    return model


def planned_loss(args: Namespace) -> torch.nn.Module:
    """Return the loss of these flags, on `args.world_size` ranks."""
    if args.pcmepp_cfg is not None:
        return create_loss(args, args.pcmepp_cfg)
    if args.chunked_clip_loss:
        return create_chunked_clip_loss(args)
    return open_clip.create_loss(Namespace(**{**vars(args), "distill": False}))


def not_forecast(args: Namespace) -> str:
    """Return why there is no forecast for the training step of these flags, or ""."""
    for flag, on in {
        "--device cpu": args.device.startswith("cpu"),
        "--cache-tokens": args.cache_tokens is not None,
    }.items():
        if on:
            return f"this run has {flag}."
    return ""


def image_size(model: Any) -> tuple[int, int]:
    height, width = pair(model.visual.image_size)
    return height, width


def empty_batch(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image and a text of the full length on the device "meta", for a model there."""
    dtype = next(model.visual.parameters()).dtype
    image = torch.empty(1, 3, *pair(model.visual.image_size), device="meta", dtype=dtype)
    return image, torch.empty(1, model.context_length, device="meta", dtype=torch.int64)
