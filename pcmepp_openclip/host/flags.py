"""The command line of a run: open_clip's flags, whose names are known here alone, and those of `pcmepp train`.

Other folders get typed records of the flags that they need.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import open_clip
import torch

from ..system.text import did_you_mean, flag_of
from . import seams
from .loss import create_chunked_clip_loss, create_loss
from .towers import pair
from .trainer import params

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
AT_LEAST = {"batch_size": 1, "accum_freq": 1, "epochs": 1, "workers": 0, "log_every_n_steps": 1, "warmup": 0, "wd": 0}
NOT_SERVED = (
    *("horovod", "distill_model", "torchscript", "trace", "use_bnb_linear", "remote_sync", "copy_codebase"),
    *("fsdp", "use_naflex", "force_naflex_vision", "length_bucketing", "audio_zeroshot_dataset", "pretrained_audio"),
    # open_clip 4 has these flags.
    *("image_layer_decay", "text_layer_decay", "wd_exclude_patterns", "opt_fallback_list"),
)
SLOW_ON_CPU = ("amp", "fp16", "pure_fp16")  # "amp" is open_clip's default; bfloat16 is fast on many CPUs


def parse_args(argv: list[str], own_flags: Iterable[str] = ()) -> Namespace:
    """Parse open_clip's own flags. Raise ValueError for a mistake, and HostChanged if a flag of `READ` is gone.

    Arguments:
        own_flags: flags of `pcmepp train`, which are parsed before, as suggestions for a misspelt flag.
    """

    def refuse(parser: ArgumentParser, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is None:
            raise ValueError(f"{message}.")
        hint = did_you_mean(unknown[1], [*parser._option_string_actions, *own_flags], "see pcmepp train --help.")
        raise ValueError(f"there is no flag {unknown[1]}; {hint}")

    with mock.patch.object(ArgumentParser, "error", refuse):  # argparse would print pages of usage
        args = params.parse_args(argv)
    for name in READ:
        if not hasattr(args, name):
            raise seams.HostChanged(seams.lacking(f"flag {flag_of(name)}", "train"))
    size = args.force_image_size
    if isinstance(size, (tuple, list)) and len(size) == 1:  # `main` of open_clip_train does the same later
        args.force_image_size = size[0]
    return args


def explicit_flags(argv: list[str], *names: str) -> set[str]:
    """Return those of the named flags of open_clip that are on the command line, also with the value of a default."""
    parse = ArgumentParser.parse_args

    def without_defaults(parser: ArgumentParser, *args: Any) -> Namespace:
        parser.set_defaults(**dict.fromkeys(names))
        return parse(parser, *args)

    with mock.patch.object(ArgumentParser, "parse_args", without_defaults):
        args = params.parse_args(argv)
    return {name for name in names if getattr(args, name) is not None}


@dataclass(frozen=True)
class RunSettings:
    """The flags that the parts of a run need, once open_clip has set up its ranks and its folder.

    Arguments:
        device: the device of this rank, such as "cuda:1".
        logs, name: the parts of the run folder, LOGS/NAME.
        trains, validates: whether there are data for training and for validation.
        keep_epochs: whether the checkpoint of every epoch is kept, not only the newest.
        keep_latest: whether the newest checkpoint also has the name `epoch_latest.pt`.
        save_frequency: epochs between two checkpoints at the end of one; 0 for none.
        save_every_minutes: time between two checkpoints within an epoch; 0 for none.
        save_retry_minutes: how long saving the last checkpoint is tried again where it fails.
        rank_timeout_minutes: how long a rank or the data may take.
    """

    rank: int
    world_size: int
    distributed: bool
    device: str
    logs: Path
    name: str
    resume: str | None
    trains: bool
    validates: bool
    resampled: bool
    epochs: int
    warmup: int
    batch_size: int
    accum_freq: int
    seed: int
    log_every_n_steps: int
    wandb: bool
    save_frequency: int
    keep_epochs: bool
    keep_latest: bool
    save_every_minutes: float
    save_retry_minutes: float
    rank_timeout_minutes: float

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.logs / self.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def samples_per_batch(self) -> int:
        """Return the samples of a batch on all ranks together; `accum_freq` batches make a step."""
        return self.batch_size * self.world_size


def run_settings(args: Namespace) -> RunSettings:
    """Return the settings of a run whose ranks and name are set."""
    return RunSettings(
        rank=args.rank,
        world_size=args.world_size,
        distributed=args.distributed,
        device=args.device,
        logs=Path(args.logs),
        name=args.name,
        resume=args.resume,
        trains=trains(args),
        validates=validates(args),
        resampled=args.dataset_resampled,
        epochs=args.epochs,
        warmup=args.warmup,
        batch_size=args.batch_size,
        accum_freq=args.accum_freq,
        seed=args.seed,
        log_every_n_steps=args.log_every_n_steps,
        wandb="wandb" in args.report_to or "all" in args.report_to,
        save_frequency=args.save_frequency,
        keep_epochs=not args.delete_previous_checkpoint,
        keep_latest=args.save_most_recent,
        save_every_minutes=args.save_every_minutes,
        save_retry_minutes=args.save_retry_minutes,
        rank_timeout_minutes=args.rank_timeout_minutes,
    )


@dataclass(frozen=True)
class MemoryFlags:
    """The flags that a user can change where the memory of a GPU is not enough."""

    batch_size: int
    accum_freq: int
    precision: str
    grad_checkpointing: bool


def memory_flags(args: Namespace) -> MemoryFlags:
    return MemoryFlags(**{name: getattr(args, name) for name in MemoryFlags.__dataclass_fields__})


@dataclass(frozen=True)
class PlannedRun:
    """The flags that a dry run reports on."""

    model: str
    pretrained: str
    pcmepp_cfg: dict | None
    cache_tokens: str | None
    resume: str | None
    logs: str
    name: str | None
    batch_size: int
    world_size: int
    accum_freq: int
    epochs: int
    warmup: int
    trains: bool
    dataset_type: str
    train_num_samples: int | None
    precision: str
    workers: int
    grad_checkpointing: bool
    samples_per_second_per_gpu: float | None


def planned_run(args: Namespace) -> PlannedRun:
    names = [name for name in PlannedRun.__dataclass_fields__ if name != "trains"]
    return PlannedRun(trains=trains(args), **{name: getattr(args, name) for name in names})


def trains(args: Namespace) -> bool:
    return bool(args.train_data) or args.dataset_type == "synthetic"


def validates(args: Namespace) -> bool:
    return bool(args.val_data or args.imagenet_val or args.imagenet_v2)


def trains_on_cpu(args: Namespace) -> bool:
    """Return whether the run will use the CPU, by --device or because there is no CUDA device."""
    kind = args.device.partition(":")[0]
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available())


def slow_on_cpu(args: Namespace) -> bool:
    """Return whether the run would compute in a precision that is slow on its CPU."""
    return args.precision in SLOW_ON_CPU and trains_on_cpu(args)


def check_numbers(args: Namespace) -> None:
    """Raise ValueError for numbers that are too small, which open_clip does not check."""
    for name, least in AT_LEAST.items():
        if getattr(args, name) < least:
            raise ValueError(f"{flag_of(name)} must be at least {least}, not {getattr(args, name)}.")
    if args.grad_clip_norm is not None and not args.grad_clip_norm > 0:  # a negative norm turns the gradients round
        raise ValueError(f"--grad-clip-norm must be more than 0, not {args.grad_clip_norm:g}: drop it not to clip.")


def check_served(args: Namespace) -> None:
    """Raise ValueError for flags and models that only open_clip's own program serves."""
    flags = [flag_of(name) for name in NOT_SERVED if getattr(args, name, None)]
    # open_clip recognises a CoCa by its name too.
    what = "a CoCa model" if "coca" in args.model.lower() else flags[0] if flags else None
    if what is not None:
        raise ValueError(
            f"pcmepp train does not serve {what}: drop it, or train by open_clip's own program, "
            "`python -m pcmepp_openclip -m open_clip_train.main FLAGS`."
        )


def check_for_pcmepp(args: Namespace) -> None:
    """Raise ValueError for --siglip, and set --eps where open_clip leaves it out for an optimizer of timm's."""
    if args.siglip:
        raise ValueError(f"{args.model} cannot be trained with --siglip: drop it, or choose a plain model.")
    if args.opt.startswith("timm/") and args.eps is None:
        args.eps = 1e-8  # open_clip passes None on, at which some of timm's optimizers fail


def check_for_head_only(args: Namespace) -> None:
    """Raise ValueError for flags that would unfreeze a part of the towers."""
    for flag, on in {"--lock-image": args.lock_image, "--lock-text": args.lock_text}.items():
        if on:
            raise ValueError(f"--head-only freezes both towers: drop {flag}.")


def starts_random(args: Namespace) -> bool:
    """Return whether the run starts with random weights. `args.resume` must be resolved to a checkpoint."""
    return not (args.pretrained or args.pretrained_image or args.resume or ":" in args.model)


def check_for_lora(args: Namespace) -> None:
    """Raise ValueError if --lora is invalid or cannot be combined with the other flags."""
    if args.lora is None:
        return
    if args.lora < 1:
        raise ValueError(f"--lora must be at least 1, not {args.lora}.")
    if args.pcmepp_cfg is None:
        raise ValueError(f"--lora is for PCME++ models, and {args.model} is a plain one: choose a PCMEpp model.")
    for flag, on in {
        "--lock-image": args.lock_image,
        "--lock-text": args.lock_text,
        "--head-only": args.head_only,
    }.items():
        if on:
            raise ValueError(f"--lora cannot be combined with {flag}: drop one of them.")


def check_for_chunked_clip_loss(args: Namespace) -> None:
    """Raise ValueError if --chunked-clip-loss cannot be combined with the model or the other flags."""
    if not args.chunked_clip_loss:
        return
    if args.pcmepp_cfg is not None:
        raise ValueError(f"The loss of {args.model} is computed in chunks in any case: drop --chunked-clip-loss.")
    if args.siglip:
        raise ValueError("--chunked-clip-loss cannot be combined with --siglip: drop one of them.")
    if args.local_loss and not args.gather_with_grad:
        raise ValueError(
            "--chunked-clip-loss has the whole gradient, of which --local-loss alone leaves out a part: add "
            "--gather-with-grad."
        )


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
