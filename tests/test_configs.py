"""Configs: mistakes in them, in names, and in what is passed to a model are told in one clear sentence."""

import json

import hub_kinds
import open_clip
import pytest
import torch
from helpers import make_batch, mini_config

from pcmepp_openclip import PCMEppCfg, PCMEppCLIP

GOOD = {"head_layers": 1, "init_logvar_bias": -4.0}


def one_sentence(error) -> str:
    message = str(error.value)
    assert "\n" not in message and message.endswith((".", "?")), message
    return message


@pytest.mark.parametrize(
    "block, words",
    [
        ({**GOOD, "head_layer": 1}, ["head_layer'", "did you mean 'head_layers'"]),
        ({**GOOD, "xyz": 1}, ["'xyz'", "known keys: head_layers"]),
        ({"init_logvar_bias": -4}, ["lacks 'head_layers'"]),
        ({"head_layers": 1}, ["lacks 'init_logvar_bias'"]),
        ({**GOOD, "head_layers": 0}, ["head_layers", "0"]),
        ({**GOOD, "head_layers": 1.0}, ["head_layers", "1.0"]),
        ({**GOOD, "head_layers": True}, ["head_layers", "True"]),
        ({**GOOD, "head_layers": "1"}, ["head_layers", "'1'"]),
        ({**GOOD, "head_layers": None}, ["head_layers", "None"]),
        ({**GOOD, "head_layers": 3}, ["head_layers", "below the 3 layers of the image tower"]),
        ({**GOOD, "init_logvar_bias": "low"}, ["init_logvar_bias", "'low'"]),
        ({**GOOD, "init_logvar_bias": float("nan")}, ["init_logvar_bias", "nan"]),
        ({**GOOD, "init_match_scale": 0}, ["init_match_scale", "positive"]),
        ({**GOOD, "init_match_scale": None}, ["init_match_scale", "None"]),
        ({**GOOD, "init_match_shift": float("inf")}, ["init_match_shift", "inf"]),
        ({**GOOD, "init_match_shift": [1]}, ["init_match_shift", "[1]"]),
        ({**GOOD, "vib_weight": -1e-6}, ["vib_weight", "at least 0"]),
        (
            {**GOOD, "contrastive_weight": 0, "match_weight": 0, "vib_weight": 0},
            ["every loss term", "nothing to train"],
        ),
        ({**GOOD, "match_weight": False}, ["match_weight", "False"]),
        ({**GOOD, "pp_weight": "0"}, ["pp_weight", "'0'"]),
        ([1], ["JSON object", "list"]),
        (None, ["JSON object", "NoneType"]),
    ],
)
def test_a_mistake_in_the_block_names_the_key(block, words):
    with pytest.raises(ValueError, match="pcmepp_cfg") as error:
        open_clip.create_model("PCMEpp-tiny", pcmepp_cfg=block)
    message = one_sentence(error)
    assert all(word in message for word in words), message


def test_every_key_is_optional_or_checked():
    cfg = PCMEppCfg.parse(
        {**GOOD, "init_match_scale": 5, "init_match_shift": -5, "match_weight": 2, "vib_weight": 1e-4, "pp_weight": 0.1}
    )
    assert (cfg.init_match_scale, cfg.init_match_shift) == (5, -5)
    assert cfg.weights == {"match_weight": 2, "vib_weight": 1e-4, "pp_weight": 0.1}
    assert PCMEppCfg.parse({"head_layers": 2, "init_logvar_bias": None}).init_logvar_bias is None


@pytest.mark.parametrize(
    "name, near",
    [
        *(("PCMEpp-ViT-B16", "PCMEpp-ViT-B-16"), ("pcmepp-tiny", "PCMEpp-tiny"), ("PCMEpp-RN-50", "PCMEpp-RN50")),
        *(("PCMEpp-convnext_tinny", "PCMEpp-convnext_tiny"), ("PCMEpp-roberta-B-32", "PCMEpp-roberta-ViT-B-32")),
    ],
)
def test_a_wrong_model_name(name, near):
    for call in (open_clip.create_model, open_clip.get_tokenizer, open_clip.create_model_and_transforms):
        with pytest.raises(RuntimeError, match=f"There is no model '{name}': did you mean '{near}'") as error:
            call(name)
        one_sentence(error)


def test_a_wrong_name_of_another_kind_is_open_clip_s_own_error():
    with pytest.raises(RuntimeError, match="Model config for 'ViT-B-33' not found"):
        open_clip.create_model("ViT-B-33")


def test_a_wrong_tag():
    with pytest.raises(RuntimeError, match="'no_such_tag' is not a known tag or valid file path"):
        open_clip.create_model("PCMEpp-tiny", pretrained="no_such_tag")


@pytest.fixture
def add_config(tmp_path):
    """Registers a config of open_clip under a name for the length of a test."""

    def add(name: str, config: dict) -> str:
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        open_clip.add_model_config(tmp_path / f"{name}.json")
        return name

    return add


def test_a_config_of_ours_without_its_block(add_config):
    config = mini_config()
    config.pop("pcmepp_cfg")
    add_config("PCMEpp-mine", config)
    with pytest.raises(ValueError, match="The config of 'PCMEpp-mine' lacks its pcmepp_cfg block") as error:
        open_clip.create_model("PCMEpp-mine")
    one_sentence(error)


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("vision_cfg", {"timm_model_name": "vit_tiny"}, "names a timm model, .*set pcmepp_cfg.image_head to 'top'"),
        ("vision_cfg", {"layers": [1, 1, 1, 1]}, "that of a ResNet, .*set pcmepp_cfg.image_head to 'top'"),
        ("vision_cfg", {"pool_type": "none"}, "vision_cfg.pool_type of 'tok' or 'avg', not 'none'"),
        ("vision_cfg", {"output_tokens": True}, "vision_cfg.output_tokens"),
        ("vision_cfg", {"no_such_key": 1}, "vision_cfg.*no_such_key"),
        ("text_cfg", {"pool_type": "none"}, "text_cfg.pool_type of 'argmax' or 'eos' or 'first' or 'last', not 'none'"),
        ("text_cfg", {"output_tokens": True}, "text_cfg.output_tokens"),
        ("text_cfg", {"embed_cls": True}, "text_cfg.embed_cls"),
        ("text_cfg", {"no_such_key": 1}, "text_cfg.*no_such_key"),
        ("text_cfg", {"hf_model_name": "roberta-base"}, "Hugging Face model, .*set pcmepp_cfg.text_head to 'top'"),
    ],
)
def test_towers_that_cannot_be_split(part, change, words):
    config = mini_config()
    config[part] |= change
    with pytest.raises(ValueError, match=words) as error:
        PCMEppCLIP(**config)
    assert "\n" not in str(error.value)


def test_a_model_that_writes_captions_is_refused(add_config):
    name = add_config("mine-coca", {**mini_config(), "custom_text": True, "multimodal_cfg": {}})
    with pytest.raises(ValueError, match="cannot be a CoCa, which also learns to write captions") as error:
        open_clip.create_model(name)
    one_sentence(error)
    with pytest.raises(ValueError, match="There is no 'PCMEpp-coca_base': coca_base is a CoCa") as error:
        open_clip.create_model("PCMEpp-coca_base")
    one_sentence(error)


FILES = {  # the model of the file, and what is said when a small ResNet is to load it
    "PCMEpp-small-timm": "it lacks .*visual.bn1.*unknown tensors: visual.trunk",
    "PCMEpp-small-custom": "it lacks positional_embedding.*; use the model config",
    "PCMEpp-tiny": "it lacks visual.bn1.*unknown tensors: visual.class_embedding",  # and its branch is of another place
}


@pytest.mark.parametrize("other, words", FILES.items())
def test_a_file_of_another_tower(other, words, tmp_path):
    hub_kinds.add_configs(tmp_path / "configs")
    torch.save(open_clip.create_model(other).state_dict(), tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match=f"Cannot load .*other.pt: it is of another architecture: {words}") as error:
        open_clip.create_model("PCMEpp-small-resnet", pretrained=str(tmp_path / "other.pt"))
    one_sentence(error)


WRONG_IMAGES = {
    "one image": (torch.zeros(3, 32, 32), r"\[N, 3, 32, 32\], not \[3, 32, 32\]"),
    "grey": (torch.zeros(2, 1, 32, 32), r"\[N, 3, 32, 32\], not \[2, 1, 32, 32\]"),
    "other size": (torch.zeros(2, 3, 64, 64), r"\[N, 3, 32, 32\], not \[2, 3, 64, 64\]"),
    "bytes": (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "of floats .* not torch.uint8"),
    "double": (torch.zeros(2, 3, 32, 32, dtype=torch.float64), "torch.float64 but the model is torch.float32"),
    "array": (torch.zeros(2, 3, 32, 32).numpy(), "must be a tensor"),
}
WRONG_TEXTS = {
    "one text": (torch.zeros(32, dtype=torch.int64), r"token ids \[N, L\] with L at most 32, not \[32\]"),
    "too long": (torch.zeros(2, 33, dtype=torch.int64), r"at most 32, not \[2, 33\]"),
    "no tokens": (torch.zeros(2, 0, dtype=torch.int64), r"not \[2, 0\]"),
    "floats": (torch.zeros(2, 32), "int32 or int64 token ids .* not torch.float32"),
    "bytes": (torch.zeros(2, 32, dtype=torch.uint8), "not torch.uint8"),
    "strings": (["a dog", "a cat"], "use the tokenizer"),
}


@pytest.mark.parametrize("case", WRONG_IMAGES)
def test_wrong_images(tiny, case):
    image, words = WRONG_IMAGES[case]
    for call in (tiny, tiny.encode_image, tiny.encode_image_gaussian):
        with pytest.raises(ValueError, match=words) as error:
            call(image)
        one_sentence(error)


@pytest.mark.parametrize("case", WRONG_TEXTS)
def test_wrong_texts(tiny, case):
    text, words = WRONG_TEXTS[case]
    image, _ = make_batch(tiny, samples=2)
    for call in (tiny.encode_text, tiny.encode_text_gaussian, lambda t: tiny(image, t)):
        with pytest.raises(ValueError, match=words) as error:
            call(text)
        one_sentence(error)
    with pytest.raises(ValueError, match=words):
        tiny.forward_intermediates(text=text)


def test_int32_and_int64_tokens_are_the_same(tiny):
    _, text = make_batch(tiny)
    assert torch.equal(tiny.encode_text(text.int()), tiny.encode_text(text.long()))
