"""The released checkpoints: files of exactly their layout, over HTTP and from a folder; and the way back to CLIP."""

import json
import os
import struct

import open_clip
import pytest
import torch
from helpers import make_batch, plain_config, run_code, run_python, slow_forward
from safetensors.torch import load_file, save_file

import pcmepp_openclip

REPO_ID = "SanghyukChun/PCMEPP-ViT-B-16-CC3M-12M-RedCaps"
TAGS = {"cc3m_cc12m_redcaps": REPO_ID, "cc3m_cc12m_redcaps_256m": REPO_ID + "-256M"}
CONFIG = {
    "embed_dim": 512,
    "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 16, "unc_layers": 2},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "unc_layers": 2},
}


def released_shapes() -> dict[str, list[int]]:
    """Names and shapes by the description of the layout, with nothing of the plugin."""
    with torch.device("meta"):
        plain = open_clip.CLIP(**open_clip.get_model_config("ViT-B-16"))
    shapes = {name: list(tensor.shape) for name, tensor in plain.state_dict().items()}
    assert len(shapes) == 302
    for prefix in ("visual.", ""):
        block = f"{prefix}transformer.resblocks.0."
        for name in [name for name in shapes if name.startswith(block)]:
            for i in (0, 1):
                shapes[f"{prefix}uncertainty_transformer.resblocks.{i}.{name.removeprefix(block)}"] = shapes[name]
    shapes |= {"uncertainty_text_projection": [512, 512], "visual.uncertainty_proj": [768, 512]}
    return shapes | {"shift": [1], "negative_scale": [1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released")
    generator = torch.Generator().manual_seed(0)
    shapes = released_shapes()
    tensors = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["logit_scale"] = torch.tensor(4.0)
    assert len(tensors) == 354 and sum(tensor.numel() for tensor in tensors.values()) == 170_756_611
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def served(hub, folder):
    """The local Hub with both repos, which share their weights."""
    for repo in TAGS.values():
        hub.add(repo, {"config.json": folder / "config.json", "model.safetensors": folder / "model.safetensors"})
    hub.reset()
    return hub


def check(model, tensors) -> None:
    assert type(model) is pcmepp_openclip.PCMEppCLIP
    assert model.pcmepp_cfg.head_layers == 2 and model.pcmepp_cfg.init_logvar_bias is None
    state_dict = model.state_dict()
    assert set(state_dict) == set(tensors)
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in tensors.items())


def test_the_config_of_ours_has_the_released_tensors():
    with torch.device("meta"):
        model = open_clip.create_model("PCMEpp-ViT-B-16-unc2", device="meta")
    assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == released_shapes()


@pytest.mark.parametrize("repo", TAGS.values())
def test_by_its_hub_id(repo, served, tensors):
    model, _, evaluation = open_clip.create_model_and_transforms(f"hf-hub:{repo}")
    check(model, tensors)
    assert any(r.status == 200 and repo in r.path for r in served.requests)
    _, _, stock = open_clip.create_model_and_transforms("ViT-B-16")
    assert repr(evaluation) == repr(stock)
    tokens = open_clip.get_tokenizer(f"hf-hub:{repo}")(["a dog"])
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-B-16")(["a dog"]))
    assert open_clip.get_model_config(f"hf-hub:{repo}")["pcmepp_cfg"]["head_layers"] == 2


@pytest.mark.parametrize("tag, repo", TAGS.items())
def test_by_tag(tag, repo, served, tensors):
    model = open_clip.create_model("PCMEpp-ViT-B-16-unc2", pretrained=tag)
    check(model, tensors)
    assert any(repo + "/resolve" in r.path for r in served.requests)


@pytest.mark.parametrize("relative", [False, True])
def test_from_a_local_folder(folder, tensors, relative, monkeypatch):
    monkeypatch.chdir(folder.parent)
    name = f"local-dir:{folder.name if relative else folder}"
    model, preprocess = open_clip.create_model_from_pretrained(name)
    check(model, tensors)
    assert open_clip.get_tokenizer(name)(["a dog"]).shape == (1, 77)
    assert "224" in repr(preprocess)
    if relative:  # the released towers compute what the layout's description says
        model.output_dict = True
        image, text = make_batch(model, samples=1)
        with torch.no_grad():
            out, slow = model(image, text), slow_forward(model, image, text)
        for key in ("image_features", "text_features", "image_logvar", "text_logvar"):
            torch.testing.assert_close(out[key], slow[key], rtol=1e-6, atol=1e-6)
        assert out["match_shift"].item() == tensors["shift"].item()


def test_a_folder_in_the_way_of_a_hub_id(served, tensors, tmp_path, monkeypatch):
    """Only `local-dir:` reads folders: what a Hub id means does not depend on the current one."""
    trap = tmp_path / REPO_ID
    trap.mkdir(parents=True)
    (trap / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert open_clip.get_model_config(f"hf-hub:{REPO_ID}")["embed_dim"] == 512


def test_our_own_open_clip_config_in_a_repo(hub, tmp_path):
    """A repo of open_clip's own layout that holds a PCME++ model."""
    model = open_clip.create_model("PCMEpp-tiny")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "open_clip_model.safetensors")
    config = {"model_cfg": open_clip.get_model_config("PCMEpp-tiny"), "preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    files = ("open_clip_config.json", "open_clip_model.safetensors")
    hub.add("me/tiny", {name: tmp_path / name for name in files})
    for name in ("hf-hub:me/tiny", f"local-dir:{tmp_path}"):
        loaded, preprocess = open_clip.create_model_from_pretrained(name)
        assert all(torch.equal(loaded.state_dict()[key], value) for key, value in model.state_dict().items())
        assert "mean=[0.5, 0.5, 0.5]" in repr(preprocess)


@pytest.mark.parametrize("config", [{}, {"embed_dim": 512}, {"model_type": "bert"}, [1]])
def test_a_config_json_of_something_else(config, hub, tmp_path):
    hub.add("me/other", {"config.json": json.dumps(config).encode(), "model.safetensors": b"x"})
    with pytest.raises(RuntimeError, match=r"open_clip_config.json.* for me/other"):
        open_clip.create_model("hf-hub:me/other")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((RuntimeError, ValueError), match="is not the config of a released PCME"):
        open_clip.create_model(f"local-dir:{tmp_path}")


def test_towers_that_split_at_different_depths(tmp_path):
    config = json.loads(json.dumps(CONFIG))
    config["text_cfg"]["unc_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="unc_layers differ between the towers"):
        open_clip.create_model(f"local-dir:{tmp_path}")


def small_released(folder, **changes):
    """A folder of the released layout with a small model in it, and the model with these keys in its config."""
    config = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 8, "layers": 3, "width": 16, "head_width": 8, "patch_size": 4, "unc_layers": 1},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 3, "unc_layers": 1},
    }
    for key, value in changes.items():
        block, _, name = key.rpartition("__")
        (config[block] if block else config)[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_quick_gelu_of_a_released_config_is_used(tmp_path, quick_gelu):
    """In both branches of both towers, as the authors' class does."""
    small_released(tmp_path, quick_gelu=quick_gelu)
    model = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)
    kinds = {name for module in model.modules() if "GELU" in (name := type(module).__name__)}
    assert kinds == ({"QuickGELU"} if quick_gelu else {"GELU"})
    assert sum("GELU" in type(module).__name__ for module in model.modules()) == 8


def test_offline_from_the_cache(hub, tmp_path):
    """The weights have the last of the names that are looked for."""
    small_released(tmp_path)
    model = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    hub.add("me/released", {name: tmp_path / name for name in ("config.json", "model.safetensors")})
    load = "import open_clip, pcmepp_openclip; print(open_clip.create_model('hf-hub:me/released').visual.proj.sum())"
    expected = run_code(load)
    hub.requests.clear()
    assert run_code(load, env={"HF_HUB_OFFLINE": "1"}) == expected and hub.requests == []


OTHER_KEYS = {  # what `save_pretrained` writes of the authors' classes when every field is given
    "cast_dtype": None,
    "output_dict": True,
    "vision_cfg__mlp_ratio": 4.0,
    "vision_cfg__ls_init_value": None,
    "vision_cfg__patch_dropout": 0.0,
    "vision_cfg__global_average_pool": False,
    "vision_cfg__n_queries": 256,
    "vision_cfg__timm_model_name": None,
    "vision_cfg__timm_pool": "avg",
    "text_cfg__hf_model_name": None,
    "text_cfg__embed_cls": False,
    "text_cfg__pad_id": 0,
    "text_cfg__pooler_type": "mean_pooler",
}


def test_a_released_config_with_every_field_is_read(tmp_path):
    small_released(tmp_path, **OTHER_KEYS)
    open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)


@pytest.mark.parametrize(
    "key, value",
    [
        ("quick_gelu", "yes"),
        ("cast_dtype", "bf16"),
        ("init_logit_scale", 1.0),
        ("model_type", "clip"),
        ("vision_cfg__global_average_pool", True),
        ("vision_cfg__attentional_pool", True),
        ("vision_cfg__input_patchnorm", True),
        ("vision_cfg__timm_model_name", "vit"),
        ("vision_cfg__pool_type", "avg"),
        ("text_cfg__embed_cls", True),
        ("text_cfg__hf_model_name", "bert"),
        ("text_cfg__no_causal_mask", True),
    ],
)
def test_a_key_that_would_be_left_out_is_refused(tmp_path, hub, key, value):
    small_released(tmp_path, **{key: value})
    hub.add("me/small", {"config.json": tmp_path / "config.json", "model.safetensors": b"x"})
    for name in (f"local-dir:{tmp_path}", "hf-hub:me/small"):
        with pytest.raises((RuntimeError, ValueError), match=key.replace("__", ".")):
            open_clip.create_model(name, load_weights=False)


@pytest.mark.parametrize("imports", ["import open_clip", "import open_clip, pcmepp_openclip"])
def test_why_the_hub_gave_nothing_is_said_for_any_model(imports):
    """Stock models too: their error is open_clip's, with all that led to it."""
    done = run_python("-c", f"{imports}; open_clip.create_model('hf-hub:me/other')", env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and "OfflineModeIsEnabled" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: Failed initial config/weights load")
    assert "(open_clip_config.json) for me/other" in done.stderr.splitlines()[-1]


def test_a_folder_without_weights(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(RuntimeError, match=r"Cannot load .*model.safetensors"):
        open_clip.create_model(f"local-dir:{tmp_path}")


def test_a_damaged_released_file(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    content = (folder / "model.safetensors").open("rb").read(1_000_000)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"Cannot load .*model.safetensors"):
        open_clip.create_model(f"local-dir:{tmp_path}")


# `pcmepp convert`

STOCK = """
import sys, json, open_clip, torch
from safetensors.torch import load_file
name, file, source = sys.argv[1:]
assert "pcmepp_openclip" not in sys.modules and not any(m.startswith("PCMEpp") for m in open_clip.list_models())
if name.endswith(".json"):
    open_clip.add_model_config(name)
    name = "plain-tiny"
model = open_clip.create_model(name, pretrained=file)
assert type(model) is open_clip.CLIP
tensors = load_file(source)
assert all(torch.equal(value, tensors[key]) for key, value in model.state_dict().items())
print(len(model.state_dict()), "loaded")
"""


def test_convert_gives_a_file_for_stock_open_clip(folder, tmp_path):
    source, target = str(folder / "model.safetensors"), str(tmp_path / "clip.safetensors")
    done = run_python("-m", "pcmepp_openclip.cli", "convert", source, target)
    assert done.returncode == 0, done.stderr
    assert "302 tensors of a plain open_clip model, without 52 tensors that only PCME++ has." in done.stdout
    dropped = set(released_shapes()) - set(load_file(target))
    assert len(dropped) == 52 and {"shift", "negative_scale", "visual.uncertainty_proj"} <= dropped
    assert run_code(STOCK, "ViT-B-16", target, source, path="").strip() == "302 loaded"


def converted(*args) -> tuple[int, str]:
    from pcmepp_openclip import cli

    return cli.main(["convert", *map(str, args)])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model = open_clip.create_model("PCMEpp-tiny")
    folder = tmp_path_factory.mktemp("small")
    state_dict = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state_dict, folder / "model.safetensors")
    prefixed = {f"module.{name}": tensor for name, tensor in state_dict.items()}
    torch.save({"epoch": 1, "state_dict": prefixed, "optimizer": {}}, folder / "epoch_1.pt")
    return folder, model


@pytest.mark.parametrize("source", ["model.safetensors", "epoch_1.pt"])
@pytest.mark.parametrize("target", ["clip.pt", "clip.safetensors"])
def test_convert_between_kinds_of_files(small, source, target, tmp_path, capsys):
    folder, model = small
    assert converted(folder / source, tmp_path / target) == 0
    assert "tensors that only PCME++ has" in capsys.readouterr().out
    plain = open_clip.CLIP(**plain_config("PCMEpp-tiny"))
    open_clip.load_checkpoint(plain, str(tmp_path / target), strict=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in plain.state_dict().items())


def test_convert_says_what_is_wrong(small, tmp_path, capsys):
    folder, _ = small
    source = folder / "model.safetensors"

    def complaint(*args) -> str:
        assert converted(*args) == 2
        error = capsys.readouterr().err
        assert error.startswith("pcmepp convert: ") and error.count("\n") == 1
        return error

    (tmp_path / "there.pt").write_bytes(b"mine")
    assert "there.pt exists: name another file or add --overwrite" in complaint(source, tmp_path / "there.pt")
    assert (tmp_path / "there.pt").read_bytes() == b"mine"
    assert "no such file" in complaint(tmp_path / "nothing.pt", tmp_path / "x.pt")
    assert "must end in .safetensors or .pt" in complaint(source, tmp_path / "x.ckpt")
    assert "not a checkpoint" in complaint(tmp_path / "there.pt", tmp_path / "x.pt")
    assert "x.pt" in complaint(source, tmp_path / "no" / "such" / "folder" / "x.pt")
    converted(source, tmp_path / "plain.pt")
    capsys.readouterr()
    assert "has no log-variance branch" in complaint(tmp_path / "plain.pt", tmp_path / "again.pt")
    assert converted(source, tmp_path / "there.pt", "--overwrite") == 0


def test_convert_in_place(small, tmp_path):
    """The source is mapped into memory while the target is written: they may be one file."""
    folder, model = small
    file = tmp_path / "model.safetensors"
    file.write_bytes((folder / "model.safetensors").read_bytes())
    assert converted(file, file, "--overwrite") == 0
    tensors = load_file(file)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in tensors.items())
    assert "shift" not in tensors


def test_the_file_made_here_is_fp32_safetensors(folder):
    with (folder / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    assert kinds == {"F32"} and os.path.getsize(folder / "model.safetensors") > 4 * 170_756_611
