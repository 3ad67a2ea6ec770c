"""The parts of a fine-tuning recipe against slow, obvious computations; whole runs are in test_finetuning_runs.py."""

import json
import logging
import math
import re

import open_clip
import pytest
import torch
from kinds import KINDS, kind_model
from timm.optim import create_optimizer_v2
from torch import nn

from pcmepp_openclip.host.parallel import load_optimizer
from pcmepp_openclip.host.trainer import SCHEDULES
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train
from pcmepp_openclip.training.config import RunConfig, make_parser, parse
from pcmepp_openclip.training.param_groups import check_blocks, places, set_groups, table
from pcmepp_openclip.training.recipe import Recipe
from pcmepp_openclip.training.schedule import scheduled
from pcmepp_openclip.training.weights import BestCheckpoint, WeightAverage, rsum


def settings(*flags, epochs=5):
    """Our flags, with what the recipe reads besides."""
    return make_parser().read(flags, RunConfig(rank=0, epochs=epochs, pcmepp_cfg=None))


FLAGS = settings("--layer-decay", "0.5", "--image-lr-multiplier", "0.01", "--text-lr-multiplier", "0.1")
HEADS = {  # the names, in open_clip's models, of what has the full learning rate
    *("visual.proj", "text_projection", "text.text_projection", "text.text_projection.weight"),
    *("text.text_projection.bias", "logit_scale", "logit_bias", "shift", "negative_scale"),
}


def slow_factor(name: str, blocks: dict[str, int]) -> float:
    """The factor of the learning rate by the name of a parameter alone.

    Arguments:
        blocks: number of blocks of the image and the text tower.
    """
    tower = "image" if name.startswith("visual.") else "text"
    if name in HEADS or re.search(r"uncertainty_(head|proj|bias|text)|attnpool|visual\.head|text\.proj\.", name):
        return 1.0
    multiplier = {"image": 0.01, "text": 0.1}[tower]
    block = re.search(r"(resblocks|trunk\.blocks|encoder\.layer)\.(\d+)\.", name)
    if block is None:
        return multiplier
    count = 1 if "uncertainty_transformer" in name else blocks[tower]
    return multiplier * 0.5 ** (count - int(block[2]))


BLOCKS = {name: {"image": 3, "text": 3} for name in KINDS}
BLOCKS |= {"timm tokens": {"image": 6, "text": 3}, "hugging face": {"image": 3, "text": 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tower_has_its_learning_rates(known_kinds, kind):
    model = kind_model(kind)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.3}], lr=2.0, betas=(0.8, 0.9)
    )
    set_groups(optimizer, model, FLAGS)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    assert optimizer.param_groups[0]["name"] == "heads"  # whose rate is logged
    for name, parameter in model.named_parameters():
        group = groups[id(parameter)]
        assert group["lr_scale"] == pytest.approx(slow_factor(name, BLOCKS[kind]), rel=1e-12), name
        assert group["lr"] == 2.0 * group["lr_scale"]
        assert group["weight_decay"] == (0.3 if parameter.ndim > 1 else 0.0) and group["betas"] == (0.8, 0.9)
    rows = table(model, FLAGS, lr=2.0)
    assert rows[0][0] == "heads" and sum(count for *_, count in rows) == sum(p.numel() for p in model.parameters())
    assert {lr for _, lr, _ in rows} == {group["lr"] for group in optimizer.param_groups}
    without = {"resnet": "image", "timm map": "image"}.get(kind)
    lines = list(check_blocks(model, FLAGS))
    assert [f"--{without}-lr-multiplier applies" in line for line in lines] == ([True] if without else [])
    plain = open_clip.create_model(kind, pretrained_text=False)
    assert places(plain) == {name: place for name, place in places(model).items() if name in places(plain)}


def test_a_large_model_has_24_blocks_in_its_image_tower():
    with torch.device("meta"):
        model = open_clip.create_model("PCMEpp-ViT-L-14", device="meta")
    found = places(model)
    assert found["visual.transformer.resblocks.0.ln_1.weight"].depth == 24
    assert found["visual.transformer.resblocks.23.ln_1.weight"].depth == 1
    assert found["transformer.resblocks.0.ln_1.weight"].depth == 12


def test_layer_decay_without_any_blocks_is_refused(known_kinds, monkeypatch):
    model = kind_model("resnet")
    monkeypatch.setattr(type(model.text_branch.tower), "blocks", ())
    with pytest.raises(ValueError, match=r"--layer-decay needs a tower .* use --image-lr-multiplier"):
        list(check_blocks(model, FLAGS))
    assert list(check_blocks(model, settings("--image-lr-multiplier", "0.1"))) == []


# The optimizer.


def slow_adamp(weight, gradients, lr, wd, wd_ratio, delta=0.1, beta1=0.9, beta2=0.999, eps=1e-8):
    """AdamP (Heo et al. 2021) in double precision, row by row: where no row of the gradient, or else not all of it,
    points along the weight, the part of the step along the weight is left out and less is decayed."""
    w = weight.double().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        ratio = 1.0
        if w.ndim > 1:
            for parts in (list(range(len(w))), [slice(None)]):
                views = [(w[i].flatten(), g[i].flatten(), i) for i in parts]
                cosines = [abs(a @ b) / (a.norm() * b.norm()) for a, b, _ in views]
                if max(cosines) < delta / math.sqrt(views[0][0].numel()):
                    for a, _, i in views:
                        unit = (a / a.norm()).view_as(w[i])
                        step[i] = step[i] - (step[i] * unit).sum() * unit
                    ratio = wd_ratio
                    break
        w = w - lr * wd * ratio * w - lr * step
    return w


def orthogonal(weight, generator):
    """A gradient without any part along the rows of a weight."""
    g = torch.randn(weight.shape, generator=generator)
    unit = weight / weight.norm(dim=1, keepdim=True)
    return g - (g * unit).sum(dim=1, keepdim=True) * unit


@pytest.mark.parametrize("case", ["rows", "along", "vector"])
def test_adamp_is_that_of_its_paper(case):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 6, generator=generator)
    if case == "vector":
        weight = weight[0]
    layer = nn.Module()
    layer.weight = nn.Parameter(weight.clone())
    optimizer = create_optimizer_v2(layer, "adamp", lr=0.02, weight_decay=0.5, eps=1e-8)
    stock = {key: optimizer.defaults[key] for key in ("wd_ratio", "nesterov")}
    assert stock == {"wd_ratio": 0.01, "nesterov": True}  # timm's, and not those of the paper
    config = settings()
    config.opt_kwargs = {"wd_ratio": 0.1, "nesterov": False}
    Recipe(config, weights=None).set_up_optimizer(optimizer, layer)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5  # timm spares vectors
    gradients = []
    for _ in range(3):
        now = layer.weight.detach()
        gradients.append(orthogonal(now, generator) if case == "rows" else now + torch.randn(now.shape))
        layer.weight.grad = gradients[-1].clone()
        optimizer.step()
    expected = slow_adamp(weight, gradients, lr=0.02, wd=0.5, wd_ratio=0.1)
    torch.testing.assert_close(layer.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    other = slow_adamp(weight, gradients, lr=0.02, wd=0.5, wd_ratio=0.01)
    assert torch.equal(other, expected) == (case != "rows")  # the case that is projected


def test_without_flags_optimizer_and_schedule_are_open_clip_s():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = [dict(group) for group in optimizer.param_groups]
    recipe, stock = Recipe(settings(), weights=None), lambda step: 1.0
    recipe.set_up_optimizer(optimizer, model)
    assert [dict(group) for group in optimizer.param_groups] == before
    assert recipe.schedule(stock, optimizer, 10) is stock
    epoch = recipe.frozen_epoch(model, 0, 2)
    assert not epoch.frozen and epoch.factor(0) == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_each_step_and_group(name):
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr_scale": 0.25}], lr=8.0)
    cooldown = (4, 1.0, 0.0) if name == "const-cooldown" else ()
    stock = SCHEDULES[name](optimizer, 8.0, 2, 20, *cooldown)
    alone = [stock(step) for step in range(20)]
    adjust = scheduled(stock, optimizer, steps_per_epoch=5, drop_epochs=(1, 3), drop_factor=0.1)
    for step in range(20):
        expected = alone[step] * (1 if step < 5 else 0.1 if step < 15 else 0.01)
        assert adjust(step) == pytest.approx(expected, rel=1e-12)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([expected, expected / 4], rel=1e-12)


def test_a_checkpoint_of_other_groups_is_refused(tiny):
    stock, ours = (torch.optim.AdamW(tiny.parameters(), lr=1e-3) for _ in range(2))
    set_groups(ours, tiny, FLAGS)
    with pytest.raises(ValueError, match=r"has 1 groups of parameters, and that of this run has \d+: give the same"):
        load_optimizer(ours, stock.state_dict())


@pytest.mark.parametrize("how", ["loss", "lr"])
def test_after_a_freeze_the_loss_or_the_learning_rate_is_warmed_up(how):
    """Epochs of 4 steps, of which the first two are frozen and the rate drops by the fourth."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=8.0)
    flags = ["--freeze-text-epochs", "2", "--warm-up-after-freeze", how, "--lr-drop-epochs", "3"]
    recipe = Recipe(settings(*flags), weights=None)
    adjust = recipe.schedule(lambda step: 8.0, optimizer, 4 * 5)
    model = open_clip.create_model("PCMEpp-tiny")
    for step in range(4 * 5):
        epoch, share = step // 4, (0.25, 0.5, 0.75, 1.0)[step % 4] if step // 4 == 2 else 1.0
        rate = 8.0 if epoch < 3 else 0.8
        assert adjust(step) == pytest.approx(rate * share if how == "lr" else rate)
        assert optimizer.param_groups[0]["lr"] == adjust(step)
        around = recipe.frozen_epoch(model, epoch, 4)
        factor = around.factor(step)
        assert factor == pytest.approx(share if how == "loss" else 1.0)


# Averaged weights and the best checkpoint.


@pytest.mark.parametrize("start, snapshots", [(15, 10), (16, 9)])
def test_the_average_of_the_paper_and_that_of_the_authors_code(start, snapshots):
    """The last ten of 25 epochs, and nine."""
    config = settings("--swa-start-epoch", str(start), epochs=25)
    recipe, model = Recipe(config, weights=None), nn.Linear(1, 1)
    recipe.save_average = lambda model: None
    for epoch in range(25):
        nn.init.constant_(model.weight, epoch)
        recipe.end_epoch(model, epoch)
    assert recipe.average.snapshots == snapshots
    assert recipe.average.tensors["weight"].item() == pytest.approx((start + 24) / 2)


class Normed(nn.Module):
    """A model with a batch norm, whose counter is no float, and half precision."""

    def __init__(self):
        super().__init__()
        self.norm, self.small = nn.BatchNorm1d(3), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def test_the_average_of_weights_is_their_mean_and_resumes():
    model, seen = Normed(), []
    average, resumed = WeightAverage(start=2), WeightAverage(start=2)
    for epoch in range(2, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape))
            model.norm(torch.randn(4, 3))
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        average.add(model)
        if epoch > 2:
            again = WeightAverage(start=2)
            again.load_state_dict(resumed.state_dict(), epochs=epoch)
            resumed = again
        resumed.add(model)
    for name, tensor in average.averaged(model).items():
        slow = torch.stack([state[name].double() for state in seen]).mean(dim=0)
        expected = slow if tensor.is_floating_point() else seen[-1][name]
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-6, atol=1e-6)
        assert torch.equal(average.tensors[name], resumed.tensors[name])
    assert average.snapshots == 4 and average.tensors["small"].dtype == torch.float32
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), average.loaded(model):
        assert all(torch.equal(t, average.averaged(model)[name]) for name, t in model.state_dict().items())
        raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("saved, epochs", [(None, 4), ((3, 1), 4), ((2, 1), 4)])
def test_an_average_that_would_miss_epochs_is_refused(saved, epochs):
    entry = None if saved is None else {"start": saved[0], "snapshots": saved[1], "tensors": {}}
    with pytest.raises(ValueError, match=r"--swa-start-epoch 2: the checkpoint .* one of at least 4\."):
        WeightAverage(start=2).load_state_dict(entry, epochs)
    WeightAverage(start=4).load_state_dict(entry, epochs)  # which starts later


def test_the_best_checkpoint_is_never_replaced_by_a_worse_one(tmp_path, caplog):
    names = [f"{way}_R@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]

    def metrics(value, prefix="csd/"):
        return {f"{prefix}{name}": value for name in names}

    assert rsum(metrics(0.5), "csd") == 300 and rsum(metrics(0.5, ""), "cosine") == 300
    assert rsum({"epoch": 3}, "csd") is None
    for value, epoch, kept in ((0.25, 1, 1), (0.5, 2, 2), (0.5, 3, 2), (0.25, 4, 2), (0.75, 5, 5)):
        best = BestCheckpoint(tmp_path, "csd", "data")  # as a resumed run
        if best.is_better(metrics(value)):
            best.save(metrics(value), {"epoch": epoch})
        assert torch.load(tmp_path / "best.pt", weights_only=True)["epoch"] == kept
    assert not BestCheckpoint(tmp_path, "csd", "data").is_better({"imagenet-zeroshot-val-top1": 1.0})
    assert not BestCheckpoint(tmp_path, "csd", "data").is_better(metrics(math.nan))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for others in (("csd", "other data"), ("cosine", "data")):
        assert BestCheckpoint(tmp_path, *others).is_better(metrics(0.01) | metrics(0.01, ""))
    assert caplog.text.count("other validation data or by another distance") == 2
    (tmp_path / "best.pt").write_bytes((tmp_path / "best.pt").read_bytes()[:-200])
    assert BestCheckpoint(tmp_path, "csd", "data").is_better(metrics(0.01)) and "not used as the best" in caplog.text


@pytest.mark.parametrize("content", [[1.0], {"rsum": math.nan}, {"rsum": "many"}, {"epoch": 1}, {"rsum": 300.0}])
def test_a_best_checkpoint_without_a_value_that_counts_is_replaced(tmp_path, caplog, content):
    """The last one is of an earlier version, which did not note what it was measured on."""
    assert checkpoints.save(content, tmp_path / "best.pt")
    best = BestCheckpoint(tmp_path, "cosine", "data")
    assert caplog.text.count("not used as the best checkpoint so far") == 1
    assert best.is_better({f"{way}_R@{k}": 0.0 for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)})


# Bad input.

REFUSED = [
    (["--layer-decay", "0"], "--layer-decay must be above 0 and at most 1, not 0"),
    (["--layer-decay", "1.5"], "--layer-decay must be above 0 and at most 1, not 1.5"),
    (["--image-lr-multiplier", "-1"], "--image-lr-multiplier must be above 0, not -1"),
    (["--text-lr-multiplier", "inf"], "--text-lr-multiplier must be above 0, not inf"),
    (["--lr-drop-factor", "0.1"], "--lr-drop-factor is for --lr-drop-epochs"),
    (["--lr-drop-epochs", "1"], "give --lr-scheduler const, not --lr-scheduler cosine"),
    (["--lr-drop-epochs", "1", "--lr-scheduler", "const", "--skip-scheduler"], "not --skip-scheduler"),
    (["--lr-drop-epochs", "3", "--lr-scheduler", "const"], "--lr-drop-epochs 3 is not below --epochs 3"),
    (["--lr-drop-epochs", "-1", "--lr-scheduler", "const"], "--lr-drop-epochs must be at least 0, not -1"),
    (["--lr-drop-epochs", "1", "1", "--lr-scheduler", "const"], "names an epoch twice"),
    (["--lr-drop-epochs", "1", "--lr-drop-factor", "0", "--lr-scheduler", "const"], "--lr-drop-factor must be"),
    (["--freeze-image-epochs", "3"], "--freeze-image-epochs 3 is not below --epochs 3: the tower would never be"),
    (["--freeze-text-epochs", "-1"], "--freeze-text-epochs must be at least 0, not -1"),
    (["--freeze-image-epochs", "1", "--lock-image"], "--lock-image freezes the tower for the whole run: drop it"),
    (["--freeze-text-epochs", "1", "--head-only"], "--head-only freezes the tower for the whole run: drop it"),
    (["--warm-up-after-freeze"], "--warm-up-after-freeze needs a frozen tower: give --freeze-image-epochs"),
    (
        ["--warm-up-after-freeze", "lr", "--freeze-image-epochs", "1", "--skip-scheduler"],
        "--warm-up-after-freeze lr needs a schedule: drop --skip-scheduler",
    ),
    (["--swa-start-epoch", "3"], "--swa-start-epoch 3 is not below --epochs 3: no weights would be averaged"),
    (["--swa-start-epoch", "1", "--lora", "2"], "--swa-start-epoch cannot be combined with --lora"),
    (["--swa-start-epoch", "1", "--logs", "none"], "--swa-start-epoch keeps a checkpoint of the run"),
    (["--save-best"], "--save-best chooses by a validation: give --val-data"),
    (["--save-best", "--val-data", "x.tar", "--val-frequency", "0"], "a --val-frequency above 0"),
    (["--opt", "adamp"], "--opt adamp is one of timm's optimizers: write timm/adamp"),
    (["--opt", "timm/adamq"], "--opt timm/adamq: there is no such optimizer; did you mean 'timm/adam"),
    (["--opt", "timm/adamp"], "--opt timm/adamp has no default learning rate: give --lr"),
    (["--opt", "timm/adamp", "--beta1", "0.9"], "takes both betas or neither, for its own defaults: give --beta2"),
    *((["--opt-kwargs", x], f"{x!r} is not KEY=VALUE") for x in ("wd_ratio", "=1", "a b=1", "wd_ratio=much")),
    (["--opt-kwargs", "wd_ratio=0.1"], "--opt-kwargs wd_ratio: --opt adamw has no such argument"),
    (["--opt", "timm/adamp", "--lr", "1", "--opt-kwargs", "wd_ration=0.1"], "did you mean 'wd_ratio'?"),
    (
        ["--opt", "timm/adamp", "--lr", "1", "--opt-kwargs", "nesterov=1"],
        "--opt-kwargs nesterov must be true or false, not 1",
    ),
    (
        ["--opt", "timm/adamp", "--lr", "1", "--opt-kwargs", "wd_ratio=true"],
        "--opt-kwargs wd_ratio must be a number, not True",
    ),
    (["--opt", "timm/adamp", "--lr", "1", "--opt-kwargs", "eps=1"], "--opt-kwargs eps: use --eps"),
]


def test_what_cannot_work_is_refused_in_one_sentence():
    base = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8", "--epochs", "3"]
    for flags, words in REFUSED:
        with pytest.raises(ValueError, match=r"^--") as refused:
            parse([*base, *flags])
        assert words in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^3 mistakes:\n  --swa.*\n  --save-best.*\n  --opt adamp "):
        parse([*base, "--opt", "adamp", "--save-best", "--swa-start-epoch", "4"])


def test_a_dry_run_prints_the_learning_rates(capsys, tmp_path):
    argv = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8", "--batch-size", "4"]
    argv += ["--lr", "1e-2", "--layer-decay", "0.5", "--image-lr-multiplier", "0.1", "--warmup", "0"]
    assert train.main([*argv, "--logs", str(tmp_path), "--dry-run"]) == 0
    rows = dict(re.findall(r"^  (\w[\w -]*?) {2,}learning rate ([\d.e-]+),", capsys.readouterr().out, re.MULTILINE))
    assert json.loads(json.dumps(rows))["heads"] == "0.01" and rows["image block 2"] == "0.0005"
    assert rows["text block 0"] == "0.00125" and rows["image embeddings and norms"] == "0.001"
