"""Models of repos and folders: offline, without the plugin, with a tokenizer of their own; and repos that mean harm."""

import copy
import json
import os

import open_clip
import pytest
import torch
from helpers import run_python
from hub_helpers import assert_same_outputs
from huggingface_hub import constants
from open_clip.tokenizer import HFTokenizer

import pcmepp_openclip
from pcmepp_openclip import cli
from pcmepp_openclip.models.export import export_model


def serve(hub, repo, folder, **changed):
    """The files of a folder as a repo, some of them changed or, with None, left out."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | changed
    hub.add(repo, {name: content for name, content in files.items() if content is not None})


def test_offline_from_the_cache(guarded, exported, tiny_model, monkeypatch):
    assert cli.main(["push", str(exported), "me/cached", "--tag", "v1"]) == 0
    assert_same_outputs(open_clip.create_model("hf-hub:me/cached@v1"), tiny_model)
    guarded.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, _ = open_clip.create_model_from_pretrained("hf-hub:me/cached@v1")
    assert_same_outputs(model, tiny_model)
    assert open_clip.get_tokenizer("hf-hub:me/cached@v1")(["a dog"]).shape == (1, 32)
    with pytest.raises(RuntimeError, match="me/never"):
        open_clip.create_model("hf-hub:me/never")
    assert guarded.requests == []


def test_without_the_plugin_open_clip_says_what_the_card_quotes(hub, exported):
    serve(hub, "me/bare", exported)
    done = run_python("-c", "import open_clip; open_clip.create_model('hf-hub:me/bare')", path="")
    assert done.returncode and "unexpected keyword argument 'pcmepp_cfg'" in done.stderr


def test_flags_of_training_are_part_of_the_export(tmp_path):
    model = open_clip.create_model("PCMEpp-tiny", force_image_size=(24, 40), force_context_length=12)
    export_model(model, tmp_path, "PCMEpp-tiny")
    again, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    assert list(again.visual.image_size) == [24, 40] and again.context_length == 12 and "40" in repr(preprocess)
    assert_same_outputs(again, model)
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path}")(["a"]).shape == (1, 12)
    with pytest.raises(ValueError, match="There is no model config 'no-such-model'"):
        export_model(model, tmp_path, "no-such-model")


def test_a_plain_model_goes_the_stock_way(hub, tmp_path):
    config = open_clip.get_model_config("PCMEpp-tiny")
    del config["pcmepp_cfg"]
    plain = open_clip.CLIP(**copy.deepcopy(config))
    open_clip.model.set_model_preprocess_cfg(plain, open_clip.create_model("PCMEpp-tiny").visual.preprocess_cfg)
    export_model(plain, tmp_path, config)
    for name in (f"local-dir:{tmp_path}", "hf-hub:me/plain", "hf-hub:me/plain@main"):
        serve(hub, "me/plain", tmp_path)
        loaded = open_clip.create_model(name)
        assert type(loaded) is open_clip.CLIP
        assert all(
            torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), plain.state_dict().values(), strict=True)
        )


# A tokenizer of its own.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "dog", "[EOS]"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    place = tmp_path_factory.mktemp("home-of-someone") / "tokenizer"
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")
    fast.save_pretrained(place)
    return HFTokenizer(str(place), context_length=32)


def test_a_tokenizer_of_its_own(guarded, tiny_model, tokenizer, tmp_path):
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["text_cfg"]["hf_tokenizer_name"] = tokenizer.tokenizer.name_or_path
    folder = export_model(tiny_model, tmp_path / "exported", config, tokenizer=tokenizer)
    expected = tokenizer(["a dog", "a cat"])
    assert torch.equal(open_clip.get_tokenizer(f"local-dir:{folder}")(["a dog", "a cat"]), expected)
    assert cli.main(["push", str(folder), "me/words"]) == 0
    guarded.add("me/words", {"tokenizer.py": b"raise SystemExit", "custom.py": b"raise SystemExit"})
    guarded.requests.clear()
    assert torch.equal(open_clip.get_tokenizer("hf-hub:me/words")(["a dog", "a cat"]), expected)
    assert not any(".py" in r.path for r in guarded.requests)
    assert all(b"home-of-someone" not in content for content in guarded.files("me/words").values())
    assert_same_outputs(open_clip.create_model("hf-hub:me/words"), tiny_model)


def test_a_tokenizer_that_is_not_there(hub, exported):
    config = json.loads((exported / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "someone/else"
    serve(hub, "me/wordless", exported, **{"open_clip_config.json": json.dumps(config).encode()})
    with pytest.raises(ValueError, match="names a tokenizer of its own but holds no files of one"):
        open_clip.get_tokenizer("hf-hub:me/wordless")
    assert not any("someone" in r.path for r in hub.requests)


@pytest.mark.parametrize("kind", ["plain", "pcmepp"])
def test_a_folder_names_the_tokenizer_file_that_is_missing(exported, kind):
    """With its settings alone, the library makes a tokenizer that knows no word."""
    config = json.loads((exported / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "own"
    if kind == "plain":
        del config["model_cfg"]["pcmepp_cfg"]
    (exported / "open_clip_config.json").write_text(json.dumps(config))
    for settings in (None, '{"tokenizer_class": "RobertaTokenizer"}'):
        if settings:
            (exported / "tokenizer_config.json").write_text(settings)
        with pytest.raises(ValueError, match=r"tokenizer\.json is missing") as error:
            open_clip.get_tokenizer(f"local-dir:{exported}")
        assert str(exported) in str(error.value)


# Weights that are not there, or not safe.


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_repo_without_safetensors_is_no_random_model(pickled, hub, exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Evil()}, tmp_path / "evil")
    files = {"open_clip_model.safetensors": None}
    if pickled:
        files["open_clip_pytorch_model.bin"] = (tmp_path / "evil").read_bytes()
    serve(hub, f"me/empty{pickled}", exported, **files)
    with pytest.raises(RuntimeError, match=rf"Cannot load hf-hub:me/empty{pickled}/.*no weights in safetensors"):
        open_clip.create_model(f"hf-hub:me/empty{pickled}")
    assert not any(".bin" in r.path for r in hub.requests) and not (tmp_path / "evil-was-here").exists()
    assert open_clip.create_model(f"hf-hub:me/empty{pickled}", load_weights=False) is not None


def test_a_folder_without_weights_is_no_random_model(exported):
    (exported / "open_clip_model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"Cannot load .*the folder holds no weights"):
        open_clip.create_model(f"local-dir:{exported}")
    assert open_clip.create_model(f"local-dir:{exported}", load_weights=False) is not None
    assert open_clip.get_tokenizer(f"local-dir:{exported}")(["a"]).shape == (1, 32)


def test_a_download_that_fails_says_why(hub, exported):
    serve(hub, "me/broken", exported)
    hub.fail("/resolve/.*safetensors", status=403, message="not for you")
    with pytest.raises(RuntimeError, match=r"Cannot load hf-hub:me/broken/.*not for you"):
        open_clip.create_model("hf-hub:me/broken")


# Configs that nothing must be built of.

HUGE = 10**9
BAD = {
    "unknown key": (["model_cfg", "backdoor"], 1, "model_cfg has an unknown key 'backdoor'"),
    "unknown at the top": (["extra"], {}, "it has an unknown key 'extra'"),
    "unknown in vision": (["model_cfg", "vision_cfg", "layer"], 4, "unknown key 'layer'; did you mean 'layers'"),
    "unknown in text": (["model_cfg", "text_cfg", "x"], 4, "text_cfg has an unknown key"),
    "unknown in pcmepp": (["model_cfg", "pcmepp_cfg", "head_layer"], 4, "did you mean 'head_layers'"),
    "wide": (["model_cfg", "vision_cfg", "width"], HUGE, "do not go together"),
    "deep": (["model_cfg", "text_cfg", "layers"], HUGE, "layers must be a whole number"),
    "vocabulary": (["model_cfg", "text_cfg", "vocab_size"], HUGE, "parameters, more than"),
    "pixels": (["model_cfg", "vision_cfg", "image_size"], [HUGE, 32], "image_size must be a whole number from 1 to"),
    "dimensions": (["model_cfg", "embed_dim"], HUGE, "parameters, more than"),
    "text for a number": (["model_cfg", "text_cfg", "heads"], "4", "heads must be a whole number"),
    "mlp": (["model_cfg", "vision_cfg", "mlp_ratio"], 1e12, "parameters, more than"),
    "together": (
        ["model_cfg", "vision_cfg"],
        {"image_size": 32, "patch_size": 4, "layers": 250, "width": 16384, "head_width": 64},
        "parameters, more than",
    ),
    "heads": (["model_cfg", "text_cfg", "heads"], 7, "do not go together"),
    "timm": (["model_cfg", "vision_cfg", "timm_model_name"], "hf-hub:evil/x", "timm_model_name names another"),
    "another model": (["model_cfg", "text_cfg", "hf_model_name"], "evil/x", "hf_model_name names another model"),
    "code": (["model_cfg", "text_cfg", "tokenizer_kwargs"], {"trust_remote_code": True}, "unknown key 'trust_remote"),
    "norm": (["model_cfg", "text_cfg", "norm_kwargs"], {"eps": [1]}, "norm_kwargs.eps must be a number"),
    "preprocessing": (["preprocess_cfg", "interpolation"], "evil", "interpolation must be one of"),
    "mask": (["model_cfg", "text_cfg", "context_length"], 65536, "context_length must be a whole number from 1 to"),
    "parameters": (
        ["model_cfg", "text_cfg"],
        {"context_length": 77, "vocab_size": 49408, "width": 8192, "heads": 8, "layers": 24},
        "parameters, more than",
    ),
    "patches": (
        ["model_cfg", "vision_cfg"],
        {"image_size": 1024, "patch_size": 1024, "layers": 2, "width": 16384, "head_width": 64},
        "parameters, more than",
    ),
    "not a number": (["preprocess_cfg", "mean"], [float("nan"), 0.5, 0.5], "mean must be three numbers"),
    "no spread": (["preprocess_cfg", "std"], [0.2, 0.0, 0.2], "std must be positive"),
    "another size": (["preprocess_cfg", "size"], [HUGE, HUGE], "is not the model's image_size"),
    "logit scale": (["model_cfg", "init_logit_scale"], 1e3, "init_logit_scale must be between"),
    "head": (["model_cfg", "pcmepp_cfg", "head_layers"], 99, "head_layers must be below"),
    "no towers": (["model_cfg", "text_cfg"], None, "text_cfg must be an object"),
}


@pytest.mark.parametrize("path, value, words", BAD.values(), ids=[name.replace(" ", "-") for name in BAD])
def test_a_bad_config_is_refused_before_anything_is_built(path, value, words, hub, exported, request):
    config = json.loads((exported / "open_clip_config.json").read_text())
    block = config
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    text = json.dumps(config).encode()
    repo = f"evil/{request.node.callspec.id}"
    hub.add(repo, {"open_clip_config.json": text})
    (exported / "open_clip_config.json").write_bytes(text)
    for name in (f"hf-hub:{repo}", f"local-dir:{exported}"):
        for use in (open_clip.create_model, open_clip.get_tokenizer):
            with pytest.raises((ValueError, RuntimeError)) as error:
                use(name)
            assert words in str(error.value), error.value
    assert not any("safetensors" in r.path or "evil/x" in r.path for r in hub.requests)


def test_every_config_of_ours_passes(tmp_path):
    from pcmepp_openclip.host.config_check import check_config

    paths = list(pcmepp_openclip.MODEL_CONFIGS.glob("*.json"))
    assert sorted(path.stem for path in paths) == sorted(x for x in open_clip.list_models() if x.startswith("PCMEpp"))
    assert "PCMEpp-tiny" in {path.stem for path in paths}
    for path in paths:
        check_config({"model_cfg": json.loads(path.read_text())}, path.name)
