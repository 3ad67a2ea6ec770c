"""The studies as commands: their help, their errors, and the names that `pcmepp` had for them."""

import importlib

import pytest

from pcmepp_openclip import cli
from pcmepp_openclip.system.errors import RunFailed
from research.command import run

MODULES = {
    "paper": "paper.__main__",
    "toy": "toy.__main__",
    "sweep": "sweep",
    "drift": "drift",
    "photos": "photos.__main__",
}


@pytest.mark.parametrize("name", MODULES)
def test_help_names_the_command(name, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"research.{MODULES[name]}").main(["--help"])
    assert end.value.code == 0 and f"usage: python -m research.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("error, code", [(ValueError, 2), (RunFailed, 1), (KeyboardInterrupt, 130)])
def test_an_error_is_one_sentence(error, code, capsys):
    def fail(argv):
        raise error(f"no {argv[0]}")

    assert run("research.x", fail, ["luck"]) == code
    said = capsys.readouterr().err.strip()
    assert said == ("python -m research.x: interrupted." if code == 130 else "python -m research.x: no luck")


@pytest.mark.parametrize("name", cli.MOVED)
def test_the_old_name_says_the_new_one(name, capsys):
    assert cli.run([name, "--help"]) == 2
    assert f"python -m research.{name}" in capsys.readouterr().err and name in MODULES
