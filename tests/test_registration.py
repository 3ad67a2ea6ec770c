"""What `import pcmepp_openclip` does to open_clip, and what it leaves alone."""

import importlib
import json

import open_clip
import pytest
import torch
from helpers import REPO, make_batch, make_model, plain_config, run_code

import pcmepp_openclip

NAMES = ["PCMEpp-ViT-B-16", "PCMEpp-ViT-B-16-unc2", "PCMEpp-ViT-B-32", "PCMEpp-ViT-L-14", "PCMEpp-tiny"]
NAMES += ["PCMEpp-GPO-ViT-B-16", "PCMEpp-GPO-ViT-B-32", "PCMEpp-GPO-ViT-L-14", "PCMEpp-GPO-tiny"]
NAMES += ["PCMEpp-GPO-ViT-B-32-unc2", "PCMEpp-GPO-tiny-unc2"]
BASES = {
    "PCMEpp-ViT-B-16": "ViT-B-16",
    "PCMEpp-ViT-B-16-unc2": "ViT-B-16",
    "PCMEpp-ViT-B-32": "ViT-B-32",
    "PCMEpp-ViT-L-14": "ViT-L-14",
    "PCMEpp-GPO-ViT-B-16": "ViT-B-16",
    "PCMEpp-GPO-ViT-B-32": "ViT-B-32",
    "PCMEpp-GPO-ViT-B-32-unc2": "ViT-B-32",
    "PCMEpp-GPO-ViT-L-14": "ViT-L-14",
}
RELEASED = {"cc3m_cc12m_redcaps", "cc3m_cc12m_redcaps_256m"}


def test_list_models():
    models = open_clip.list_models()
    assert sorted(name for name in models if name.startswith("PCMEpp")) == sorted(NAMES)
    assert len(models) == len(set(models))


@pytest.mark.parametrize("name", NAMES)
def test_the_config_is_the_file_s(name):
    assert open_clip.get_model_config(name) == json.loads((REPO / "model_configs" / f"{name}.json").read_text())


@pytest.mark.parametrize("name, base", BASES.items())
def test_the_plain_part_of_a_config_is_the_plain_model_s(name, base):
    own = {"embed_dim": 1024} if "GPO" in name else {}  # its projections are not the plain model's
    assert plain_config(name) == {**open_clip.get_model_config(base), **own}


@pytest.mark.parametrize("name, base", BASES.items())
def test_pretrained_tags_are_the_plain_model_s(name, base):
    own = RELEASED if name == "PCMEpp-ViT-B-16-unc2" else set()
    assert set(open_clip.list_pretrained_tags_by_model(name)) == {*open_clip.list_pretrained_tags_by_model(base), *own}
    for tag in open_clip.list_pretrained_tags_by_model(base):
        assert (name, tag) in open_clip.list_pretrained()
        assert open_clip.get_pretrained_cfg(name, tag) == open_clip.get_pretrained_cfg(base, tag)


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer(name):
    length = open_clip.get_model_config(name)["text_cfg"]["context_length"]
    tokens = open_clip.get_tokenizer(name)(["a dog", "a cat"])
    assert torch.equal(tokens, open_clip.tokenize(["a dog", "a cat"], context_length=length))


def test_create_model_and_transforms():
    model, train, evaluation = open_clip.create_model_and_transforms("PCMEpp-tiny")
    assert type(model) is pcmepp_openclip.PCMEppCLIP
    from PIL import Image

    picture = Image.new("RGB", (50, 40), "red")
    assert train(picture).shape == evaluation(picture).shape == (3, 32, 32)


def test_create_model_from_pretrained_with_a_file(tmp_path):
    source = make_model("PCMEpp-tiny")
    torch.save(source.state_dict(), tmp_path / "model.pt")
    model, preprocess = open_clip.create_model_from_pretrained("PCMEpp-tiny", str(tmp_path / "model.pt"))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in model.state_dict().items())
    assert "Normalize" in repr(preprocess)
    image, _ = make_batch(model)
    assert torch.equal(model.encode_image_gaussian(image).logvar, source.encode_image_gaussian(image).logvar)


def test_classes():
    model = open_clip.create_model("PCMEpp-tiny")
    for kind in (open_clip.CLIP, open_clip.factory.CLIP, open_clip.model.CLIP):
        assert isinstance(model, kind) and issubclass(pcmepp_openclip.PCMEppCLIP, kind)
        assert issubclass(open_clip.CLIP, kind)
    assert not isinstance(model, open_clip.factory.CustomTextCLIP)
    assert not issubclass(pcmepp_openclip.PCMEppCLIP, open_clip.factory.CoCa)
    assert open_clip.factory.CLIP.__name__ == "CLIP"


def test_importing_and_registering_again_changes_nothing():
    seams = ("CLIP", "CustomTextCLIP", "CoCa", "get_model_config", "load_checkpoint", "convert_state_dict")
    before = [getattr(open_clip.factory, name) for name in seams], open_clip.list_models()
    again = importlib.reload(pcmepp_openclip)
    assert again is pcmepp_openclip
    assert before == ([getattr(open_clip.factory, name) for name in seams], open_clip.list_models())
    assert type(open_clip.create_model("PCMEpp-tiny")) is again.PCMEppCLIP


def test_later_configs_of_the_user_s_own(tmp_path):
    config = open_clip.get_model_config("PCMEpp-tiny")
    config["pcmepp_cfg"]["head_layers"] = 2
    (tmp_path / "my-own-model.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "my-own-model.json")
    try:
        model = open_clip.create_model("my-own-model")
        assert type(model) is pcmepp_openclip.PCMEppCLIP and model.pcmepp_cfg.head_layers == 2
        assert set(NAMES) <= set(open_clip.list_models())
    finally:
        open_clip.factory._MODEL_CONFIG_PATHS.remove(tmp_path / "my-own-model.json")
        open_clip.factory._MODEL_CONFIGS.pop("my-own-model")


PLAIN_MODELS = """
import hashlib, torch
torch.set_num_threads(1)
def digest(name, **kwargs):
    torch.manual_seed(0)
    model, _, preprocess = open_clip.create_model_and_transforms(name, **kwargs)
    out = model(torch.ones(1, 3, 224, 224), open_clip.get_tokenizer(name)(["a dog"]))
    hash = hashlib.sha256()
    for value in [*model.state_dict().values(), *out]:
        hash.update(value.detach().contiguous().numpy().tobytes())
    print(type(model).__module__, type(model).__name__, hash.hexdigest(), repr(preprocess).replace("\\n", ""))
digest("ViT-B-32")
print(sorted(set(open_clip.list_models()) - PCMEPP), open_clip.list_pretrained_tags_by_model("ViT-B-32"))
"""


def test_plain_models_are_the_same_to_the_bit_and_the_order_of_imports_does_not_matter():
    without = run_code("import open_clip; PCMEPP = set()\n" + PLAIN_MODELS)
    names = f"PCMEPP = {set(NAMES)}\nassert PCMEPP <= set(open_clip.list_models())\n"
    check = "assert type(create_model('PCMEpp-tiny')).__name__ == 'PCMEppCLIP'\n"
    after = "import open_clip; from open_clip import create_model; import pcmepp_openclip, pcmepp_openclip\n"
    before = "import pcmepp_openclip; import open_clip; from open_clip import create_model\n"
    assert "open_clip.model CLIP " in without
    assert run_code(after + names + check + PLAIN_MODELS) == without
    run_code(before + names + check)
