"""`pcmepp train`: training by open_clip's flags, with PCME++'s loss, diagnostics and validation.

    pcmepp train --model PCMEpp-ViT-B-16 --train-data 'cc3m/{00000..00331}.tar' --train-num-samples 2905954 ...
    torchrun --nproc-per-node 8 -m -- pcmepp_openclip.train --model PCMEpp-ViT-B-16 ...

The flags of open_clip_train.main work; the additional ones are listed first. A plain model (--model ViT-B-32) trains
as it does in open_clip, to the bit. A run that takes seconds on a CPU:

    pcmepp train --model PCMEpp-tiny --dataset-type synthetic --train-num-samples 64 --epochs 1 --precision fp32
"""

import argparse
import logging
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch

from .. import data
from ..config import PCMEppCfg
from ..host import disable_prompts, flags, training
from ..losses.terms import loss_weights
from ..runs import record
from ..system import files, network
from ..system.processes import end_children
from ..system.redact import redact_args
from ..system.text import flag_of
from . import augment, finetuning, global_batch, model_flags, objective, push, validation_data
from .coordination import EXIT_STOPPED, Stopped
from .dry_run import dry_run
from .failures import FailureWatch, OtherRankFailed
from .loop import Training
from .memory import OutOfMemory, out_of_memory_message

MAX_MINUTES = 365 * 24 * 60


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    own = own_parser()
    if "-h" in argv or "--help" in argv:
        own.print_help()
        print("\nAll flags of open_clip:\n")
        flags.parse_args(["--help"])
    known, rest = own.parse_known_args(argv)
    try:
        args, spec = prepare(known, rest)
    except ValueError as error:  # every rank meets the same mistake, so one of them reports it
        if training.world_info_from_env()[1] == 0:
            print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2
    try:
        return 0 if args.dry_run else run(args, spec)
    except ValueError as error:  # other ranks may not have this mistake
        print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        from ..forecast.report import forecast_line

        raise OutOfMemory(out_of_memory_message(error, flags.memory_flags(args), forecast_line(args))) from None


def own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pcmepp train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    model_flags.add_arguments(parser)
    parser.add_argument(
        "--dry-run",
        type=int,
        nargs="?",
        const=1,
        metavar="RANKS",
        help="check the flags and the data and print what a run on RANKS ranks would do and need, without training",
    )
    parser.add_argument(
        "--samples-per-second-per-gpu",
        type=float,
        metavar="X",
        help="with --dry-run: the speed of one GPU, as a short run logs it; otherwise it is estimated for some cards",
    )
    parser.add_argument(
        "--chunked-clip-loss",
        action="store_true",
        help="train a plain model with CLIP's loss in chunks, whose memory does not grow with the square of the batch",
    )
    group = parser.add_argument_group("frozen towers")
    group.add_argument(
        "--head-only",
        action="store_true",
        help="freeze both towers, and train the log-variance branch and a and b of the matching logit only",
    )
    group.add_argument(
        "--cache-tokens",
        metavar="DIR",
        help="with --head-only: compute the output of the frozen towers once, without augmentations, keep it in DIR, "
        "and train on that",
    )
    group.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="freeze the weights of both towers, and train changes of this rank to them (LoRA) in addition to the "
        "log-variance branch",
    )
    objective.add_arguments(group)
    global_batch.add_arguments(parser)
    finetuning.add_arguments(parser)
    data.add_arguments(parser)
    augment.add_arguments(parser)
    push.add_arguments(parser)
    group = parser.add_argument_group("checkpoints and time-outs")
    group.add_argument(
        "--save-every-minutes",
        type=float,
        default=30,
        help="minutes between checkpoints within an epoch (default: 30; 0: none)",
        metavar="X",
    )
    group.add_argument(
        "--rank-timeout-minutes",
        type=float,
        default=10,
        help="end the run if a rank or the data do not respond for this long (default: 10)",
        metavar="X",
    )
    group.add_argument(
        "--save-retry-minutes",
        type=float,
        default=2,
        help="how long to retry saving the last checkpoint if that fails (default: 2)",
        metavar="X",
    )
    return parser


def prepare(own: argparse.Namespace, rest: list[str]) -> tuple[argparse.Namespace, data.DataSpec]:
    """Return all arguments, open_clip's and ours, and the training data.

    Raises ValueError for mistakes that can be seen without building the model.
    """
    disable_prompts()
    args = flags.parse_args(rest, own_flags=[flag_of(name) for name in vars(own)])
    vars(args).update(vars(own))
    flags.check_served(args)
    flags.check_numbers(args)
    check_minutes(own)
    check_dry_run(own)
    _, args.rank, args.world_size = training.world_info_from_env()
    args.world_size = args.dry_run or args.world_size
    # The batch size is settled here, before anything reads it.
    rows = data.DataFlags.from_args(args).rows
    global_batch.resolve(args, flags.explicit_flags(rest, "batch_size", "accum_freq"), multiple_of=rows)
    objective.apply(args)
    args.pcmepp_cfg = model_flags.merged_cfg(args)
    flags.check_for_lora(args)
    flags.check_for_chunked_clip_loss(args)
    finetuning.check(args)
    data_flags = data.DataFlags.from_args(args, redact_args(args))
    check_head_only(args, data_flags)
    augment.check_arguments(args)
    if args.rank == 0:
        if not args.dry_run and flags.slow_on_cpu(args):
            print(
                f"pcmepp train: On a CPU --precision {args.precision} computes in half precision, which can take "
                "minutes per step: add --precision fp32.",
                file=sys.stderr,
            )
        check_places(args)
        validation_data.check(data.ValidationFlags.from_args(args, data_flags.val_data))
        if not args.dry_run and args.logs.lower() != "none":
            files.check_folder(Path(args.logs), "--logs")
        if not args.dry_run and args.cache_tokens:
            files.check_folder(Path(args.cache_tokens), "--cache-tokens")
    per_step = args.global_batch_size or 1
    spec = data.resolve(data_flags, ranks=args.world_size, samples_per_step=per_step, check=args.rank == 0)
    if args.cache_tokens:
        data.check_counted(spec, "--cache-tokens")
    if args.rank == 0:
        target = push.target_of(own, args.logs)
        if not args.dry_run:
            push.check_access(target)
    if args.dry_run:
        dry_run(args, spec)
    return args, spec


def run(args: argparse.Namespace, spec: data.DataSpec) -> int:
    """Train on this rank, and return the exit code."""
    leads = args.rank == 0
    description = record.RunDescription(
        hyperparameters=record.hyperparameters(vars(args)),
        model_config=flags.model_config(args) if leads and flags.trains(args) else {},
        sources=record.sources_of(args, spec) if leads else [],
    )
    local_rank = training.world_info_from_env()[0]
    if args.world_size > 1:
        network.choose_interface(urlsplit(args.dist_url or "").hostname)
        warning = network.raise_open_files(args.world_size)
        if warning and local_rank == 0:
            print(f"pcmepp train: {warning}", file=sys.stderr)
    loop: Training | None = None
    pusher: push.Pusher | None = None

    def before_exit() -> None:
        if loop is not None:
            loop.writer.saver.wait()
            loop.release()

    def finish_push(seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        if pusher is not None:
            pusher.finish(seconds, hurry)

    watch = FailureWatch(args.rank, args.world_size, leads_node=local_rank == 0, before_exit=before_exit)
    children_before = multiprocessing.active_children()
    try:
        try:
            with watch, network.explained():
                try:
                    target = push.target_of(args, args.logs) if leads else None
                    training.set_up(args)
                    watch.start()
                    if leads and args.global_batch_size:
                        now = global_batch.GlobalBatch.of(flags.run_settings(args))
                        logging.info("Global batch: %s.", now.with_cost)
                    pusher = push.Pusher(target, Path(args.logs) / args.name, args.hub_license, args.hub_tag)
                    loop = Training(args, spec, description, pusher)
                    loop.run()
                finally:  # the ranks leave before the watch ends, since it needs the rank that holds the store
                    if loop is not None:
                        loop.leave()
        finally:
            end_children(children_before)
    except Stopped as stopped:
        logging.info("%s", stopped)
        finish_push(push.STOP_TIMEOUT_S)
        return EXIT_STOPPED
    except BaseException as error:
        if loop is not None:
            loop.writer.saver.wait()
        finish_push(push.STOP_TIMEOUT_S)
        if isinstance(error, OtherRankFailed):
            watch.say(error.failure)
            return error.failure.code
        raise
    finally:
        if loop is not None:
            loop.release()
    finish_push(push.END_TIMEOUT_S, hurry=lambda: loop is not None and loop.coordinator.first_signal is not None)
    return 0


def check_dry_run(own: argparse.Namespace) -> None:
    """Raise ValueError for a number of ranks or a speed that a dry run cannot use."""
    if own.dry_run is not None and own.dry_run < 1:
        raise ValueError(f"--dry-run must be at least 1, not {own.dry_run}: drop it to train.")
    speed = own.samples_per_second_per_gpu
    if speed is not None and not own.dry_run:
        raise ValueError("--samples-per-second-per-gpu is for the forecast of --dry-run: add that, or drop it.")
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--samples-per-second-per-gpu must be more than 0, not {speed:g}.")


def check_minutes(own: argparse.Namespace) -> None:
    """Raise ValueError for a negative number of minutes, or for 0 where that means nothing."""
    for name, zero in (("rank_timeout_minutes", False), ("save_every_minutes", True), ("save_retry_minutes", True)):
        minutes = getattr(own, name)
        if not (minutes > 0 or (zero and minutes == 0)):
            raise ValueError(f"{flag_of(name)} must be {'at least' if zero else 'more than'} 0, not {minutes:g}.")
        if minutes > MAX_MINUTES:  # the clocks of the collectives and of the data overflow somewhere beyond
            raise ValueError(f"{flag_of(name)} must be at most {MAX_MINUTES}, a year, not {minutes:g}.")


def check_head_only(args: argparse.Namespace, data_flags: data.DataFlags) -> None:
    """Raise ValueError if --head-only or --cache-tokens cannot be used with the other flags."""
    if args.cache_tokens is not None and not args.head_only:
        raise ValueError("--cache-tokens needs --head-only: only frozen towers give the same tokens in every epoch.")
    if not args.head_only:
        return
    if args.pcmepp_cfg is None:
        raise ValueError(f"--head-only trains a log-variance branch, which {args.model} lacks: choose a PCMEpp model.")
    flags.check_for_head_only(args)
    if PCMEppCfg.parse(args.pcmepp_cfg).pool == "gpo":
        raise ValueError(
            f"--head-only keeps the means, whose pooling by GPO {args.model} has to train: drop --head-only."
        )
    weights = loss_weights(PCMEppCfg.parse(args.pcmepp_cfg).weights)
    if not any(weight for name, weight in weights.items() if name not in ("contrastive", "triplet")):
        raise ValueError(
            "--head-only has nothing to train: InfoNCE and the triplet loss depend on the means only; raise "
            "--match-weight."
        )
    if args.cache_tokens is None:
        return
    if not data_flags.reads_shards:
        raise ValueError("--cache-tokens needs shards: give them by --train-data and --dataset-type webdataset.")
    if data_flags.dataset_resampled:
        raise ValueError("--cache-tokens holds every sample once: drop --dataset-resampled.")


def check_places(args: argparse.Namespace) -> None:
    """Raise ValueError if there are no data, or no checkpoint to resume from, or the run folder is taken."""
    if not flags.trains(args) and not flags.validates(args):
        raise ValueError("There is nothing to train on: give --train-data, or --val-data to evaluate only.")
    if args.resume and args.resume != "latest" and "://" not in args.resume and not Path(args.resume).is_file():
        raise ValueError(f"--resume {args.resume}: there is no such file; --resume latest picks the newest.")
    run = Path(args.logs) / (args.name or "")
    if args.name and not args.dry_run and (run / "out.log").exists() and args.resume != "latest":
        raise ValueError(f"{run} contains an earlier run: give another --name, or --resume latest to continue it.")
