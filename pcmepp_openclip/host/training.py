"""The parts of a training run, built by open_clip's own functions as in its `main`.

Each function takes all flags (`args`), and only functions of this folder read those of open_clip.
"""

import copy
import importlib
import logging
import math
import os
import random
from argparse import Namespace
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import open_clip
import torch
from torch import nn

from . import flags
from .data import bounded
from .loss import create_chunked_clip_loss
from .parallel import DDP, innermost
from .trainer import SCHEDULES, data, distributed, logger, optim, precision, zero_shot

TRACKERS = ("wandb", "tensorboard")
SIZES = {"train_sz": "train", "val_sz": "val"}  # the names of the numbers of samples in the record of W&B
OF_MODEL = (  # flags that are arguments of `create_model_and_transforms`
    *("force_quick_gelu", "force_custom_text", "force_patch_dropout", "force_image_size", "force_context_length"),
    *("image_mean", "image_std", "image_interpolation", "image_resize_mode", "aug_cfg", "pretrained_image"),
    "cache_dir",
)
NOT_DECAYED = ("bn", "ln", "bias", "logit_scale")  # open_clip looks for these in the names of parameters too

stock_get_data, world_info_from_env = data.get_data, distributed.world_info_from_env


def computing(args: Namespace) -> dict[str, Any]:
    """Return the device, autocast context and dtype of images of a run whose device is set."""
    device = torch.device(args.device)
    autocast = precision.get_autocast(args.precision, device_type=device.type)
    return {"device": device, "autocast": autocast, "dtype": open_clip.get_input_dtype(args.precision)}


def set_up(args: Namespace) -> None:
    """Set up the ranks, the run folder and the log, and note them in `args`, under open_clip's names."""
    from ..system.files import warn_once_of_a_full_disk
    from ..system.redact import redact_logs

    if torch.cuda.is_available():  # open_clip sets the same values
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.deterministic = False
    distributed.init_distributed_device(args)
    if args.name is None:
        started = datetime.now().strftime("%Y_%m_%d-%H_%M_%S")
        started = distributed.broadcast_object(args, started) if args.distributed else started
        model = args.model.replace("/", "-")
        args.name = f"{started}-model_{model}-lr_{args.lr}-b_{args.batch_size}-j_{args.workers}-p_{args.precision}"
    folder = Path(args.logs) / args.name
    args.wandb, args.tensorboard = (name in args.report_to or "all" in args.report_to for name in TRACKERS)
    args.checkpoint_path, args.log_path, args.tensorboard_path = str(folder / "checkpoints"), None, ""
    leads = args.rank == 0
    if leads or (args.log_local and args.local_rank == 0):
        folder.mkdir(parents=True, exist_ok=True)
        args.log_path = str(folder / (f"out-{args.rank}" if args.log_local else "out.log"))
    if leads:
        (folder / "checkpoints").mkdir(exist_ok=True)
        if args.tensorboard:
            args.tensorboard_path = str(folder / "tensorboard")
    args.log_level = logging.DEBUG if args.debug else logging.INFO
    logger.setup_logging(args.log_path, args.log_level)
    redact_logs()
    warn_once_of_a_full_disk()
    _quiet_compiler()
    if args.precision == "fp16":
        logging.warning("--precision fp16 is less tried in training than --precision amp.")
    logging.info("Rank %d of %d on %s.", args.rank, args.world_size, args.device)


def _quiet_compiler() -> None:
    """Keep torch's compiler from logging at the level of the run, up to the exit of the process."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch._", "torch.fx")):
            logging.getLogger(name).setLevel(logging.WARNING)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def build_model(args: Namespace, device: torch.device) -> tuple[Any, Any, Any]:
    """Return the model and its transforms of images for training and for validation."""
    _seed(args.seed)  # all ranks start with the same weights
    extra: dict[str, Any] = {} if args.pcmepp_cfg is None else {"pcmepp_cfg": args.pcmepp_cfg}
    if args.siglip:
        extra |= {"init_logit_scale": math.log(10), "init_logit_bias": -10}
    model, for_training, for_validation = open_clip.create_model_and_transforms(
        args.model,
        args.pretrained,
        precision=args.precision,
        device=device,
        **{name: getattr(args, name) for name in OF_MODEL},
        output_dict=True,
        **extra,
    )
    if args.head_only:
        model.freeze_towers()
        _log_frozen(args, model, "Head only: both towers are frozen", "Head only")
    if args.lora:
        model.add_lora(args.lora)
        _log_frozen(args, model, f"LoRA of rank {args.lora}: the weights of both towers are frozen", "LoRA")
    _seed(args.seed + args.rank)
    if args.lock_image:
        model.lock_image_tower(args.lock_image_unlocked_groups, args.lock_image_freeze_bn_stats)
    if args.lock_text:
        model.lock_text_tower(args.lock_text_unlocked_layers, args.lock_text_freeze_layer_norm)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    args.variable_text = getattr(getattr(model, "text", None), "variable_text", False)  # open_clip 4's data ask for it
    return model, for_training, bounded(for_validation)


def _log_frozen(args: Namespace, model: nn.Module, what: str, flag: str) -> None:
    if args.rank != 0:
        return
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logging.info("%s, %d parameters are trained.", what, trained)
    if flags.starts_random(args):
        logging.warning(
            "%s: the frozen towers have random weights, which are never trained: give --pretrained, or --resume a run.",
            flag,
        )


def log_model(args: Namespace, model: nn.Module) -> None:
    """Log the model and all flags, and write the flags to params.txt."""
    if args.rank != 0:
        return
    logging.info("Model:\n%s", model)
    lines = [f"{name}: {value}" for name, value in sorted(vars(args).items())]
    logging.info("Params:")
    for line in lines:
        logging.info("  %s", line)
    (Path(args.logs) / args.name / "params.txt").write_text("".join(f"{line}\n" for line in lines))


def distribute(model: nn.Module, args: Namespace, device: torch.device) -> nn.Module:
    """Return the model, in DDP if there are several ranks. A PCME++ model reduces its gradients once per step, a
    plain one in each pass, as in open_clip."""
    if not args.distributed:
        return model
    if args.use_bn_sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    more = {"static_graph": True} if args.ddp_static_graph else {}
    return DDP(model, device_ids=[device], passes=args.accum_freq if args.pcmepp_cfg is not None else 1, **more)


def compiled(model: nn.Module, args: Namespace) -> Any:
    """Return the model, compiled if --torchcompile is set."""
    if not args.torchcompile:
        return model
    logging.info("Compiling the model at its first step.")
    if args.grad_checkpointing and args.distributed:
        torch._dynamo.config.optimize_ddp = False  # that optimization does not support recomputed activations
    _quiet_compiler()
    return torch.compile(model)


def build_optimizer(args: Namespace, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return the optimizer that --opt names and the scaler of fp16 gradients, which is None without --precision amp.

    Gains, biases and scales have no weight decay; open_clip 4 also excludes the parameters that a tower names.
    """
    optimizer: torch.optim.Optimizer
    if optim is not None:
        flags_of_4 = ("opt", "lr", "beta1", "beta2", "eps", "momentum")
        cfg = optim.OptimizerCfg(weight_decay=args.wd, **{name: getattr(args, name) for name in flags_of_4})
        optimizer = optim.create_optimizer(model, cfg)
    elif args.opt.lower().startswith("timm/"):
        from timm.optim import create_optimizer_v2

        more: dict[str, Any] = {} if args.beta1 is None else {"betas": (args.beta1, args.beta2)}
        if args.momentum is not None:
            more["momentum"] = args.momentum
        name = args.opt.lower().split("timm/")[-1]
        optimizer = create_optimizer_v2(model, name, lr=args.lr, weight_decay=args.wd, eps=args.eps, **more)
    else:
        trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
        decays = [x.ndim >= 2 and not any(word in name for word in NOT_DECAYED) for name, x in trained]
        groups = [
            {
                "params": [x for (_, x), decay in zip(trained, decays, strict=True) if decay == wanted],
                "weight_decay": wd,
            }
            for wanted, wd in ((False, 0.0), (True, args.wd))
        ]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)
    if args.rank == 0:
        defaults = {**copy.deepcopy(optimizer.defaults), "weight_decay": args.wd}
        text = ", ".join(f"{key}: {value}" for key, value in defaults.items())
        logging.info("Created %s (%s) optimizer: %s", type(optimizer).__name__, args.opt, text)
    return optimizer, torch.amp.GradScaler(device=args.device) if args.precision == "amp" else None


def build_schedule(args: Namespace, optimizer: Any, steps_per_epoch: int) -> Callable[[int], float]:
    """Return open_clip's function of the step that sets the learning rate."""
    more: tuple = ()
    if args.lr_scheduler == "const-cooldown":
        more = (steps_per_epoch * args.epochs_cooldown, args.lr_cooldown_power, args.lr_cooldown_end)
    return SCHEDULES[args.lr_scheduler](optimizer, args.lr, args.warmup, steps_per_epoch * args.epochs, *more)


def build_tokenizer(args: Namespace) -> Any:
    return open_clip.get_tokenizer(args.model, cache_dir=args.cache_dir, context_length=args.force_context_length)


def build_loss(args: Namespace) -> nn.Module:
    """Return the loss of the model by open_clip's `create_loss`, or the loss of --chunked-clip-loss."""
    args.distill = False
    return create_chunked_clip_loss(args) if args.chunked_clip_loss else open_clip.create_loss(args)


def open_trackers(args: Namespace, data: dict, saves: bool) -> Any:
    """Start TensorBoard and W&B where --report-to names them; return TensorBoard's writer or None."""
    writer = None
    if saves and args.tensorboard:
        tensorboard = _tracker("torch.utils.tensorboard", "tensorboard")
        writer = tensorboard.SummaryWriter(args.tensorboard_path)
    if args.wandb and args.rank == 0:
        wandb = _tracker("wandb", "wandb")
        sizes = {key: data[name].dataloader.num_samples for key, name in SIZES.items() if name in data}
        vars(args).update(sizes)
        os.environ.setdefault("WANDB_RESUME", "allow")
        project, notes = args.wandb_project_name, args.wandb_notes
        wandb.init(project=project, name=args.name, id=args.name, notes=notes, tags=[], config=vars(args))
        wandb.save(str(Path(args.logs) / args.name / "params.txt"))
    return writer


def _tracker(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"--report-to {package}: run pip install {package}, or drop the flag.") from None


def close_trackers(args: Namespace) -> None:
    if args.wandb and args.rank == 0:
        _tracker("wandb", "wandb").finish()


@torch.no_grad()
def clamp_logit_scale(model: Any) -> None:
    """Keep the scale of the logits at most 100, as open_clip does after each step."""
    model.logit_scale.clamp_(0, math.log(100))


def zero_shot_metrics(model: Any, data: dict, epochs: int, args: Namespace, tokenizer: Any) -> dict[str, float]:
    """Return open_clip's zero-shot metrics on --imagenet-val and --imagenet-v2; none in epochs without evaluation."""
    alone = Namespace(**{**vars(args), "distributed": False})  # `innermost` takes the model out of DDP
    return zero_shot.zero_shot_eval(innermost(model), data, epochs, alone, tokenizer=tokenizer)
