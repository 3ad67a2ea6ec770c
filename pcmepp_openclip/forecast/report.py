"""The forecast as rows of a dry run, and as one sentence for an error that says that a GPU is out of memory.

A rank of a run belongs to a group of ranks already, so that the forecast for an error is made by a new process:

    python -m pcmepp_openclip.forecast.report < ARGUMENTS
"""

import copy
import functools
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..host import flags
from . import machines
from .machines import CARDS, CONTEXT, SIZES, UTILISATION, largest, samples_per_second
from .step import FakeTraining, StepCosts

Rows = Iterator[tuple[str, str]]
TIMEOUT = 25  # seconds; torchrun ends a rank 30 s after the others have failed
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
ENOUGH = 64  # the peak of a smaller batch may be at the update of the weights, and not grow with the batch


def rows(run: Any, model: Any, loss: nn.Module, samples: int, why_not: str = "") -> Rows:
    """Yield (name, text) of each row. A model that cannot be forecast has a row that says so.

    Arguments:
        run: the flags of the run, with `world_size`.
        model: a model on the device "meta", which is changed.
        loss: the loss for all ranks.
        samples: number of samples of the whole run, on all ranks.
        why_not: why no step can be forecast, or "".
    """
    image_size, context_length = flags.image_size(model), model.context_length
    costs = None
    try:
        if why_not:
            raise ValueError(why_not)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = FakeTraining(model, loss, precision=run.precision, ranks=run.world_size)
            costs = training.measure(run.batch_size, run.accum_freq, run.grad_checkpointing)
            memory = list(_memory(run, training, costs))
        yield from memory
    except Exception as error:  # a model may raise any error, and the rest of the dry run matters more
        yield "GPU memory", f"not forecast: {_reason(error)}"
    yield from _host(run, image_size, context_length)
    if costs is not None and run.world_size > 1:
        sent = costs.reduced + run.accum_freq * costs.sent
        calls = run.accum_freq * costs.collectives
        yield (
            "sent per step",
            f"{_size(sent)} by each rank: {_size(costs.reduced)} of gradients, {_size(sent - costs.reduced)} for the "
            f"loss in {calls} collectives",
        )
    yield from _time(run, samples, costs)


def _memory(run: Any, training: FakeTraining, costs: StepCosts) -> Rows:
    """Yield the peak of the run as it is planned and with checkpointing switched over, and the batch sizes that fit."""
    on, peaks = run.grad_checkpointing, {run.grad_checkpointing: costs}

    def peak(checkpointed: bool, batch_size: int) -> int:
        return training.measure(batch_size, run.accum_freq, checkpointed).peak

    peaks[not on] = training.measure(run.batch_size, run.accum_freq, not on)
    yield "GPU memory", f"{_parts(peaks[on])} per rank, with texts of {training.model.context_length} tokens"
    yield f"  {'without' if on else 'with'} --grad-checkpointing", _parts(peaks[not on])
    yield "  a card adds", f"about {_size(CONTEXT)} for CUDA and its libraries, and 5 to 10 % fragments (assumed)"
    fits = []
    for checkpointed in (False, True):
        first = max(run.batch_size, ENOUGH)
        low = peaks[checkpointed].peak if first == run.batch_size else peak(checkpointed, first)
        known = (first, low), (2 * first, peak(checkpointed, 2 * first))
        least, sizes = costs.at_update, [size * 1e9 for size in SIZES]
        fits.append(largest(functools.partial(peak, checkpointed), known, least, sizes))
    each = [f"{size} GB: {_count(n)} ({_count(more)})" for size, n, more in zip(SIZES, *fits, strict=True)]
    yield "  largest --batch-size", f"{', '.join(each)}, in brackets with --grad-checkpointing"


def _host(run: Any, image_size: tuple[int, int], context_length: int) -> Rows:
    node = machines.node(run.world_size, run.workers, run.batch_size, image_size, context_length)
    free = [_free(machines.free_shared_memory()), _free(machines.free_memory())]
    yield (
        "machine",
        f"of {node.ranks} rank{'s' * (node.ranks > 1)} with {run.workers} workers each: {_size(node.shared)} in "
        f"/dev/shm and about {_size(node.memory)} of memory; this one has {free[0]} and {free[1]} free",
    )
    soft, hard = machines.file_limits()
    files = machines.open_files(run.world_size, run.workers)
    short = "; raise it: ulimit -n" if files > hard else ""
    allowed, most = ("any number" if limit == sys.maxsize else f"{limit:,}" for limit in (soft, hard))
    yield "open files", f"about {files:,} in each rank; this machine allows {allowed}, at most {most}{short}"


def _time(run: Any, samples: int, costs: StepCosts | None) -> Rows:
    again = costs.forward_flops if costs is not None and run.accum_freq > 1 else 0
    if costs is not None and again:
        yield (
            "accumulation",
            f"--accum-freq {run.accum_freq} computes the features of every batch twice, as open_clip does: "
            f"{100 * again / costs.flops:.0f} % more compute than the same global batch without it",
        )
    if (speed := run.samples_per_second_per_gpu) is not None:
        yield "time", f"{_hours(run, samples, speed)} at {speed:,.0f} samples/s per GPU"
        return
    if costs is None:
        return
    flops = (costs.flops + again) / run.batch_size
    yield (
        "time",
        f"at {100 * UTILISATION:.0f} % of a card's peak (assumed; give --samples-per-second-per-gpu for a measured "
        f"speed) and {flops / 1e9:,.0f} GFLOPs per sample:",
    )
    for card in CARDS:
        speed = samples_per_second(card, flops, run.precision)
        if speed is None:
            yield f"  {card.name}", f"has no bfloat16: give another --precision than {run.precision}"
        else:
            yield f"  {card.name}", f"{speed:,.0f} samples/s per GPU, {_hours(run, samples, speed)}"


def _hours(run: Any, samples: int, speed: float) -> str:
    gpu_hours = samples / speed / 3600
    return f"{_number(gpu_hours / run.world_size)} hours, {_number(gpu_hours)} GPU-hours"


def _parts(memory: StepCosts) -> str:
    names = {
        "activations": memory.activations,
        "optimizer": memory.optimizer,
        "weights": memory.weights,
        "gradients": memory.gradients,
        "DDP buckets": memory.buckets,
    }
    return f"{_size(memory.peak)} ({', '.join(f'{name} {_size(size)}' for name, size in names.items() if size)})"


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _count(batch_size: int) -> str:
    return f"{batch_size:,}" if batch_size else "none"


def _free(size: int | None) -> str:
    return "an unknown amount" if size is None else _size(size)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _reason(error: Exception) -> str:
    words = str(error).strip().splitlines() or [type(error).__name__]
    return f"{words[0][:200].rstrip('.')}."


def forecast_line(args: Any) -> str | None:
    """Return the sentence of the forecast for the arguments of a run, or None where there is no forecast.

    Arguments:
        args: the arguments of `pcmepp train`, with `world_size`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pcmepp_openclip.forecast.report"],
            input=pickle.dumps(vars(args)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired, pickle.PicklingError, TypeError, AttributeError):
        return None
    return done.stdout.decode().strip() or None if done.returncode == 0 else None


def sentence(args: Any) -> str:
    """Return the sentence of the forecast, in a process that is no rank. Raise any error where there is no forecast."""
    if reason := flags.not_forecast(args):
        raise ValueError(reason)
    args = copy.copy(args)
    args.rank = 0
    model = flags.model_without_weights(args)
    if args.lora:
        model.add_lora(args.lora)
    training = FakeTraining(model, flags.planned_loss(args), precision=args.precision, ranks=args.world_size)
    here, saved = (training.measure(args.batch_size, args.accum_freq, on) for on in (args.grad_checkpointing, True))
    text = (
        f"By forecast a rank needs {here.peak / 1e9:.1f} GB at --batch-size {args.batch_size}, of which "
        f"{here.activations / 1e9:.1f} GB grow with it, and a card {CONTEXT / 1e9:.1f} GB and 5 to 10 % more"
    )
    return f"{text}." if args.grad_checkpointing else f"{text}; with --grad-checkpointing {saved.peak / 1e9:.1f} GB."


if __name__ == "__main__":
    from argparse import Namespace

    print(sentence(Namespace(**pickle.load(sys.stdin.buffer))))
