"""The pass at the full text length before the first step, and what a run says when a GPU's memory is not enough."""

import json
from types import SimpleNamespace

import open_clip
import pytest
import torch
import torch.distributed as dist
from drawn_shards import write_shards
from helpers import make_model, mini_config
from torch import nn

import pcmepp_openclip as pp
from pcmepp_openclip import cli
from pcmepp_openclip.host.parallel import DDP
from pcmepp_openclip.models.batches import CachedTokens, LabelledImages
from pcmepp_openclip.training import loop, memory
from pcmepp_openclip.training.memory import at_full_length, full_length_pass, is_wanted, out_of_memory_message

CPU = torch.device("cpu")
COMPUTING = {"device": CPU, "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "dtype": None}


class Noisy(nn.Module):
    """A batch norm and a dropout in front of an image tower's first layer: statistics and random numbers to disturb."""

    def __init__(self, first):
        super().__init__()
        self.norm, self.drop, self.first = nn.BatchNorm2d(3), nn.Dropout(0.5), first

    @property
    def weight(self):
        return self.first.weight

    def forward(self, x):
        return self.first(self.drop(self.norm(x)))


@pytest.fixture
def mini():
    model = make_model("PCMEpp-tiny", **mini_config())
    model.visual.conv1 = Noisy(model.visual.conv1)
    text = torch.randint(1, 60, (3, 4))
    text[:, 2:] = torch.tensor([63, 0])
    return model.train(), (torch.randn(3, 3, 8, 8), text)


def take(model, batch, optimizer=None, loss=None, accum_freq=1):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    full_length_pass(model, loss or pp.PCMEppLoss(), optimizer, batch, accum_freq=accum_freq, **COMPUTING)


@pytest.mark.parametrize("accum_freq", [1, 3])
def test_the_pass_computes_a_step_of_full_length_and_leaves_nothing_behind(mini, accum_freq):
    model, batch = mini
    model.set_grad_checkpointing()
    optimizer, texts, rows, backward = torch.optim.AdamW(model.parameters()), [], [], []
    loss = pp.PCMEppLoss()
    loss.register_forward_pre_hook(lambda _m, _args, given: rows.append(len(given["image_logvar"])), with_kwargs=True)
    model.register_forward_pre_hook(lambda _model, given: texts.append(given[1]))
    model.text_projection.register_hook(lambda grad: backward.append(grad))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    take(model, batch, optimizer, loss, accum_freq)
    assert torch.equal(torch.rand(3), expected)
    assert [x.shape for x in texts] == [(3, 8)] * (1 if accum_freq == 1 else 2)
    assert torch.equal(texts[0][:, :4], batch[1]) and not texts[0][:, 4:].any()
    assert rows == [3 * accum_freq] and len(backward) == 1 and torch.isfinite(backward[0]).all()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and not optimizer.state


def test_the_pass_takes_every_kind_of_batch(mini):
    model, (images, texts) = mini
    ids = torch.arange(3)
    soft = pp.PCMEppLoss(contrastive_weight=0)
    take(model, (LabelledImages(images, ids, ids.roll(1), torch.full((3,), 0.3)), texts), loss=soft, accum_freq=2)
    model.freeze_towers()
    cached = CachedTokens(torch.randn(3, 8), torch.randn(3, 4, 16).half(), texts)
    whole = at_full_length(cached, 8, 7)
    assert whole.x_NLC.shape == (3, 8, 16) and not whole.x_NLC[:, 4:].any()
    assert torch.equal(whole.text_NL[:, :4], texts) and (whole.text_NL[:, 4:] == 7).all()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    take(model, (CachedTokens(torch.randn(3, 8), torch.randn(3, 5, 16)), cached), torch.optim.AdamW(trained))


OPTIMIZERS = {  # the tensors of its size that each keeps for a parameter
    "adamw": (torch.optim.AdamW, {}, 2),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}, 3),
    "sgd": (torch.optim.SGD, {}, 0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_memory_of_later_steps_is_allowed_for(name):
    kind, options, states = OPTIMIZERS[name]
    weights = [nn.Parameter(torch.ones(5, 7)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    optimizer = kind([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1, **options)

    def held(accum_freq):
        found = memory._memory_of_later_steps(optimizer, accum_freq)
        return sum(x.numel() * x.element_size() for x in found)

    size = 5 * 7 * 4 + 3 * 2
    assert held(1) == states * size and held(4) == (states + 1) * size
    assert not optimizer.state and len(optimizer.param_groups) == 2 and (weights[0] == 1).all()
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert held(1) == 0 and held(4) == size


def test_the_pass_does_not_fire_the_hooks_of_ddp(mini, tmp_path):
    model, batch = mini
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped, reduced = DDP(model), []

        def count(_state, bucket):
            reduced.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, count)
        loss, gradients = pp.PCMEppLoss(), []
        for passes in (0, 2):
            for _ in range(passes):
                take(model, batch)
            assert not reduced
            torch.manual_seed(5)
            sum(loss(**wrapped(*batch), output_dict=True).values()).backward()
            assert sum(reduced) == sum(parameter.numel() for parameter in model.parameters())
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            reduced.clear()
            model.zero_grad()
        assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))
    finally:
        dist.destroy_process_group()


def test_only_a_gpu_and_texts_that_may_be_cut_need_the_pass(mini):
    model, (_, texts) = mini
    plain = open_clip.CLIP(**{key: x for key, x in mini_config().items() if key != "pcmepp_cfg"})
    cached = CachedTokens(torch.randn(3, 8), torch.randn(3, 4, 16), texts)
    cuda = torch.device("cuda:1")
    assert is_wanted(model, texts, cuda) and is_wanted(model, cached, cuda)
    assert not is_wanted(model, texts, CPU) and not is_wanted(model, cached, CPU)
    assert not is_wanted(plain, texts, cuda)
    uncut = make_model(
        "PCMEpp-tiny", **{**mini_config(), "text_cfg": {**mini_config()["text_cfg"], "pool_type": "last"}}
    )
    assert not is_wanted(uncut, texts, cuda) and is_wanted(uncut, cached, cuda)


# Runs, with the CPU taken for a GPU.


@pytest.fixture
def start(tmp_path):
    text = {"context_length": 32, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    (tmp_path / "PCMEpp-mini.json").write_text(json.dumps({**mini_config(), "text_cfg": text}))
    open_clip.add_model_config(tmp_path / "PCMEpp-mini.json")
    data = write_shards(tmp_path / "shards", 1, 24)

    def start(*flags, name="run"):
        argv = ["--model", "PCMEpp-mini", "--train-data", data, "--train-num-samples", "24", "--dataset-type"]
        argv += ["webdataset", "--batch-size", "4", "--epochs", "2", "--workers", "0", "--precision", "fp32"]
        return cli.main(["train", *argv, "--warmup", "1", "--logs", str(tmp_path), "--name", name, *flags])

    start.folder = tmp_path
    return start


@pytest.mark.parametrize("flags", [[], ["--accum-freq", "2"]], ids=["", "accum"])
def test_a_run_with_the_pass_is_the_same_to_the_bit_and_takes_it_once(start, monkeypatch, flags):
    assert start(*flags, name="without") == 0
    lengths = []

    def noted(model, loss, optimizer, batch, **how):
        assert type(loss) is pp.PCMEppLoss  # and not the one that watches for values that are not finite
        lengths.append(batch[1].shape[1])
        full_length_pass(model, loss, optimizer, batch, **how)

    monkeypatch.setattr(loop, "is_wanted", lambda *_: True)
    monkeypatch.setattr(loop, "full_length_pass", noted)
    assert start(*flags, name="with") == 0
    assert len(lengths) == 1 and lengths[0] < 32
    saved = [
        torch.load(start.folder / name / "checkpoints/epoch_2.pt", weights_only=True) for name in ("without", "with")
    ]
    for key in ("state_dict", "optimizer", "training"):
        assert str(saved[0][key]) == str(saved[1][key])
    assert all(torch.equal(x, saved[1]["state_dict"][name]) for name, x in saved[0]["state_dict"].items())


TORCHS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.06 GiB is "
    "free. Process 7 has 38.32 GiB memory in use."
)


def test_out_of_memory_ends_a_run_with_one_sentence(start, monkeypatch, capfd):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError(TORCHS)

    monkeypatch.setattr(loop, "is_wanted", lambda *_: True)
    monkeypatch.setattr(loop, "full_length_pass", full)
    assert start() == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == (
        "pcmepp train: The memory of the GPU of 39.39 GiB is not enough: 2.50 GiB more did not fit. Lower --batch-size "
        "(4) and raise --accum-freq (1) by the same factor, add --grad-checkpointing, or use --precision amp_bf16."
    )


def run_of(batch_size, accum_freq, precision, grad_checkpointing):
    return SimpleNamespace(**locals())


def test_out_of_memory_names_the_flags_that_are_left():
    for text, flags, forecast, expected in (
        (
            TORCHS,
            run_of(64, 2, "amp", True),
            "It takes 41 GB.",
            "fit. It takes 41 GB. Lower --batch-size (64) and",
        ),
        (TORCHS, run_of(64, 2, "amp", True), None, "raise --accum-freq (2) by the same factor."),
        (TORCHS, run_of(64, 2, "amp", False), None, "factor, or add --grad-checkpointing."),
        ("HIP out of memory", run_of(64, 2, "fp32", True), None, "The memory of the GPU is not enough. Lower"),
    ):
        sentence = out_of_memory_message(torch.OutOfMemoryError(text), flags, forecast)
        assert expected in sentence and "\n" not in sentence
