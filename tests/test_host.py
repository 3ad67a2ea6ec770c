"""An open_clip that the plugin was not written for: the import fails at once and says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, run_code, run_python

CURE = "pip install 'open_clip_torch[training]>=3.3,<4'"


@pytest.fixture(scope="module")
def old_open_clip(tmp_path_factory) -> Path:
    """A real open_clip of before the supported range, in a folder of its own."""
    folder = tmp_path_factory.mktemp("old")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), "open_clip_torch==2.32.0"], check=True)
    return folder


def test_an_old_open_clip(old_open_clip, tmp_path):
    """As a checkout in front of the installed one, whose metadata tell another version: what is imported counts."""
    (tmp_path / "open_clip").symlink_to(old_open_clip / "open_clip")
    done = run_python("-c", "import pcmepp_openclip", path=f"{tmp_path}:{REPO}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: pcmepp_openclip needs open_clip_torch >=3.3,<4, found 2.32.0: run {CURE}"


def test_a_missing_symbol_is_named():
    """Every name that the plugin needs, one at a time."""
    code = """
import importlib, operator, open_clip
from importlib import metadata
names = ["add_model_config", "factory.CLIP", "factory.CustomTextCLIP", "factory.convert_state_dict",
         "factory.load_checkpoint", "factory.parse_model_name", "factory._get_hf_config", "pretrained._PRETRAINED",
         "model._build_vision_tower", "model._build_text_tower", "model.CLIPVisionCfg",
         "transformer.VisionTransformer._embeds", "transformer.VisionTransformer._pool"]
for name in names:
    path, _, last = ("open_clip." + name).rpartition(".")
    holder = operator.attrgetter(path.partition(".")[2])(open_clip) if "." in path else open_clip
    kept = getattr(holder, last)
    delattr(holder, last)
    try:
        import pcmepp_openclip
    except ImportError as error:
        print(name, "|", error)
    else:
        raise SystemExit(f"imported without {name}")
    setattr(holder, last, kept)
import pcmepp_openclip
assert "PCMEpp-tiny" in open_clip.list_models()
print("done")
"""
    *lines, last = run_code(code).strip().splitlines()
    assert last == "done" and len(lines) == 13
    for line in lines:
        name, _, message = line.partition(" | ")
        assert message == (
            f"open_clip_torch 3.3.0 has no open_clip.{name}, which pcmepp_openclip needs; supported are >=3.3,<4: "
            f"run {CURE}"
        )


def test_only_one_module_touches_open_clip_s_internals():
    for file in (REPO / "pcmepp_openclip").glob("*.py"):
        text = file.read_text()
        if file.name != "host.py":
            assert "open_clip.factory" not in text and "from open_clip" not in text, file.name
            assert "open_clip._" not in text, file.name
