"""The `pcmepp` command."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from drawn_shards import write_shards
from helpers import REPO, run_python

from pcmepp_openclip import __version__, cli
from pcmepp_openclip.system.flags import CommandParser, number

SCRIPT = "import sys, pcmepp_cli; sys.exit(pcmepp_cli.main())"  # what the console script is
READS_OWN_FLAGS = [name for name, command in cli.COMMANDS.items() if command[0] is None]


def test_the_console_script():
    """The wheel's test runs the script; `python -m pcmepp_openclip.cli` is the same command after the import."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"pcmepp": "pcmepp_cli:main"}
    done = run_python("-m", "pcmepp_openclip.cli", "--version")
    assert done.stdout == f"pcmepp-openclip {__version__}\n", done.stderr


def test_help_version_and_data_do_without_torch(tmp_path):
    shards = write_shards(tmp_path / "shards", 1, 4)
    program = """
import json, sys
import pcmepp_cli
for words in json.loads(sys.argv[1]):
    sys.argv = ["pcmepp", *words]
    try:
        code = pcmepp_cli.main()
    except SystemExit as end:
        code = end.code
    assert code == (2 if words[1:] == ["--batch-size", "0"] else 0), (words, code)
    heavy = {"torch", "open_clip", "transformers", "pandas", "matplotlib"} & {*sys.modules}
    assert not heavy, (words, heavy)
assert "pcmepp_openclip.plugin" not in sys.modules
import open_clip, pcmepp_openclip
assert pcmepp_openclip.csd and "PCMEpp-tiny" in open_clip.list_models()
"""
    lines = [["--help"], ["--version"], ["data", "count", shards], ["data", "check", shards, "--workers", "1"]]
    lines += [[name, "--help"] for name in cli.COMMANDS if name not in READS_OWN_FLAGS] + [
        ["eval", "--batch-size", "0"]
    ]
    done = run_python("-c", program, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    assert READS_OWN_FLAGS == ["train"]


def test_the_models_are_registered_before_a_command_runs():
    program = """
import pcmepp_cli
from pcmepp_openclip import cli, commands
commands.main = lambda argv: print(*argv, "PCMEpp-tiny" in __import__("open_clip").list_models())
cli.COMMANDS["probe"] = (None, "commands", "")
cli.run(["probe", "known:"])
"""
    done = run_python("-c", program)
    assert done.stdout == "known: True\n", done.stderr


def test_all_mistakes_of_a_command_line_are_listed(capsys):
    words = ["bank", "--model", "ViT-B-33", "--size", "1", "--workers", "two", "--sed", "3", "--batch-size=0"]
    assert cli.main([*words, "--data", "x"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "pcmepp bank: 6 mistakes:"
    for line, cause in zip(
        lines,
        [
            "--size must be at least 2, not 1.",
            "--workers invalid int value: 'two'.",
            "--batch-size must be at least 1, not 0.",
            "required: --out.",
            "no flag --sed; did you mean '--seed'?",
            "no model 'ViT-B-33'; did you mean 'ViT-B-32'",
        ],
        strict=True,
    ):
        assert cause in line
    assert cli.main(["push", "run", "no-name", "--pr", "--tag", "x", "y"]) == 2
    said = capsys.readouterr().err
    assert "3 mistakes" in said and "drop --tag or --pr" in said and "give ORG/NAME" in said and "place for y" in said


def a_parser() -> CommandParser:
    parser = CommandParser("pcmepp x", "Do x.")
    parser.add_argument("what")
    parser.add_argument("--share", type=number(float, 0, 1), default=0.5)
    parser.add_argument("--kind", choices=("a", "b"), required=True)
    parser.refuse(lambda args: args.share == 1 and args.kind == "b", "--share 1 is for --kind a.")
    return parser


@pytest.mark.parametrize(
    "words, causes",
    [
        ("it --kind b --share 1", ["--share 1 is for --kind a."]),
        ("it --kind c --share 2", ["--kind: invalid choice: 'c'", "--share must be between 0 and 1, not 2."]),
        ("--share nan --kind", ["--share must be between 0 and 1, not nan.", "expected one argument"]),
        ("", ["the following arguments are required: what, --kind."]),
    ],
)
def test_mistakes_of_every_kind(words, causes):
    args = a_parser().parse_args(["--kind", "b", "it", "--share", "0.25"])
    assert (args.what, args.share, args.kind) == ("it", 0.25, "b")
    with pytest.raises(ValueError) as error:
        a_parser().parse_args(words.split())
    lines = str(error.value).splitlines()[1 if len(causes) > 1 else 0 :]
    assert all(cause in line for cause, line in zip(causes, lines, strict=True)), lines


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
    command = [sys.executable, "-c", SCRIPT, *argv]
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
    counting = ["data", "count", f"a=pipe:touch {ready}; sleep 100", "--output", str(tmp_path / "sizes.json")]
    evaluating = ["eval", "--model", "PCMEpp-tiny", "--retrieval", "x", "--out", str(tmp_path)]
    command = evaluating if when == "at its start" else counting
    process = start(*command)
    if when == "at its start":
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch" in maps.read_text())  # in the middle of the imports
    else:
        wait_for(ready.exists)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-1] == f"pcmepp {command[0]}: interrupted."


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
