"""The `pcmepp` command."""

import pytest
from helpers import run_python

from pcmepp_openclip import __version__, cli


def test_the_console_script():
    """Installed by the package; `python -m pcmepp_openclip.cli` is the same function."""
    from importlib.metadata import entry_points

    (script,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "pcmepp")
    assert script.value == "pcmepp_openclip.cli:main"


def test_help_and_version(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: pcmepp COMMAND") and all(name in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pcmepp-openclip {__version__}\n"
    assert cli.main([]) == 2


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: pcmepp {command}" in capsys.readouterr().out


def test_an_unknown_command(capsys):
    assert cli.main(["fly"]) == 2
    assert capsys.readouterr().err == f"pcmepp: there is no command 'fly'; there are: {', '.join(cli.COMMANDS)}.\n"


def test_demo_in_a_process_of_its_own():
    done = run_python("-m", "pcmepp_openclip.cli", "demo")
    assert done.returncode == 0, done.stderr
    *_, header, first, _, _, _, last = done.stdout.splitlines()
    assert header.split() == ["caption", "uncertainty", "cosine", "CSD"]
    assert first.startswith("a shape ") and last.startswith("a blue square ")
    uncertainty, cosine, distance = map(float, first.split()[-3:])
    picture = float(next(line for line in done.stdout.splitlines() if "drawn red circle" in line).split()[-1])
    assert distance == pytest.approx(2 - 2 * cosine + uncertainty + picture, abs=5e-3)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--model", "PCMEpp-tiny2"], "There is no model 'PCMEpp-tiny2'"),
        (["--model", "ViT-B-32"], "ViT-B-32"),
        (["--pretrained", "nothing.pt"], "'nothing.pt' is not a known tag or valid file path"),
    ],
)
def test_demo_with_a_mistake(args, words, capsys):
    assert cli.main(["demo", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pcmepp demo: ") and error.count("\n") == 1 and words in error
