"""Files given as `pretrained=`: a plain CLIP to start from, a PCME++ checkpoint, or an error; never a part of one."""

import logging
from pathlib import Path

import open_clip
import pytest
import torch
from helpers import assert_close, make_batch, make_model, plain_twin, sigma_names
from safetensors.torch import save_file

import pcmepp_openclip


@pytest.fixture(scope="module")
def source():
    model = make_model("PCMEpp-tiny", seed=3)
    return model, plain_twin(model, "PCMEpp-tiny")


def write(state_dict: dict, path, kind: str) -> str:
    if kind == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state_dict.items()}, path / "file.safetensors")
        return str(path / "file.safetensors")
    if "module" in kind:
        state_dict = {f"module.{name}": tensor for name, tensor in state_dict.items()}
    if "training" in kind:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict()
        state_dict = {"epoch": 3, "name": "run", "state_dict": state_dict, "optimizer": optimizer}
    torch.save(state_dict, path / "file.pt")
    return str(path / "file.pt")


KINDS = ["pt", "safetensors", "module", "training", "training with module"]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_start_from_a_plain_clip(source, kind, tmp_path, caplog):
    _, plain = source
    file = write(plain.state_dict(), tmp_path, kind)
    torch.manual_seed(11)
    with caplog.at_level(logging.INFO):
        model = open_clip.create_model("PCMEpp-tiny", pretrained=file)
    image, text = make_batch(model)
    assert_close({0: model.encode_image(image)}, {0: plain.encode_image(image)})
    assert_close({0: model.encode_text(text)}, {0: plain.encode_text(text)})
    lines = [record.getMessage() for record in caplog.records if "plain CLIP" in record.getMessage()]
    assert lines == [
        "Warm start: the mean branch takes the weights of a plain CLIP; the log-variance branch "
        f"({len(sigma_names(model))} tensors) starts fresh."
    ]
    torch.manual_seed(11)
    fresh = open_clip.create_model("PCMEpp-tiny")
    assert all(torch.equal(model.state_dict()[name], fresh.state_dict()[name]) for name in sigma_names(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_its_own_is_loaded_to_the_bit(source, kind, tmp_path, caplog):
    own, _ = source
    file = write(own.state_dict(), tmp_path, kind)
    with caplog.at_level(logging.INFO):
        model = open_clip.create_model("PCMEpp-tiny", pretrained=file)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in own.state_dict().items())
    assert "Warm start" not in caplog.text


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16", "fp16"])
def test_warm_start_in_low_precision(source, precision, tmp_path):
    _, plain = source
    model = open_clip.create_model(
        "PCMEpp-tiny", pretrained=write(plain.state_dict(), tmp_path, "pt"), precision=precision
    )
    dtype = model.visual.conv1.weight.dtype
    assert torch.equal(model.visual.conv1.weight, plain.visual.conv1.weight.to(dtype))


def test_warm_start_with_a_logit_bias(source, tmp_path):
    """open_clip starts a bias that the file lacks at zero."""
    own, plain = source
    for state_dict in (plain.state_dict(), own.state_dict()):
        file = write(state_dict, tmp_path, "pt")
        model = open_clip.create_model("PCMEpp-tiny", pretrained=file, init_logit_bias=-10.0)
        assert model.logit_bias.item() == 0.0
        assert torch.equal(model.visual.proj, plain.visual.proj)


def test_a_scalar_of_the_other_shape_fits(source, tmp_path):
    own, _ = source
    state_dict = {**own.state_dict(), "logit_scale": own.logit_scale.detach().reshape(1)}
    model = open_clip.create_model("PCMEpp-tiny", pretrained=write(state_dict, tmp_path, "pt"))
    assert torch.equal(model.logit_scale, own.logit_scale)


# What must not be loaded.


def refused(file: str, name: str = "PCMEpp-tiny", **kwargs) -> str:
    with pytest.raises(RuntimeError, match="Cannot load") as error:
        open_clip.create_model(name, pretrained=file, **kwargs)
    message = str(error.value)
    assert message.startswith(f"Cannot load {file}: ") and "\n" not in message
    assert len(message) > len(f"Cannot load {file}: ") + 15, message
    return message


def test_part_of_the_log_variance_branch_is_an_error_that_lists_what_lacks(source, tmp_path):
    own, _ = source
    names = sigma_names(own)
    gone = [names[0], names[-1], "shift"]
    state_dict = {name: tensor for name, tensor in own.state_dict().items() if name not in gone}
    for kind in KINDS:
        message = refused(write(state_dict, tmp_path, kind))
        assert all(name in message for name in gone) and "lacks 3" in message
    alone = {**source[1].state_dict(), "shift": torch.zeros(1)}
    message = refused(write(alone, tmp_path, "pt"))
    assert all(name in message for name in names if name != "shift") and f"lacks {len(names) - 1}" in message


def test_other_depths_and_biases_are_other_architectures(source, tmp_path):
    file = write(source[0].state_dict(), tmp_path, "pt")
    message = refused(file, pcmepp_cfg={"head_layers": 2, "init_logvar_bias": -4})
    assert "uncertainty_transformer.resblocks.1" in message
    message = refused(file, pcmepp_cfg={"head_layers": 1, "init_logvar_bias": None})
    assert "uncertainty_bias" in message and "another architecture" in message


def test_foreign_checkpoints(source, tmp_path):
    own, plain = source
    assert "none of the model's tensors" in refused(write({"layer1.weight": torch.ones(3)}, tmp_path, "pt"))
    lacking = {name: tensor for name, tensor in plain.state_dict().items() if name != "ln_final.weight"}
    assert "lacks ln_final.weight" in refused(write(lacking, tmp_path, "pt"))
    extra = {**own.state_dict(), "ema.decay": torch.ones(1)}
    assert "unknown are ema.decay" in refused(write(extra, tmp_path, "pt"))
    wide = {**own.state_dict(), "ln_final.weight": torch.ones(7)}
    assert "ln_final.weight is [7], the model's [128]" in refused(write(wide, tmp_path, "pt"))
    turned = {**own.state_dict(), "visual.proj": own.visual.proj.detach().T}
    assert "visual.proj" in refused(write(turned, tmp_path, "pt"))


NOT_CHECKPOINTS = {
    "an empty dict": {},
    "a list": [1, 2],
    "None": None,
    "a tensor": torch.ones(3),
    "numbers as names": {1: torch.ones(1)},
    "an empty training checkpoint": {"epoch": 1, "state_dict": {}},
    "a class": ValueError,
}


@pytest.mark.parametrize("case", NOT_CHECKPOINTS)
def test_files_that_are_no_checkpoints(case, tmp_path):
    torch.save(NOT_CHECKPOINTS[case], tmp_path / "file.pt")
    assert "not a dict of tensors" in refused(str(tmp_path / "file.pt"))


def test_a_value_that_is_no_tensor(source, tmp_path):
    torch.save({**source[0].state_dict(), "shift": 1.0}, tmp_path / "file.pt")
    refused(str(tmp_path / "file.pt"))


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors", "file.bin"])
def test_corrupt_files(source, name, tmp_path):
    good = write(source[0].state_dict(), tmp_path, "safetensors" if "safe" in name else "pt")
    content = Path(good).read_bytes()
    for broken in (b"", b"hello world", content[:1000], content[: len(content) // 2]):
        (tmp_path / name).write_bytes(broken)
        refused(str(tmp_path / name))


def test_a_refused_file_leaves_the_model_as_it_was(source, tmp_path):
    own, _ = source
    state_dict = {name: tensor for name, tensor in own.state_dict().items() if name != "shift"}
    file = write(state_dict, tmp_path, "pt")
    model = open_clip.create_model("PCMEpp-tiny")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="shift"):
        open_clip.load_checkpoint(model, file)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_plain_models_keep_open_clip_s_own_errors(source, tmp_path):
    torch.save({}, tmp_path / "empty.pt")
    model = plain_twin(source[0], "PCMEpp-tiny")
    with pytest.raises(StopIteration):
        open_clip.load_checkpoint(model, str(tmp_path / "empty.pt"))


# A tag of the plain model, over HTTP.


@pytest.fixture(scope="module")
def plain_b32():
    torch.manual_seed(5)
    return open_clip.create_model("ViT-B-32").eval()


def test_a_tag_of_the_plain_model(plain_b32, hub, tmp_path, caplog):
    tag = "laion2b_s34b_b79k"
    repo = open_clip.get_pretrained_cfg("ViT-B-32", tag)["hf_hub"].strip("/")
    state_dict = {name: tensor.contiguous() for name, tensor in plain_b32.state_dict().items()}
    save_file(state_dict, tmp_path / "weights.safetensors")
    hub.add(repo, {"open_clip_model.safetensors": tmp_path / "weights.safetensors"})
    with caplog.at_level(logging.INFO):
        model, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-ViT-B-32", pretrained=tag)
    assert type(model) is pcmepp_openclip.PCMEppCLIP
    assert caplog.text.count("Warm start") == 1
    assert any(repo in request.path and request.method == "GET" for request in hub.requests)
    image, text = make_batch(model, samples=2)
    with torch.no_grad():
        assert_close({0: model.eval().encode_image(image)}, {0: plain_b32.encode_image(image)})
        assert_close({0: model.encode_text(text)}, {0: plain_b32.encode_text(text)})
    _, _, stock = open_clip.create_model_and_transforms("ViT-B-32", pretrained=tag)
    assert repr(preprocess) == repr(stock)


def test_a_tag_whose_download_fails_is_an_error(hub):
    hub.fail("/resolve/", status=404)
    with pytest.raises(RuntimeError, match="Failed to download weights for tag"):
        open_clip.create_model("PCMEpp-ViT-B-16", pretrained="laion2b_s34b_b88k")
