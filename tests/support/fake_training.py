"""Training and validation on fake CUDA tensors, by the loop of `pcmepp train`."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import open_clip
import torch
from host_waits import HostWaits

from pcmepp_openclip.runs import rng
from pcmepp_openclip.runs.record import RunDescription
from pcmepp_openclip.training import command
from pcmepp_openclip.training.loop import Training
from pcmepp_openclip.training.push import Pusher

MODEL = "PCMEpp-ViT-B-16"
BATCH = 4
ANSWERS = {
    "check": (math.inf, False),  # of the first step at which the loss was not finite
    "_encoded_pairs": (1.0, True),  # of the scales of the logits
    "columns": (1.0, True),
}


def arguments(folder: Path, *flags: str, model: str = MODEL) -> Any:
    """Those of `pcmepp train` with `flags`, as open_clip's `main` completes them on a GPU."""
    given = ["--model", model, "--dataset-type", "synthetic", "--train-num-samples", "4000", "--logs", str(folder)]
    given += ["--name", "run", "--batch-size", str(BATCH), "--epochs", "2", "--save-frequency", "0", *flags]
    args, _ = command.prepare(given)
    args.device, args.distributed, args.distill, args.wandb = "cuda", False, False, False
    args.val_frequency = 1
    args.checkpoint_path = str(folder / "run" / "checkpoints")
    Path(args.checkpoint_path).mkdir(parents=True)
    return args


def model_on_meta(name: str, precision: str) -> Any:
    """The model as `main` creates it, without numbers: give it to `to_cuda`."""
    with torch.device("meta"):
        return open_clip.create_model(name, precision=precision, device="meta", output_dict=True)


class Batches:
    """A loader of batches on the CPU, which tells `waits` when a batch is taken.

    Its `num_batches` are those of a long epoch, whose first step is logged, and the next ones are not."""

    num_batches, num_samples = 1000, 4000

    def __init__(self, batches: int, model: Any, waits: "StepWaits"):
        self.batches, self.waits = batches, waits
        self.image_size, self.context_length = model.visual.image_size, model.context_length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.batches):
            self.waits.batches.append([])
            yield torch.empty(BATCH, 3, *self.image_size), torch.zeros(BATCH, self.context_length, dtype=torch.long)


class StepWaits(HostWaits):
    """The waits of each batch, from when it is there until the next one is wanted."""

    def __init__(self, answers: dict[str, tuple[float, bool]]):
        super().__init__(answers)
        self.batches: list[list[str]] = []

    @property
    def found(self) -> list[str]:
        return self.batches[-1] if self.batches else []

    @found.setter
    def found(self, _empty: list[str]) -> None: ...


@contextlib.contextmanager
def training_of(args: Any, model: Any, **data: Any) -> Iterator[Training]:
    """A run that is built, but for what it is given."""
    description = RunDescription(hyperparameters={}, model_config={}, sources=[])
    run = Training(args, None, description, Pusher(None, Path(args.logs) / args.name))
    run.saves = False  # a history of numbers that there are none of
    run.model = run.inner = model
    run.data = {name: SimpleNamespace(dataloader=x, set_epoch=lambda epoch: None) for name, x in data.items()}
    run.tb_writer = run.tokenizer = run.augment = None
    try:
        yield run
    finally:
        run.leave()
        run.release()


def train(args: Any, model: Any, batches: int) -> list[list[str]]:
    """So many batches within `fake_cuda`: what waits in each of them."""
    # Without random states, which are of real numbers.
    with mock.patch.object(rng, "state", lambda device: {}), mock.patch.object(rng, "restore", lambda *_: None):
        return _train(args, model, batches)


def _train(args: Any, model: Any, batches: int) -> list[list[str]]:
    waits = StepWaits(ANSWERS)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.set_grad_checkpointing(args.grad_checkpointing)
    with training_of(args, model, train=Batches(batches, model, waits)) as run, waits:
        run.optimizer = torch.optim.AdamW(weights, lr=1e-3, foreach=True)  # torch's choice for CUDA
        run.scaler = torch.amp.GradScaler("cuda") if args.precision == "amp" else None
        run.recipe.set_up_optimizer(run.optimizer, model)
        run.steps_per_epoch, run.schedule = 1000, lambda step: 1e-3
        run._watch(open_clip.create_loss(args))
        run._train_epoch(0)
    return waits.batches


def validate(args: Any, model: Any, batches: int) -> tuple[dict, list[list[str]]]:
    """Validation on so many batches: the metrics, and what waits."""
    waits = StepWaits(ANSWERS)
    with training_of(args, model, val=Batches(batches, model, waits)) as run, waits:
        metrics, _ = run.validator.validate(model, run.data, 1, args, None, None, recorded=False)
    return metrics, waits.batches
