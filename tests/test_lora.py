"""LoRA: for each kind of tower against the plain model with merged weights, and `pcmepp train --lora` in real runs."""

import copy
import re
import shutil

import open_clip
import pytest
import torch
from drawn_shards import write_shards
from helpers import assert_close, assert_same_gradients, gradients, scramble
from hub_helpers import assert_same_outputs
from kinds import KINDS, kind_batch, kind_model
from test_towers import OtherAttention, attention
from torch import nn

from pcmepp_openclip.host.towers.blocks import is_plain
from pcmepp_openclip.hub.staging import stage
from pcmepp_openclip.models.convert import to_clip
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.models.lora import LowRank, lora_state_dict, stock_state_dict, whole_state_dict
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train

RANK = 3
SCALARS = {"logit_scale", "logit_bias", "negative_scale", "shift"}
FROZEN = (  # matrices without LoRA: no layers of a tower, or convolutions of single channels
    *("positional_embedding", "token_embedding.weight", "text_projection", "visual.proj", "attn_pool.query"),
    *("_embeddings.weight", "pos_embed", "cls_token", "conv_dw.weight"),
)


pytestmark = pytest.mark.usefixtures("known_kinds")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def pair(kind, trained=True, **kwargs):
    """A model with LoRA and the same model without, before LoRA was added.

    Arguments:
        trained: whether B is not zero.
    """
    plain = scramble(kind_model(kind, **kwargs)).eval()
    model = copy.deepcopy(plain)
    torch.manual_seed(5)
    model.add_lora(RANK)
    if trained:
        for part in low_ranks(model).values():
            nn.init.normal_(part.lora_B, std=0.05)
    return model, plain


def low_ranks(model) -> dict[str, LowRank]:
    """A and B by the name of their weight in the plain model."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, LowRank)}
    return {re.sub(r"parametrizations\.(\w+)\.0$", r"\1", path): part for path, part in found.items()}


def merge(model, plain):
    """The plain model with W + B A, by hand."""
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, part in low_ranks(model).items():
            weights[name] += (part.lora_B @ part.lora_A).reshape(weights[name].shape)
    return plain


def without_scalars(out):
    return {name: value for name, value in out.items() if name.endswith(("features", "logvar"))}


def frozen(*args, **kwargs):
    """A model without gradients: whether a weight requires one decides on how torch orders a matrix product."""
    return open_clip.create_model(*args, **kwargs).requires_grad_(False)


# What it computes.


def test_which_weights_are_trained(kind):
    model, plain = pair(kind)
    adapted = low_ranks(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name for name, _ in plain.named_parameters() if "uncertainty_" in name} | SCALARS & set(plain.state_dict())
    assert trained == own | {name for name in lora_state_dict(model) if "lora_" in name}
    for name, parameter in plain.named_parameters():
        if name in adapted:
            part, (rows, columns) = adapted[name], parameter.flatten(1).shape
            assert part.lora_A.shape == (RANK, columns) and part.lora_B.shape == (rows, RANK)
            assert not name.endswith(FROZEN), name
        elif name not in own:
            assert parameter.ndim < 2 or name.endswith(FROZEN) or min(parameter.flatten(1).shape) <= RANK, name
    assert any(name.startswith("visual.") for name in adapted) and not all(
        name.startswith("visual.") for name in adapted
    )


@pytest.mark.parametrize("training", [False, True])
def test_it_starts_as_the_model_was(kind, training):
    model, plain = pair(kind, trained=False)
    model.train(training)
    plain.train(training)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    batch, outputs = kind_batch(model), []
    for each in (model, plain):
        torch.manual_seed(3)  # for dropout
        outputs.append(each(*batch))
    assert outputs[0].keys() == outputs[1].keys()
    for name, value in outputs[1].items():
        assert torch.equal(outputs[0][name], value), name


def test_outputs_and_gradients_are_those_of_the_merged_weights(kind):
    """dL/dB = dL/dW A^T and dL/dA = B^T dL/dW: an A or B that some code does not see would have no gradient."""
    model, plain = pair(kind)
    before = without_scalars(plain(*kind_batch(model)))
    merge(model, plain)
    out, expected = (without_scalars(each(*kind_batch(model))) for each in (model, plain))
    assert_close(out, expected)
    assert all((value - before[name]).abs().max() > 1e-3 for name, value in out.items())  # LoRA makes a difference
    found, full = gradients(model, out), gradients(plain, expected)
    wanted = {name: gradient for name, gradient in full.items() if "uncertainty_" in name}
    for name, part in low_ranks(model).items():
        prefix, gradient = re.sub(r"(\w+)$", r"parametrizations.\1.0.", name), full[name].flatten(1)
        wanted[f"{prefix}lora_A"] = part.lora_B.detach().T @ gradient
        wanted[f"{prefix}lora_B"] = gradient @ part.lora_A.detach().T
    assert_same_gradients(found, wanted, tolerance=5e-4)


def test_a_step_changes_what_is_trained_and_nothing_else(kind):
    model, plain = pair(kind)
    model.train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    gradients(model, model(*kind_batch(model)))
    optimizer.step()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - SCALARS
    for name, tensor in model.state_dict().items():
        if name not in SCALARS:  # some do not take part in this loss
            assert torch.equal(tensor, before[name]) == (name not in trained), name
    for name, tensor in plain.state_dict().items():  # W, all that is frozen, and the statistics of batch norms
        path = re.sub(r"(\w+)$", r"parametrizations.\1.original", name)
        assert torch.equal(model.state_dict().get(path, before.get(name)), tensor), name


def test_the_merged_state_is_a_plain_model(kind, tmp_path):
    model, _ = pair(kind)
    model.eval()
    plain = kind_model(kind, seed=7).eval()
    assert set(stock_state_dict(model)) == set(plain.state_dict())
    plain.load_state_dict(stock_state_dict(model))
    for name, value in model(*kind_batch(model)).items():
        assert torch.equal(plain(*kind_batch(model))[name], value), name
    again, _ = pair(kind, trained=False)
    again.load_state_dict(whole_state_dict(stock_state_dict(model), lora_state_dict(model)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_model_without_lora_has_its_own_state():
    plain = kind_model("vit")
    assert lora_state_dict(plain) == {} and list(stock_state_dict(plain)) == list(plain.state_dict())


def test_an_export_holds_the_merged_weights(tmp_path):
    model = open_clip.create_model("PCMEpp-tiny")
    model.add_lora(RANK)
    for part in low_ranks(model).values():
        nn.init.normal_(part.lora_B, std=0.05)
    folder = export_model(model, tmp_path / "exported", "PCMEpp-tiny")
    assert_same_outputs(frozen(f"local-dir:{folder}"), model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "resnet"], indirect=True)  # which cannot
def test_recomputed_activations_have_the_same_gradients(kind):
    model, _ = pair(kind)
    model.train()
    batch, found = kind_batch(model), []
    for recompute in (False, True):
        if recompute:
            model.set_grad_checkpointing()
        torch.manual_seed(3)  # for dropout
        found.append(gradients(model, without_scalars(model(*batch))))
    assert_same_gradients(found[1], found[0], tolerance=1e-5)


def test_in_half_precision_small_steps_are_not_lost():
    model, plain = pair("vit", precision="bf16", trained=False)
    name, part = next((name, part) for name, part in low_ranks(model).items() if name.endswith("c_fc.weight"))
    assert part.lora_A.dtype == part.lora_B.dtype == torch.float32
    weight = plain.get_parameter(name)
    assert weight.dtype == torch.bfloat16
    for _ in range(50):
        with torch.no_grad():
            part.lora_B += 1e-5
    wanted = (weight + 50e-5 * torch.ones_like(part.lora_B) @ part.lora_A).bfloat16()
    torch.testing.assert_close(stock_state_dict(model)[name], wanted, rtol=0.01, atol=1e-6)
    assert not torch.equal(stock_state_dict(model)[name], weight)
    images, texts = kind_batch(model)
    for precision in (torch.bfloat16, None):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is None):
            assert torch.isfinite(model(images.bfloat16(), texts)["image_logvar"]).all()


def test_blocks_are_still_taken_apart_and_another_attention_is_not():
    model, _ = pair("vit")
    block = model.visual.transformer.resblocks[-1]
    assert type(block.attn) is not nn.MultiheadAttention and is_plain(block)
    block.attn = attention(OtherAttention, torch.float32)
    assert not is_plain(block)
    nn.utils.parametrize.register_parametrization(
        block.attn, "in_proj_weight", LowRank(block.attn.in_proj_weight, RANK), unsafe=True
    )
    assert not is_plain(block)


# Runs.


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run of 2 epochs with 4 steps of 16 samples each; further flags win."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_shards(folder / "shards", shards=2, samples=32)

    def flags(*more, name="run"):
        out = ["--model", "PCMEpp-tiny", "--train-data", data, "--train-num-samples", "64", "--dataset-type"]
        out += ["webdataset", "--batch-size", "8", "--epochs", "2", "--workers", "0", "--precision", "fp32"]
        out += ["--warmup", "1", "--lr", "1e-3", "--log-every-n-steps", "1", "--resume", "latest"]
        return [*out, "--logs", str(folder), "--name", name, *map(str, more)]

    flags.folder = folder
    return flags


@pytest.fixture(scope="module")
def run(flags, ranks):
    """The folder of a run on two ranks, where a parameter without a gradient would be an error, and another one that
    was resumed from its first epoch."""
    run, resumed = flags.folder / "run", flags.folder / "resumed"
    assert ranks.run(2, flags("--lora", RANK)) == [0, 0], ranks.log.read_text()[-3000:]
    (resumed / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "checkpoints/epoch_1.pt", resumed / "checkpoints")
    assert ranks.run(2, flags("--lora", RANK, name="resumed")) == [0, 0], ranks.log.read_text()[-3000:]
    return run


def tensors(value, path=""):
    """The tensors of nested dicts and lists, by their places."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: tensor for key, part in items for name, tensor in tensors(part, f"{path}/{key}").items()}


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(run):
    ends = [checkpoints.load(folder / "checkpoints/epoch_2.pt") for folder in (run, run.with_name("resumed"))]
    first = checkpoints.load(run / "checkpoints/epoch_1.pt")
    assert "Start epoch 1" in (run.with_name("resumed") / "out.log").read_text()
    found = [tensors({key: end[key] for key in ("state_dict", "lora", "optimizer")}) for end in ends]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
    for name, tensor in ends[0]["lora"].items():
        assert torch.equal(tensor, first["lora"][name]) == name.endswith(".original"), name
    assert not any(name.startswith("module.") for name in found[0])


def test_a_checkpoint_is_that_of_a_plain_model(run, tmp_path):
    path = run / "checkpoints/epoch_2.pt"
    content = checkpoints.load(path)
    with_lora = open_clip.create_model("PCMEpp-tiny")
    with_lora.add_lora(RANK)
    with_lora.load_state_dict(whole_state_dict(content["state_dict"], content["lora"]))
    assert content["about"]["hyperparameters"]["lora"] == RANK
    assert_same_outputs(frozen("PCMEpp-tiny", pretrained=str(path)), with_lora)
    stage(run, "me/lora", tmp_path / "staged")
    assert_same_outputs(frozen(f"local-dir:{tmp_path / 'staged'}"), with_lora)
    kept, _ = to_clip(path, tmp_path / "clip.safetensors")
    assert not any("lora" in name or "parametrizations" in name for name in kept)


def test_what_is_trained_is_said(run, flags, capsys):
    model = open_clip.create_model("PCMEpp-tiny")
    model.add_lora(RANK)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (
        f"LoRA of rank {RANK}: the weights of both towers are frozen, {count} parameters are trained."
        in (run / "out.log").read_text()
    )
    assert (
        train.main(flags("--lora", RANK, "--dry-run", "--pretrained", run / "checkpoints/epoch_2.pt", name="dry")) == 0
    )
    said = capsys.readouterr().out
    assert f", {count:,} trained" in said
    size = (run / "checkpoints/epoch_2.pt").stat().st_size / 1e9
    assert float(re.search(r"checkpoint size +about ([\d.]+) GB", said)[1]) == pytest.approx(size, abs=0.006)


@pytest.mark.parametrize(
    "more, words",
    [
        (["--lora", "0"], "--lora must be at least 1, not 0"),
        (["--lora", "100000"], "--lora 100000 is no less than the rank of any weight: lower it."),
        (["--lora", "4", "--model", "ViT-B-32"], "--lora is for PCME++ models, and ViT-B-32 is a plain one"),
        (["--lora", "4", "--lock-image"], "--lora cannot be combined with --lock-image: drop one of them."),
        (["--lora", "4", "--lock-text"], "--lora cannot be combined with --lock-text: drop one of them."),
        (["--lora", "4", "--head-only"], "--lora cannot be combined with --head-only: drop one of them."),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(flags, capsys, more, words):
    assert train.main(flags(*more, "--dry-run", name="refused")) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "kept, more, words",
    [
        (["about", "lora"], ["--lora", RANK + 1], f"was trained with --lora {RANK}, not with --lora {RANK + 1}:"),
        (["about", "lora"], [], f"was trained with --lora {RANK}, not without --lora:"),
        (["lora"], [], "was saved with --lora and cannot be resumed without it:"),
        ([], ["--lora", RANK], "was saved without --lora and cannot be resumed with it:"),
    ],
)
def test_a_run_cannot_be_resumed_with_another_rank(run, flags, capfd, tmp_path, kept, more, words):
    content = checkpoints.load(run / "checkpoints/epoch_1.pt")
    for name in {"about", "lora"} - set(kept):
        del content[name]
    checkpoints.save(content, tmp_path / "epoch_1.pt")
    assert train.main(flags("--resume", tmp_path / "epoch_1.pt", *more, name=tmp_path.name)) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pcmepp train: ")]
    assert len(said) == 1 and words in said[0] and "--pretrained" in said[0]


def test_bare_weights_are_not_resumed_with_lora(run, flags, capfd, tmp_path):
    torch.save(checkpoints.load(run / "checkpoints/epoch_1.pt")["state_dict"], tmp_path / "bare.pt")
    assert train.main(flags("--resume", tmp_path / "bare.pt", "--lora", RANK, name=tmp_path.name)) == 2
    assert "was saved without --lora and cannot be resumed with it" in capfd.readouterr().err
