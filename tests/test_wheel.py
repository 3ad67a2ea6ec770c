"""A wheel, installed away from the checkout: configs, launcher, command and type information are in it."""

import subprocess
import sys

from helpers import REPO, run_python

from pcmepp_openclip import __version__

PROGRAM = """
import pathlib, sys
import open_clip
package, folder = sys.modules["pcmepp_openclip"], pathlib.Path(sys.argv[1])  # imported by the launcher
assert pathlib.Path(package.__file__).is_relative_to(folder), package.__file__
assert package.MODEL_CONFIGS.is_relative_to(folder), package.MODEL_CONFIGS
model = open_clip.create_model("PCMEpp-tiny")
print(type(model).__name__, len([name for name in open_clip.list_models() if name.startswith("PCMEpp")]))
"""


def pip(*args: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", args[0], *quiet, *args[1:]], check=True)


def test_wheel(tmp_path):
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(REPO))
    (wheel,) = tmp_path.glob("pcmepp_openclip-*-py3-none-any.whl")
    assert wheel.name == f"pcmepp_openclip-{__version__}-py3-none-any.whl"
    folder, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--target", str(folder), str(wheel))
    configs = {path.name for path in (folder / "pcmepp_openclip" / "model_configs").glob("*.json")}
    assert configs == {path.name for path in (REPO / "model_configs").glob("*.json")} and "PCMEpp-tiny.json" in configs
    assert (folder / "pcmepp_openclip" / "py.typed").exists()
    assert (
        not (folder / "tests").exists()
        and not (folder / "research").exists()
        and not (folder / "model_configs").exists()
    )

    (elsewhere / "program.py").write_text(PROGRAM)
    done = run_python("-m", "pcmepp_openclip", "program.py", str(folder), cwd=elsewhere, path=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["PCMEppCLIP", str(len(configs))]

    done = run_python(str(folder / "bin/pcmepp"), "--version", cwd=elsewhere, path=str(folder))
    assert (done.returncode, done.stdout) == (0, f"pcmepp-openclip {__version__}\n"), done.stderr
