"""`pcmepp train`: open_clip's own training loop with PCME++'s loss, diagnostics and validation.

    pcmepp train --model PCMEpp-ViT-B-16 --train-data 'cc3m/{00000..00331}.tar' --train-num-samples 2905954 ...
    torchrun --nproc-per-node 8 -m -- pcmepp_openclip.train --model PCMEpp-ViT-B-16 ...

Takes every flag of open_clip_train.main and those listed first here. A plain model (--model ViT-B-32) trains as it
does in open_clip. A run for a CPU, in seconds:

    pcmepp train --model PCMEpp-tiny --dataset-type synthetic --train-num-samples 64 --epochs 1 --precision fp32
"""

import argparse
import difflib
import functools
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import open_clip

from .. import data, host
from ..config import PCMEppCfg
from ..host import training
from ..host.data import bounded
from ..runs import record
from ..system import files
from ..system.redact import redact_args
from . import push
from .coordination import EXIT_STOPPED, Stopped, end_children
from .dry_run import dry_run
from .hooks import TrainingHooks
from .validation import evaluate

OVERRIDES = {  # flag: (key of pcmepp_cfg, help)
    "--contrastive-weight": ("contrastive_weight", "weight of InfoNCE, CLIP's own loss"),
    "--match-weight": ("match_weight", "weight of the matching loss"),
    "--vib-weight": ("vib_weight", "weight of the VIB, the paper's beta"),
    "--pp-weight": ("pp_weight", "weight of the pseudo-positives, the paper's alpha"),
    "--match-reduction": ("reduction", "of the matching loss: 'mean' over all pairs, or 'sum' / batch size"),
    "--init-match-scale": ("init_match_scale", "start of a in the matching logit -a d + b"),
    "--init-match-shift": ("init_match_shift", "start of b in the matching logit -a d + b"),
    "--init-logvar-bias": ("init_logvar_bias", "start of the bias on the log-variances"),
}
SLOW_ON_CPU = ("amp", "fp16", "pure_fp16")  # "amp" is open_clip's default; bfloat16 is fast on many CPUs


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    own = own_parser()
    if "-h" in argv or "--help" in argv:
        own.print_help()
        print("\nand all of open_clip's:\n")
        training.stock_parse_args(["--help"])
    known, rest = own.parse_known_args(argv)
    try:
        args, spec = prepare(known, rest)
    except ValueError as error:  # the same on every rank, so one of them says it
        if training.world_info_from_env()[1] == 0:
            print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2
    try:
        return 0 if args.dry_run else run(args, spec, rest)
    except ValueError as error:  # of this rank
        print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2


def own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pcmepp train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("PCME++ (defaults: the model config's pcmepp_cfg)")
    for flag, (key, text) in OVERRIDES.items():
        group.add_argument(flag, dest=key, type=str if key == "reduction" else float, help=text, metavar="X")
    parser.add_argument(
        "--dry-run",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="RANKS",
        help="check all, train nothing, say what would be",
    )
    data.add_arguments(parser)
    push.add_arguments(parser)
    group = parser.add_argument_group("survival")
    group.add_argument(
        "--save-every-minutes", type=float, default=30, help="checkpoints within an epoch; 0 for none", metavar="X"
    )
    group.add_argument(
        "--rank-timeout-minutes",
        type=float,
        default=10,
        help="a rank that does not answer, or data that do not come, for so long end the run",
        metavar="X",
    )
    group.add_argument(
        "--save-retry-minutes",
        type=float,
        default=2,
        help="the last checkpoint is tried again for so long where it cannot be saved",
        metavar="X",
    )
    return parser


def prepare(own: argparse.Namespace, rest: list[str]) -> tuple[argparse.Namespace, data.DataSpec]:
    """All arguments, open_clip's and ours, and the training data; every mistake that shows before a model is built."""
    host.never_ask()
    args = training.stock_parse_args(rest)
    vars(args).update(vars(own))
    check_numbers(args)
    args.pcmepp_cfg = merged_cfg(args)
    data_flags = data.DataFlags.from_args(args, redact_args(args))
    _, args.rank, args.world_size = training.world_info_from_env()
    args.world_size = args.dry_run or args.world_size
    if args.rank == 0:
        if args.precision in SLOW_ON_CPU and not args.dry_run and training.trains_on_cpu(args):
            print(
                f"pcmepp train: On a CPU --precision {args.precision} computes in half precision, which can take "
                "minutes per step: add --precision fp32.",
                file=sys.stderr,
            )
        check_places(args)
        if not args.dry_run and args.logs.lower() != "none":
            files.check_folder(Path(args.logs), "--logs")
    spec = data.resolve(data_flags, ranks=args.world_size, check=args.rank == 0)
    if args.rank == 0:
        push.check_hub_flags(args)
    if args.dry_run:
        dry_run(args, spec)
    return args, spec


def run(args: argparse.Namespace, spec: data.DataSpec, rest: list[str]) -> int:
    """Stock `main` on these arguments, with ours in the place of some functions that it calls."""
    probabilistic = args.pcmepp_cfg is not None
    args.keep_most_recent, args.save_most_recent = args.save_most_recent, False  # `TrainingHooks` saves, not `main`
    os.environ.setdefault("WANDB_RESUME", "allow")  # main means to, but compares after it has overwritten --resume
    sources = record.sources_of(args, spec) if args.rank == 0 else []
    pushing = push.Pusher(args)
    evaluation = evaluate if probabilistic else training.stock_evaluate
    loop = TrainingHooks(args, evaluation, keep_rng=probabilistic, sources=sources, pusher=pushing)

    def create_model_and_transforms(*positional: Any, **kwargs: Any) -> Any:
        if probabilistic and positional[0] == args.model:
            kwargs["pcmepp_cfg"] = args.pcmepp_cfg
        model, for_training, for_validation = open_clip.create_model_and_transforms(*positional, **kwargs)
        return model, for_training, bounded(for_validation)

    training.DDP.passes = args.accum_freq if probabilistic else 1
    others = multiprocessing.active_children()
    try:
        try:
            code = training.run_main(
                rest,
                parse_args=lambda _rest: args,
                setup_logging=functools.partial(loop.setup_logging, training.stock_setup_logging),
                get_latest_checkpoint=loop.get_latest_checkpoint,
                create_model_and_transforms=create_model_and_transforms,
                pt_load=loop.pt_load,
                get_data=functools.partial(
                    loop.get_data, functools.partial(data.get_data, training.stock_get_data, spec)
                ),
                create_loss=lambda args: loop.monitor.watch(open_clip.create_loss(args)),
                train_one_epoch=loop.train_one_epoch,
                evaluate=loop.evaluate,
            )
            if code == 0 and loop.complete:
                loop.finish()
        finally:
            loop.leave()
            end_children(others)
    except Stopped as stopped:
        logging.info("%s", stopped)
        pushing.finish(push.ON_STOP)
        return EXIT_STOPPED
    except BaseException:
        loop.saver.wait()
        pushing.finish(push.ON_STOP)
        raise
    finally:
        loop.release()
    pushing.finish(push.AT_END, hurry=lambda: loop.stop_asked)
    return code


def check_numbers(args: argparse.Namespace) -> None:
    """ValueError for flags of open_clip's and ours that it takes as they come."""
    for flag, least in (("batch_size", 1), ("accum_freq", 1), ("epochs", 1), ("workers", 0), ("log_every_n_steps", 1)):
        if getattr(args, flag) < least:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} must be at least {least}, not {getattr(args, flag)}.")
    for flag, zero in (("rank_timeout_minutes", False), ("save_every_minutes", True), ("save_retry_minutes", True)):
        if not (getattr(args, flag) > 0 or (zero and getattr(args, flag) == 0)):
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} must be {'at least' if zero else 'more than'} 0, not {getattr(args, flag):g}.")


def check_places(args: argparse.Namespace) -> None:
    """ValueError if there is nothing to read, or what is to be resumed is not there."""
    trains = args.train_data or args.dataset_type == "synthetic"
    if not trains and not (args.val_data or args.imagenet_val or args.imagenet_v2):
        raise ValueError("There is nothing to train on: give --train-data, or --val-data to evaluate only.")
    if args.resume and args.resume != "latest" and "://" not in args.resume and not Path(args.resume).is_file():
        raise ValueError(f"--resume {args.resume}: there is no such file; --resume latest takes the newest.")
    run = Path(args.logs) / (args.name or "")
    if args.name and not args.dry_run and (run / "out.log").exists() and args.resume != "latest":
        raise ValueError(f"{run} holds an earlier run: give another --name, or --resume latest to go on with it.")


def merged_cfg(args: argparse.Namespace) -> dict | None:
    """The model config's `pcmepp_cfg` with the flags' values in it, or None for a plain model."""
    config = open_clip.get_model_config(args.model)
    if config is None and ":" not in args.model:
        close = difflib.get_close_matches(args.model, open_clip.list_models(), n=3)
        meant = f"meant {' or '.join(close)}?" if close else "`open_clip.list_models()` lists those there are."
        raise ValueError(f"--model {args.model}: there is no such model; {meant}")
    block = (config or {}).get("pcmepp_cfg")
    given = {key: value for key, _ in OVERRIDES.values() if (value := getattr(args, key)) is not None}
    flags = [flag for flag, (key, _) in OVERRIDES.items() if key in given]
    if block is None:
        if flags:
            raise ValueError(f"{args.model} is a plain model: drop {', '.join(flags)} or choose a PCMEpp model.")
        return None
    for flag, on in [
        ("--siglip", args.siglip),
        ("--distill-model", args.distill_model is not None),
        ("--horovod", args.horovod),
        ("--force-custom-text", args.force_custom_text),
    ]:
        if on:
            raise ValueError(f"{args.model} cannot be trained with {flag}: drop it, or choose a plain model.")
    if args.opt.startswith("timm/") and args.eps is None:
        args.eps = 1e-8  # open_clip passes None on, which some of timm's optimizers stumble over
    merged = {**block, **given}
    PCMEppCfg.parse(merged)
    return merged
