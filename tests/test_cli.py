"""The `pcmepp` command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import REPO

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
    assert capsys.readouterr().err == f"pcmepp: unknown command 'fly'; commands: {', '.join(cli.COMMANDS)}.\n"


def start(*argv, **kwargs):
    """A process of its own, and a group of processes that a terminal would send Ctrl-C to."""
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "pcmepp_openclip.cli", *argv]
    return subprocess.Popen(
        command, cwd=REPO, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True, **kwargs
    )


def test_a_closed_pipe_is_no_error():
    """`pcmepp --help | true`"""
    process = start("--help", stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(10) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("when", ["at its start", "at work"])
def test_ctrl_c_is_one_line(tmp_path, when):
    ready = tmp_path / "ready"
    process = start("data", "count", f"a=pipe:touch {ready}; sleep 100", "--output", str(tmp_path / "sizes.json"))
    if when == "at its start":
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch" in maps.read_text())  # in the middle of the imports
    else:
        wait_for(ready.exists)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == ("pcmepp: interrupted." if when == "at its start" else "pcmepp data: interrupted.")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
