"""What `import pcmepp_openclip` does to open_clip, and what it leaves alone."""

import importlib
import json
from pathlib import Path

import open_clip
import pytest
import torch
from helpers import REPO, plain_config, run_code

import pcmepp_openclip
from pcmepp_openclip.host import seams

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


def test_the_readme_counts_what_importing_replaces():
    assert f"the plugin wraps {len(seams.REPLACED)} functions and classes" in (REPO / "README.md").read_text()


def test_configs_and_tokenizers_are_those_of_the_files():
    for name in NAMES:
        assert open_clip.get_model_config(name) == json.loads((REPO / "model_configs" / f"{name}.json").read_text())
        length = open_clip.get_model_config(name)["text_cfg"]["context_length"]
        tokens = open_clip.get_tokenizer(name)(["a dog", "a cat"])
        assert torch.equal(tokens, open_clip.tokenize(["a dog", "a cat"], context_length=length))


@pytest.mark.parametrize("name, base", BASES.items())
def test_the_plain_part_of_a_config_and_its_tags_are_the_plain_model_s(name, base):
    own = {"embed_dim": 1024} if "GPO" in name else {}  # its projections are not the plain model's
    assert plain_config(name) == {**open_clip.get_model_config(base), **own}
    tags = open_clip.list_pretrained_tags_by_model(base)
    released = RELEASED if name == "PCMEpp-ViT-B-16-unc2" else set()
    assert set(open_clip.list_pretrained_tags_by_model(name)) == {*tags, *released}
    for tag in tags:
        assert (name, tag) in open_clip.list_pretrained()
        assert open_clip.get_pretrained_cfg(name, tag) == open_clip.get_pretrained_cfg(base, tag)


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
import hashlib, open_clip, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model, _, preprocess = open_clip.create_model_and_transforms("ViT-S-32-alt")
out = model(torch.ones(1, 3, 224, 224), open_clip.get_tokenizer("ViT-S-32-alt")(["a dog"]))
digest = hashlib.sha256()
for value in [*model.state_dict().values(), *out]:
    digest.update(value.detach().contiguous().numpy().tobytes())
print(type(model).__module__, type(model).__name__, digest.hexdigest(), repr(preprocess).replace("\\n", ""))
print([name for name in open_clip.list_models() if not name.startswith("PCMEpp")])
print(open_clip.list_pretrained_tags_by_model("ViT-B-32"))
"""


def test_plain_models_are_the_same_to_the_bit(capsys, monkeypatch):
    """In this process, in which open_clip knows the plugin, and in one that has never imported it."""
    files = Path(open_clip.__file__).with_name("model_configs").glob("*.json")
    known = {*NAMES, *(path.stem for path in files)}  # other tests have added models of their own
    configs = {name: config for name, config in open_clip.factory._MODEL_CONFIGS.items() if name in known}
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", configs)
    exec(PLAIN_MODELS, {})
    ours = capsys.readouterr().out
    assert "open_clip.model CLIP " in ours and run_code(PLAIN_MODELS) == ours
