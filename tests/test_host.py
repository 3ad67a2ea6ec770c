"""An open_clip that the plugin was not written for: it says so, with the version found and the cure.

The cases are made from the plugin's own tables of the names and attributes that it relies on, each of which is removed
in turn."""

import operator
import pkgutil

import open_clip
import pytest
from helpers import run_code

from pcmepp_openclip import cli
from pcmepp_openclip.host import flags, seams, trainer

VERSION = "3.9.1"  # in the supported range, and not the tested one
CURE = f"run pip install 'open_clip_torch[training]=={seams.TESTED}'"


@pytest.fixture
def other_version(monkeypatch):
    monkeypatch.setattr(open_clip, "__version__", VERSION)


@pytest.mark.parametrize("version", ["2.32.0", "3.2.9", "5.0.0", "main"])
def test_another_version(monkeypatch, version):
    """What is imported counts, not what is installed: the metadata tell of a version that is fine."""
    monkeypatch.setattr(open_clip, "__version__", version)
    with pytest.raises(ImportError) as error:
        seams.check_version()
    cure = "run pip install 'open_clip_torch[training]>=3.3,<5'"
    assert str(error.value) == f"pcmepp_openclip needs open_clip_torch >=3.3,<5, found {version}: {cure}"


IMPORTS = """
import os, sys, open_clip, open_clip_train.zero_shot
for change, module in CASES:
    if (pid := os.fork()) == 0:
        exec(change)
        try:
            __import__(module)
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_importing_the_plugin_checks_the_version_and_the_names():
    cases = [
        ("open_clip.__version__ = '2.32.0'", "pcmepp_openclip"),
        ("del open_clip.factory.CustomTextCLIP", "pcmepp_openclip"),
        ("del open_clip_train.zero_shot.zero_shot_eval", "pcmepp_openclip.training.command"),
    ]
    version, name, name_in_training = run_code(f"CASES = {cases}\n{IMPORTS}").splitlines()
    assert "found 2.32.0" in version
    assert "has no open_clip.factory.CustomTextCLIP" in name and CURE in name
    assert "has no open_clip_train.zero_shot.zero_shot_eval" in name_in_training and CURE in name_in_training


def test_the_tested_version_is_the_installed_one():
    """The cure is the version that these tests run with."""
    assert open_clip.__version__ == seams.TESTED or open_clip.__version__.startswith("4.")


def test_a_missing_name(monkeypatch, other_version):
    tables = [*seams.REPLACED, *seams.USED, *seams.USED_IN_TRAINING]
    assert len(tables) > 50
    for holder, name in tables:
        with monkeypatch.context() as patch, pytest.raises(ImportError) as error:
            patch.delattr(pkgutil.resolve_name(holder), name)
            seams.check_names(tables)
        assert str(error.value).startswith(f"open_clip_torch {VERSION} has no {holder}.{name}, which pcmepp_openclip")
        assert str(error.value).endswith(CURE)


@pytest.fixture(scope="module")
def models():
    """One model with each kind of tower that open_clip makes without a download."""
    small = open_clip.get_model_config("PCMEpp-tiny")
    top = {"pcmepp_cfg": {**small["pcmepp_cfg"], "image_head": "top"}}
    resnet = {**small["vision_cfg"], "layers": [1, 1, 1, 1], "patch_size": None}
    timm = {"timm_model_name": "vit_pe_core_tiny_patch16_384", "image_size": 32, "timm_pool": "map", "timm_proj": None}
    return [
        open_clip.create_model("PCMEpp-tiny"),
        open_clip.create_model("PCMEpp-tiny", force_custom_text=True),
        open_clip.create_model("PCMEpp-tiny", vision_cfg=resnet, **top),
        open_clip.create_model("PCMEpp-tiny", vision_cfg=timm, **top),
    ]


def test_a_missing_attribute_of_the_model(monkeypatch, models, other_version):
    untried = {row for row in seams.ATTRIBUTES if row[0] != "HFTextEncoder"}
    for model in models:
        seams.check_attributes(model)
        for module in model.modules():
            kinds = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(seams.PACKAGES)}
            for kind, path in [row for row in untried if row[0] in kinds]:
                untried.remove((kind, path))
                holder, _, name = path.rpartition(".")
                holder = operator.attrgetter(holder)(module) if holder else module
                with monkeypatch.context() as patch, pytest.raises(ImportError) as error:
                    remove(patch, holder, name)
                    seams.check_attributes(model)
                message = str(error.value)
                assert message.startswith(f"open_clip_torch {VERSION} has no attribute {path} of a {kind}")
                assert message.endswith(CURE)
    assert not untried


def remove(patch, holder, name):
    """Remove an attribute of a module, or a method or property of its class, until the context of `patch` ends."""
    for registry in ("_parameters", "_buffers", "_modules"):
        if name in getattr(holder, registry):
            return patch.delitem(getattr(holder, registry), name)
    if name in vars(holder):
        return patch.delitem(vars(holder), name)
    kind = next(kind for kind in type(holder).__mro__ if name in vars(kind))
    return patch.delattr(kind, name)


def test_a_missing_flag(monkeypatch, other_version, capsys):
    stock = trainer.params.parse_args
    argv = ["train", "--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8"]
    for flag in flags.READ:

        def parse_args(argv, flag=flag):
            args = stock(argv)
            delattr(args, flag)
            return args

        monkeypatch.setattr(trainer.params, "parse_args", parse_args)
        assert cli.main(argv) == 1
        said, name = capsys.readouterr().err, flag.replace("_", "-")
        assert f"pcmepp train: open_clip_torch {VERSION} has no flag --{name}, which pcmepp_openclip" in said
        assert CURE in said
