"""The loss that a run watches: its device, its collectives, and what follows where it is not finite."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import pcmepp_openclip as pp
from pcmepp_openclip.training import monitor
from pcmepp_openclip.training.monitor import Monitor, NonFiniteLoss


@pytest.fixture
def two_ranks():
    """A group in which this process is the first of two ranks; what it receives is not to be looked at."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def reduced(monkeypatch):
    """The tensors that are handed to all-reduces."""
    seen, stock = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda x, *args, **kwargs: (seen.append(x), stock(x, *args, **kwargs))[1])
    return seen


class Terms(nn.Module):
    """A loss whose terms are given."""

    def forward(self, **terms):
        return terms


def settings(folder, device="cpu", distributed=False):
    about = {"rank": 0, "wandb": False, "samples_per_step": 4, "warmup": 0}
    return SimpleNamespace(checkpoints=folder, distributed=distributed, device=device, **about)


def test_a_check_before_the_first_loss_is_on_the_devices_group(tmp_path, monkeypatch):
    """As of a resume that saves before it trains. NCCL takes no tensors of a CPU; "meta" stands for the GPU."""
    seen = []

    monkeypatch.setattr(monitor, "all_reduce", lambda x, _how: (seen.append(x.device.type), x)[1])
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [math.inf] * self.numel())  # meta has no values
    Monitor(nn.Identity(), settings(tmp_path, "meta", distributed=True), None).check()
    assert seen == ["meta"]


def outputs(samples=6):
    torch.manual_seed(0)
    features = [nn.functional.normalize(torch.randn(samples, 8), dim=1) for _ in range(2)]
    logvars = [torch.randn(samples, 8) - 3 for _ in range(2)]
    out = dict(zip(("image_features", "text_features", "image_logvar", "text_logvar"), features + logvars, strict=True))
    out |= {name: torch.full((samples,), x) for name, x in (("clip_scale", 10.0), ("match_scale", 4.0))}
    out |= {"match_shift": torch.ones(samples), "logit_scale": torch.tensor(10.0)}
    return {name: x.requires_grad_() for name, x in out.items()}


def test_ranks_exchange_the_value_of_the_loss_in_logged_steps_alone(two_ranks, reduced, tmp_path):
    watched = Monitor(pp.PCMEppLoss(0, 2), settings(tmp_path, distributed=True), None)
    sizes, gradients = {}, {}
    for logged in (False, True):
        watched.before_step(0, 0, logged)
        watched.loss.diagnose = False
        reduced.clear()
        out = outputs()
        total = sum(watched(**out, output_dict=True).values())
        sizes[logged] = [x.numel() for x in reduced]
        gradients[logged] = torch.autograd.grad(total, list(out.values()), allow_unused=True)
    assert sizes[False] == [12, 12]  # the maxima and the sums of the softmax over the columns
    assert sizes[True] == [12, 12, 4]  # and the terms
    for quiet, logged in zip(gradients[False], gradients[True], strict=True):
        assert (quiet is None and logged is None) or torch.equal(quiet, logged)


def test_ranks_agree_on_a_term_that_only_one_of_them_saw(tmp_path, monkeypatch):
    """Two ranks as threads: in a step that is not logged, each sees its own share of the loss alone."""
    barrier, sent, said = threading.Barrier(2, timeout=20), {}, {}

    def all_reduce(x, how):
        sent[threading.current_thread().name] = x.clone()
        barrier.wait()
        both = torch.stack([sent["0"], sent["1"]])
        barrier.wait()
        return x.copy_(both.amax(dim=0) if how == "max" else both.sum(dim=0))

    def rank(name, values):
        watched = Monitor(Terms(), settings(tmp_path, distributed=True), None)
        for step, (match, vib) in enumerate(values):
            watched.before_step(step, 0, logged=False)
            watched(match_loss=torch.tensor(match), vib_loss=torch.tensor(vib))
        with pytest.raises(NonFiniteLoss) as found:
            watched.check()
        said[name] = str(found.value)

    monkeypatch.setattr(monitor, "all_reduce", all_reduce)
    values = {"0": [(1.0, 0.5), (2.0, 0.5), (3.0, math.inf)], "1": [(1.0, 0.5), (math.nan, 0.5), (4.0, 0.5)]}
    threads = [threading.Thread(target=rank, args=item, name=item[0]) for item in values.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said["0"] == said["1"] and said["0"].startswith("The loss was not finite at step 1 (match_loss nan). ")


class Scaled:
    """A parameter that is trained with scaled gradients, and the watched loss."""

    def __init__(self, folder):
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.watched = Monitor(Terms(), settings(folder), None, self.scaler)
        self.steps = 0

    def step(self, loss=lambda weight: weight):
        self.watched.before_step(self.steps, 0, logged=False)
        self.optimizer.zero_grad()
        self.scaler.scale(self.watched(loss=loss(self.weight).sum())["loss"]).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_fp16_skips_a_step_whose_loss_is_not_finite_and_goes_on(tmp_path, caplog, bad):
    run = Scaled(tmp_path)
    run.step()
    run.watched.check()
    assert run.weight.item() == pytest.approx(0.9) and not caplog.messages
    run.step(lambda weight: weight * bad)
    assert run.weight.item() == pytest.approx(0.9)
    run.step()
    run.watched.check()
    run.watched.check()
    assert caplog.messages == [f"The loss was not finite at step 1 (loss {bad:g}): the step was skipped."]
    assert run.weight.item() == pytest.approx(0.8)


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda weight: weight * math.nan, "The loss was not finite at step 16 (loss nan)"),
        (lambda weight: (weight - weight.detach()).sqrt(), "Gradients were not finite up to step 16"),  # a loss of 0
    ],
)
def test_fp16_ends_when_its_loss_scale_has_fallen_below_one(tmp_path, loss, said):
    run = Scaled(tmp_path)
    for _ in range(16):  # 65,536 is 2^16
        run.step(loss)
        run.watched.check()
    assert run.scaler.get_scale() == 1
    run.step(loss)
    with pytest.raises(NonFiniteLoss, match=r"loss scale of --precision amp fell to 0\.5.*amp_bf16") as found:
        run.watched.check()
    assert str(found.value).startswith(said) and run.weight.item() == 1


def test_without_a_scaler_one_loss_that_is_not_finite_ends_the_run(tmp_path):
    watched = Monitor(Terms(), settings(tmp_path), None)
    for step, value in enumerate((1.0, math.nan, 2.0)):
        watched.before_step(step, 0, logged=False)
        watched(loss=torch.tensor(value))
    with pytest.raises(NonFiniteLoss, match=r"^The loss was not finite at step 1 \(loss nan\)\. "):
        watched.check()
