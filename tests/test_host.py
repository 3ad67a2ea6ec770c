"""An open_clip that the plugin was not written for: it says so, with the version found and the cure.

The cases are made from the plugin's own list of the names that it replaces or relies on, each of which is removed in
turn."""

import pkgutil
import subprocess
import sys

import open_clip
import pytest
from helpers import REPO

from pcmepp_openclip import cli
from pcmepp_openclip.host import flags, seams, towers, trainer

VERSION = "3.9.1"  # in the supported range, and not the tested one
CURE = f"run pip install 'open_clip_torch[training]=={seams.TESTED}'"


@pytest.fixture
def other_version(monkeypatch):
    monkeypatch.setattr(open_clip, "__version__", VERSION)


def imported(code):
    """Import the plugin after some code, in a process of its own: its exit code and the last line that it prints."""
    prologue = f"import sys, pkgutil, open_clip; sys.path.insert(0, {str(REPO)!r})\n"
    done = subprocess.run([sys.executable, "-c", prologue + code], capture_output=True, text=True)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("version", ["2.32.0", "3.2.9", "5.0.0", "main"])
def test_another_version(monkeypatch, version):
    """What is imported counts, not what is installed: the metadata tell of a version that is fine."""
    monkeypatch.setattr(open_clip, "__version__", version)
    with pytest.raises(ImportError) as error:
        seams.check_version()
    cure = "run pip install 'open_clip_torch[training]>=3.3,<5'"
    assert str(error.value) == f"pcmepp_openclip needs open_clip_torch >=3.3,<5, found {version}: {cure}"


def test_importing_the_plugin_checks_the_version_and_the_names():
    code, line = imported("open_clip.__version__ = '2.32.0'\nimport pcmepp_openclip")
    assert code == 1 and line.startswith("ImportError: ") and "found 2.32.0" in line
    code, line = imported("del open_clip.factory.CustomTextCLIP\nimport pcmepp_openclip")
    assert code == 1 and "has no open_clip.factory.CustomTextCLIP" in line and CURE in line
    remove = "import open_clip_train.zero_shot; del open_clip_train.zero_shot.zero_shot_eval\n"
    code, line = imported(remove + "import pcmepp_openclip.training.command")
    assert code == 1 and "has no open_clip_train.zero_shot.zero_shot_eval" in line and CURE in line


def test_the_tested_version_is_the_installed_one():
    """The cure is the version that these tests run with."""
    assert open_clip.__version__ == seams.TESTED or open_clip.__version__.startswith("4.")


@pytest.mark.parametrize("name", [*seams.LIBRARY, *seams.USED, *seams.USED_IN_TRAINING, *seams.USED_BY_DATA], ids=str)
def test_a_missing_name(monkeypatch, other_version, name):
    monkeypatch.delattr(pkgutil.resolve_name(name.holder), name.name)
    with pytest.raises(ImportError) as error:
        seams.check_names(name)
    assert str(error.value).startswith(f"open_clip_torch {VERSION} has no {name}, which pcmepp_openclip needs to ")
    assert str(error.value).endswith(CURE)


TINY_PARTS = [*towers.MODEL_PARTS, *towers.IMAGE_TOWERS[0].parts, *towers.TEXT_TOWERS[0].parts]  # of PCMEpp-tiny


@pytest.mark.parametrize("part", TINY_PARTS)
def test_a_missing_attribute_of_the_model(monkeypatch, other_version, part):
    *path, last = part.split(".")
    stock = open_clip.CLIP.__init__

    def init(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        holder = self
        for name in path:
            holder = holder[0] if name == "0" else getattr(holder, name)
        try:
            delattr(holder, last)
        except AttributeError:
            for kind in type(holder).__mro__:
                if last in vars(kind):
                    monkeypatch.delattr(kind, last)

    monkeypatch.setattr(open_clip.CLIP, "__init__", init)
    with pytest.raises(ImportError) as error:
        open_clip.create_model("PCMEpp-tiny")
    said = str(error.value)
    assert said.startswith(f"open_clip_torch {VERSION} has no attribute {part} of a CLIP") and said.endswith(CURE)


@pytest.mark.parametrize("flag", flags.READ)
def test_a_missing_flag(monkeypatch, other_version, capsys, flag):
    stock = trainer.params.parse_args

    def parse_args(argv):
        args = stock(argv)
        delattr(args, flag)
        return args

    monkeypatch.setattr(trainer.params, "parse_args", parse_args)
    argv = ["train", "--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8"]
    assert cli.main(argv) == 1
    said = capsys.readouterr().err
    expected = f"pcmepp train: open_clip_torch {VERSION} has no flag --{flag.replace('_', '-')}, which pcmepp_openclip"
    assert expected in said and CURE in said
