"""The `pcmepp` command."""

import pytest

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
