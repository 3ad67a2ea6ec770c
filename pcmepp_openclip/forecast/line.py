"""The forecast of a run in one sentence, for an error that says that a GPU is out of memory.

A rank of a run belongs to a group of ranks already, so that the forecast is made by a new process:

    python -m pcmepp_openclip.forecast.line < ARGUMENTS
"""

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

TIMEOUT = 25  # seconds; torchrun ends a rank 30 s after the others have failed
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


def forecast_line(args: Any) -> str | None:
    """The sentence for the arguments of a run, or None where nothing can be forecast.

    Arguments:
        args: those of `pcmepp train`, with `world_size`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
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
    """The same in a process that is no rank; any error where nothing can be forecast."""
    from ..host import flags
    from .cards import CONTEXT
    from .memory import FakeTraining

    if reason := flags.not_forecast(args):
        raise ValueError(reason)
    args = copy.copy(args)
    args.rank = 0
    model = flags.model_without_weights(args)
    if args.lora:
        model.add_lora(args.lora)
    training = FakeTraining(model, flags.planned_loss(args), precision=args.precision, ranks=args.world_size)
    here, saved = (
        training.measure(args.batch_size, args.accum_freq, on).memory for on in (args.grad_checkpointing, True)
    )
    text = (
        f"By forecast a rank needs {here.peak / 1e9:.1f} GB at --batch-size {args.batch_size}, of which "
        f"{here.activations / 1e9:.1f} GB grow with it, and a card {CONTEXT / 1e9:.1f} GB and 5 to 10 % more"
    )
    return f"{text}." if args.grad_checkpointing else f"{text}; with --grad-checkpointing {saved.peak / 1e9:.1f} GB."


if __name__ == "__main__":
    from argparse import Namespace

    print(sentence(Namespace(**pickle.load(sys.stdin.buffer))))
