"""Calls of open_clip's `train_one_epoch` and `evaluate`, whose signatures are known here, and the seams in them."""

import builtins
import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import open_clip
import torch
from torch import Tensor

from . import seams
from .parallel import is_compiled
from .trainer import get_autocast, train

VALIDATION = ("val", "imagenet-val", "imagenet-v2")  # the keys of validation data in what `get_data` returns

stock_train_one_epoch = train.train_one_epoch


def computing(args: Any) -> dict[str, Any]:
    """How `main` computes with these arguments, once it has set up the device: device, autocast, dtype of images."""
    device = torch.device(args.device)
    autocast = get_autocast(args.precision, device_type=device.type)
    return {"device": device, "autocast": autocast, "dtype": open_clip.get_input_dtype(args.precision)}


class _Call:
    _arguments: dict[str, Any]

    def _argument(self, name: str) -> Any:
        if name not in self._arguments:
            raise seams.HostChanged(seams.lacking(f"argument {name} in its training loop", "train"))
        return self._arguments[name]


def _bound(function: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments of a call, by their names in open_clip's function."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


class EpochCall(_Call):
    """One call of open_clip's `train_one_epoch`."""

    def __init__(self, args: tuple, kwargs: dict):
        self._arguments = _bound(stock_train_one_epoch, args, kwargs)
        self.model: Any = self._argument("model")
        self.data: dict = self._argument("data")
        self.index: int = self._argument("epoch")
        self.optimizer: Any = self._argument("optimizer")
        self.scaler: Any = self._argument("scaler")
        self.tb_writer: Any = self._argument("tb_writer")

    @property
    def computing(self) -> dict[str, Any]:
        return computing(self._argument("args"))

    @property
    def is_compiled(self) -> bool:
        return is_compiled(self.model)

    def run(
        self,
        steps: Callable[[Any], Iterator[tuple[int, Any]]],
        first_batch: int = 0,
        backward: "Backward | None" = None,
    ) -> None:
        """The epoch, by open_clip's loop, which takes (index, batch) from `steps(loader)`: code between the steps.

        Arguments:
            first_batch: the batch at which the loader starts, if it can; 0 for all others.
            backward: code before and after the gradients of every loss, or None.
        """
        entered, taken = False, 0

        def hook(loader: Any) -> Iterator[tuple[int, Any]]:
            nonlocal entered, taken
            entered = True
            for step in steps(loader):
                taken += 1
                yield step

        info = self.data["train"]
        set_epoch = functools.partial(info.set_epoch, first_batch=first_batch) if first_batch else info.set_epoch
        with _enumerated(info.dataloader, hook) as loader, _replaced_backward(backward) as calls:
            data = {**self.data, "train": SimpleNamespace(dataloader=loader, set_epoch=set_epoch)}
            stock_train_one_epoch(**{**self._arguments, "data": data})
        if not entered:
            raise seams.never_entered(seams.STEP)
        if backward is not None and taken >= self._argument("args").accum_freq and not calls:
            raise seams.never_entered(seams.BACKWARD)


class Backward:
    """Code around the computation of gradients, once per pass that has them. This one changes nothing."""

    def scaled(self, loss: Tensor) -> Tensor:
        """What is differentiated in place of the loss."""
        return loss

    def finish(self) -> None:
        """Called when the gradients are there, before they are clipped."""


@contextlib.contextmanager
def _replaced_backward(code: Backward | None) -> Iterator[list]:
    """A list with an entry for each call of open_clip's `backward`, which runs `code` while the context lasts."""
    calls: list[None] = []
    stock = seams.BACKWARD.find()

    @functools.wraps(stock)
    def backward(loss: Tensor, *args: Any) -> None:
        assert code is not None
        calls.append(None)
        stock(code.scaled(loss), *args)
        code.finish()

    with seams.BACKWARD.replaced(backward) if code is not None else contextlib.nullcontext():
        yield calls


class ValidationCall(_Call):
    """One call of open_clip's `evaluate`."""

    def __init__(self, args: tuple, kwargs: dict):
        self._arguments = _bound(train.evaluate, args, kwargs)
        self.model: Any = self._argument("model")
        self.data: dict = self._argument("data")
        self.epoch: int = self._argument("epoch")

    def unrecorded(self) -> "ValidationCall":
        """The same, with metrics that are logged, but neither written to files nor sent to trackers."""
        call = copy.copy(self)
        call._arguments = dict(self._arguments)
        call.write_results(False)
        call._argument("args").wandb = False
        return call

    def write_results(self, write: bool) -> None:
        """Whether the metrics are written to files."""
        self._arguments["args"] = copy.copy(self._argument("args"))
        self._arguments["args"].save_logs = write

    def run(self, evaluate: Callable[..., dict], batches: Callable[[Any], Iterator] | None = None) -> dict:
        """The metrics, by a function with the signature of open_clip's.

        Arguments:
            batches: loader to batches, with code between them.
        """
        if batches is None or "val" not in self.data:
            return evaluate(**self._arguments)
        hook = lambda loader: builtins.enumerate(batches(loader))  # noqa: E731
        with _enumerated(self.data["val"].dataloader, hook) as loader:
            data = {**self.data, "val": SimpleNamespace(dataloader=loader)}
            return evaluate(**{**self._arguments, "data": data})


class _HookedLoader:
    """A loader that only the hooked `enumerate` can iterate over: any other loop over it raises HostChanged."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        raise seams.never_entered(seams.STEP)


@contextlib.contextmanager
def _enumerated(loader: Any, hook: Callable[[Any], Iterator[tuple[int, Any]]]) -> Iterator[_HookedLoader]:
    """A stand-in for `loader`: `enumerate` of it in open_clip's loop returns `hook(loader)`."""
    hooked = _HookedLoader(loader)

    def enumerate_(iterable: Iterable, *args: Any) -> Iterator:
        return hook(loader) if iterable is hooked else builtins.enumerate(iterable, *args)

    with seams.STEP.replaced(enumerate_):
        yield hooked


class _Metrics:
    """Our replacement of `get_clip_metrics`."""

    def __init__(self, compute: Callable):
        self.compute, self.entered = compute, False

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        self.entered = True
        return self.compute(*args, **kwargs)


def metrics_of(compute: Callable) -> contextlib.AbstractContextManager:
    """A context in which `compute(image_features, text_features, logit_scale)` returns the validation metrics."""
    return seams.METRICS.replaced(_Metrics(compute))


def stock_evaluate(model: Any, data: dict, epoch: int, args: Any, **kwargs: Any) -> dict:
    """open_clip's `evaluate`. HostChanged if it does not call the metrics that were put in place."""
    found = train.evaluate(model, data, epoch, args, **kwargs)
    due = args.val_frequency and (epoch % args.val_frequency == 0 or epoch == args.epochs)
    metrics = train.get_clip_metrics
    if isinstance(metrics, _Metrics) and not metrics.entered and args.rank == 0 and "val" in data and due:
        raise seams.never_entered(seams.METRICS)
    return found
