"""`pcmepp train`: training by open_clip's flags, with PCME++'s loss, diagnostics and validation.

    pcmepp train --model PCMEpp-ViT-B-16 --train-data 'cc3m/{00000..00331}.tar' --train-num-samples 2905954 ...
    torchrun --nproc-per-node 8 -m -- pcmepp_openclip.train --model PCMEpp-ViT-B-16 ...

The flags of open_clip_train.main work; the additional ones are listed first. A plain model (--model ViT-B-32) trains
as it does in open_clip, to the bit. A run that takes seconds on a CPU:

    pcmepp train --model PCMEpp-tiny --dataset-type synthetic --train-num-samples 64 --epochs 1 --precision fp32
"""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch

from .. import data
from ..data import validation
from ..host import disable_prompts, flags, training
from ..runs import record
from ..system import files, network
from ..system.flags import FIXED, PUBLISHED, Mistakes
from ..system.processes import end_children
from ..system.redact import redact_args
from . import global_batch, push, validation_data
from .config import RunConfig, parse, recorded
from .coordination import EXIT_STOPPED, Stopped
from .dry_run import dry_run
from .failures import FailureWatch, OtherRankFailed
from .loop import Training
from .memory import OutOfMemory, out_of_memory_message


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        config, spec = prepare(sys.argv[1:] if argv is None else argv)
    except ValueError as error:  # every rank meets the same mistake, so one of them reports it
        if training.world_info_from_env()[1] == 0:
            print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2
    try:
        return 0 if config.dry_run else run(config, spec)
    except ValueError as error:  # other ranks may not have this mistake
        print(f"pcmepp train: {data.printable(str(error))}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        from ..forecast.report import forecast_line

        raise OutOfMemory(out_of_memory_message(error, config, forecast_line(config))) from None


def prepare(argv: list[str]) -> tuple[RunConfig, data.DataSpec]:
    """Return all flags and the training data. A ValueError lists the mistakes that show without building the model."""
    disable_prompts()
    config = parse(argv, __doc__ or "")
    places, mistakes = redact_args(config), Mistakes()
    if config.rank == 0:
        if not config.dry_run and flags.slow_on_cpu(config):
            print(
                f"pcmepp train: On a CPU --precision {config.precision} computes in half precision, which can take "
                "minutes per step: add --precision fp32.",
                file=sys.stderr,
            )
        with mistakes.noted():
            check_run_folder(config)
        with mistakes.noted():
            validation_data.check(config, places.get("val_data"))
        with mistakes.noted():
            validation.check_classes(config.imagenet_val)
        with mistakes.noted():
            push.target_of(config)
        if config.cache_tokens and not config.dry_run:
            with mistakes.noted():
                files.check_folder(Path(config.cache_tokens), "--cache-tokens")
    with mistakes.noted():
        per_step = config.global_batch_size or 1
        spec = data.resolve(config, places, ranks=config.world_size, samples_per_step=per_step, check=config.rank == 0)
        if config.cache_tokens:
            data.check_counted(spec, "--cache-tokens")
    mistakes.raise_all()
    if config.rank == 0 and not config.dry_run:
        push.check_access(push.target_of(config))
    if config.dry_run:
        dry_run(config, spec)
    return config, spec


def check_run_folder(config: RunConfig) -> None:
    """Raise ValueError if there are no data, or no checkpoint to resume from, or the run folder is taken."""
    if not config.trains and not config.validates:
        raise ValueError("There is nothing to train on: give --train-data, or --val-data to evaluate only.")
    if config.resume and config.resume != "latest" and "://" not in config.resume and not Path(config.resume).is_file():
        raise ValueError(f"--resume {config.resume}: there is no such file; --resume latest picks the newest.")
    if config.name and config.resume != "latest" and (config.folder / "out.log").exists():
        raise ValueError(
            f"{config.folder} contains an earlier run: give another --name, or --resume latest to continue it."
        )
    if config.keeps_files and not config.dry_run:
        files.check_folder(Path(config.logs), "--logs")


def run(config: RunConfig, spec: data.DataSpec) -> int:
    """Train on this rank, and return the exit code."""
    leads = config.rank == 0
    description = record.RunDescription(
        hyperparameters=record.hyperparameters(vars(config), recorded(PUBLISHED, FIXED)),
        model_config=flags.model_config(config) if leads and config.trains else {},
        sources=record.sources_of(config, spec) if leads else [],
    )
    local_rank = training.world_info_from_env()[0]
    if config.world_size > 1:
        network.choose_interface(urlsplit(config.dist_url or "").hostname)
        warning = network.raise_open_files(config.world_size)
        if warning and local_rank == 0:
            print(f"pcmepp train: {warning}", file=sys.stderr)
    loop: Training | None = None
    pusher: push.Pusher | None = None

    def before_exit() -> None:
        if loop is not None:
            loop.writer.wait()
            loop.release()

    def finish_push(seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        if pusher is not None:
            pusher.finish(seconds, hurry)

    watch = FailureWatch(config.rank, config.world_size, leads_node=local_rank == 0, before_exit=before_exit)
    children_before = multiprocessing.active_children()
    try:
        try:
            with watch, network.explained():
                try:
                    target = push.target_of(config) if leads else None
                    training.set_up(config)
                    watch.start()
                    if leads and config.global_batch_size:
                        logging.info("Global batch: %s.", global_batch.words_with_cost(config))
                    pusher = push.Pusher(target, config.folder, config.hub_license, config.hub_tag)
                    loop = Training(config, spec, description, pusher)
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
            loop.writer.wait()
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
