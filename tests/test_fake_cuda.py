"""Training, validation and evaluation on fake CUDA tensors: no host waits in the hot path, no mixed devices.

What fake tensors cannot show: numbers, speed, which kernels a card chooses, and NCCL; DDP's reducer takes no fake
tensors either. See docs/gpus.md.
"""

import open_clip
import pytest
import torch
from fake_training import ANSWERS, MODEL, arguments, model_on_meta, train, validate
from host_waits import HostWaits
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.fake_cuda import fake_cuda, to_cuda
from pcmepp_openclip.encode import encode
from pcmepp_openclip.encode.load import LoadedModel

TINY = "PCMEpp-tiny"
# Where a logged step may wait: for the loss and for the diagnostics.
STEP_LOG, SCALER = "monitor.py:step_done", "grad_scaler.py:<genexpr>"
FIRST = {"memory.py:full_length_pass"}  # once in a run, before its first step
LOGGED = {STEP_LOG, "monitor.py:check", "pcmepp.py:read_diagnostics", "grad_scaler.py:get_scale"}
VALIDATED = ["validation.py:_on_cpu"] * 4  # outputs are collected on the CPU, as in open_clip
ENCODED = {"encode.py:_gaussian"}  # of `pcmepp eval`, in every batch


@pytest.fixture(autouse=True)
def on_fake_cuda():
    with fake_cuda():
        yield


def build(name, precision, hook=None):
    """A model on CUDA, with a hook of its first layer."""
    with _disable_current_modes():
        model = model_on_meta(name, precision)
    if hook is not None:
        model.visual.conv1.register_forward_pre_hook(hook)
    return to_cuda(model)


def trained(folder, precision, *flags, model=MODEL, batches=2, hook=None):
    """What waits in each batch, and the model afterwards."""
    args, built = arguments(folder, "--precision", precision, *flags, model=model), build(model, precision, hook)
    return train(args, built, batches), built


@pytest.mark.parametrize(
    "model, precision, flags",
    [
        (MODEL, "amp", []),
        (TINY, "fp32", ["--grad-clip-norm", "1"]),
        (TINY, "bf16", ["--grad-checkpointing"]),
        (TINY, "amp", ["--grad-clip-norm", "1"]),
        (TINY, "pure_bf16", []),
    ],
)
def test_a_step_between_logs_does_not_wait(tmp_path, model, precision, flags):
    (logged, unlogged), model = trained(tmp_path, precision, *flags, model=model)
    scaler = [SCALER] if precision == "amp" else []  # whether the step is skipped, in every step
    assert unlogged == scaler
    assert {STEP_LOG, "monitor.py:check"} <= set(logged) <= LOGGED | FIRST | set(scaler)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.device.type, parameter.grad.dtype) == ("cuda", parameter.dtype), name


def test_accumulation_does_not_wait(tmp_path):
    waits, _ = trained(tmp_path, "amp_bf16", "--accum-freq", "2", model=TINY, batches=4)
    assert [len(each) > 0 for each in waits] == [True, True, False, False]
    assert set(waits[0]) == FIRST
    assert set(waits[1]) <= LOGGED


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


PLANTED = {  # each is given a tensor on CUDA
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "text": lambda x: f"{x.sum():.3f}",
    "tolist": lambda x: x.flatten()[:1].tolist(),
    "cpu": lambda x: x.cpu(),
    "new scalar": lambda x: torch.tensor(1.0, device=x.device),
    "copy": lambda x: x.sum().copy_(torch.ones(())),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.clone().__setitem__(x > 0, x.flatten()),
    "places on the CPU": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
}
ALLOWED = {
    "another cuda": lambda x: x.new_ones(3).to(torch.bfloat16) + torch.zeros(3, device=x.device),
    "scalar on the CPU": lambda x: x * torch.ones(()),
    "scalar": lambda x: torch.where(x > 0, x, 1.0) + torch.full((), 3.0, device=x.device),
    "not blocking": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "read on the CPU": lambda x: torch.ones(4).sum().item(),
}
MIXED = {
    "sum": lambda x: x + torch.ones(x.shape),
    "product": lambda x: x.flatten(1) @ torch.ones(x[0].numel(), 2),
    "stacked scalars": lambda x: torch.stack([x.sum(), torch.ones(())]),
    "moved weights": lambda x: torch.nn.functional.linear(x, torch.ones(5, x.shape[-1])),
}


def test_every_kind_of_wait_is_found_and_nothing_else():
    x = torch.empty(4, 3, 8, 8, device="cuda")
    for functions, expected in ((PLANTED, {"test_fake_cuda.py:<lambda>"}), (ALLOWED, set())):
        for name, function in functions.items():
            with HostWaits() as waits:
                function(x)
            assert set(waits.found) == expected, name
    for function in MIXED.values():
        with HostWaits(), pytest.raises((FakeTensorDeviceMismatchError, RuntimeError), match="device"):
            function(x)


def plant(function):
    """As a hook of the first layer."""
    return lambda _module, inputs: (function(*inputs), None)[1]


def test_a_planted_wait_is_found_in_training(tmp_path):
    (_, unlogged), _ = trained(tmp_path, "fp32", model=TINY, hook=plant(PLANTED["item"]))
    assert unlogged == ["test_fake_cuda.py:<lambda>"]


def test_a_planted_tensor_of_the_cpu_ends_training(tmp_path):
    with pytest.raises(FakeTensorDeviceMismatchError):
        trained(tmp_path, "fp32", model=TINY, hook=plant(MIXED["sum"]))


def test_a_wait_in_the_backward_pass_is_found(tmp_path, monkeypatch):
    loss = open_clip.create_loss

    def planted(args):
        made = loss(args)
        made.register_forward_hook(lambda _m, _in, out: {key: InBackward.apply(value) for key, value in out.items()})
        return made

    monkeypatch.setattr(open_clip, "create_loss", planted)
    (_, unlogged), _ = trained(tmp_path, "fp32", model=TINY)
    assert set(unlogged) == {"test_fake_cuda.py:backward"}


def validated(folder, precision, model, hook=None):
    args = arguments(folder, "--precision", precision, model=model)
    return validate(args, build(model, precision, hook), 3)


def test_validation_waits_where_outputs_are_collected(tmp_path):
    """Its metrics, which need values, are computed once, after the last batch."""
    metrics, (_, second, _) = validated(tmp_path, "amp_bf16", MODEL)
    assert sorted(second) == sorted(VALIDATED)
    assert {"image_to_text_R@1", "csd/RSUM", "images/csd_R@1/miss_AUROC"} <= metrics.keys()


def test_a_planted_wait_is_found_in_validation(tmp_path):
    _, (_, second, _) = validated(tmp_path, "fp32", TINY, hook=plant(PLANTED["item"]))
    assert sorted(second) == sorted([*VALIDATED, "test_fake_cuda.py:<lambda>"])


def encoded(folder, model, precision, hook=None):
    """What waits while `pcmepp eval` encodes a batch of images and one of texts."""
    built = build(model, "fp32", hook)
    encoder = encode.Encoder(LoadedModel("", None, built, None, None, True, "cuda"), folder, precision)
    images, texts = torch.empty(4, 3, *built.visual.image_size), torch.zeros(4, 16, dtype=torch.long)
    with HostWaits(ANSWERS) as waits:
        for batch, kind in ((images, "image"), (texts, "text")):
            mean, logvar = encoder._gaussian(batch, kind)
            assert mean.shape == logvar.shape and mean.dtype == logvar.dtype == torch.float32
    return waits.found


def test_evaluation_waits_for_no_more_than_its_results(tmp_path):
    assert set(encoded(tmp_path, MODEL, "amp_bf16")) <= ENCODED


def test_a_planted_wait_is_found_in_evaluation(tmp_path):
    found = encoded(tmp_path, TINY, "fp32", hook=plant(PLANTED["cpu"]))
    assert set(found) - ENCODED == {"test_fake_cuda.py:<lambda>"}
