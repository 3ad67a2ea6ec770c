"""`python -m pcmepp_openclip PROGRAM` against the same program without it, which must not notice."""

import pytest
from helpers import REPO, run_python

from pcmepp_openclip.__main__ import main as launch

LAUNCH = ("-m", "pcmepp_openclip")
ARGS = ["--flag", "a b", "-m", "x", "--", "-m", "pcmepp_openclip", ""]
BODY = """\
import json, os, pickle, sys

class Thing:
    pass

pickle.loads(pickle.dumps(Thing()))
places = [os.path.abspath(place) for place in (sys.argv[0], __file__, *sys.path)]
print(json.dumps([sys.argv[1:], places, __name__, sys.flags.optimize, sys.stdin.read()]))
sys.stdout.flush()
"""


def write(folder, end: str = "") -> list[list[str]]:
    """Write a script and a package that do the same; return the ways to run them."""
    (folder / "package").mkdir()
    (folder / "work").mkdir()
    for path in ("script.py", "package/__main__.py"):
        (folder / path).write_text(BODY + end)
    (folder / "package/__init__.py").touch()
    return [["../script.py"], ["-m", "package"], ["../package"]]


def both(way, *args, flags=(), **kwargs):
    return run_python(*flags, *way, *args, **kwargs), run_python(*flags, *LAUNCH, *way, *args, **kwargs)


@pytest.mark.parametrize("number, end, code, flag", [(2, "1 / 0", 1, "-P"), (1, "sys.exit(3)", 3, "-O")])
def test_a_program_sees_what_it_sees_without_the_launcher(tmp_path, number, end, code, flag):
    """The same arguments, path, name, standard input and exit code, and a traceback that ends the same."""
    way = write(tmp_path, end)[number]
    path = f"{tmp_path}:{REPO}"
    plain, launched = both(way, *ARGS, flags=[flag], cwd=tmp_path / "work", path=path, stdin="hello")
    assert plain.returncode == code and "a b" in plain.stdout and "hello" in plain.stdout
    assert (launched.returncode, launched.stdout) == (plain.returncode, plain.stdout)
    assert launched.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_open_clip_knows_the_models_in_a_program_and_in_its_workers(tmp_path):
    """Neither the program nor the process that it forks has heard of the plugin."""
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "program.py").write_text("""
import multiprocessing
import neighbour
from open_clip import create_model, list_models

def show():
    print("PCMEpp-tiny" in list_models(), flush=True)

if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=show)
    worker.start()
    worker.join()
    print(type(create_model("PCMEpp-tiny")).__name__)
""")
    done = run_python(*LAUNCH, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "PCMEppCLIP"]


def test_usage(capsys):
    for program, code, words in (
        ([], 2, "usage: python -m pcmepp_openclip"),
        (["--help"], 0, "usage: python -m pcmepp_openclip"),
        (["-c", "x"], 2, "usage: python -m pcmepp_openclip"),
        (["nothing.py"], 1, "there is no file nothing.py"),
    ):
        with pytest.raises(SystemExit) as end:
            launch(program)
        shown = capsys.readouterr().out + str(end.value)
        assert words in shown and (end.value.code == code or code == 1)


def test_the_import_changes_nothing_but_open_clip():
    """No signal handler, no variable of the environment, no argument."""
    code = """
import os, signal, sys
import open_clip
import transformers, huggingface_hub  # which may change the environment themselves
handlers = lambda: [signal.getsignal(number) for number in signal.valid_signals()]
before = handlers(), dict(os.environ), sys.argv[:], sys.path[:], list(sys.meta_path), sys.excepthook
import pcmepp_openclip
assert before == (handlers(), dict(os.environ), sys.argv, sys.path, sys.meta_path, sys.excepthook)
assert "PCMEpp-tiny" in open_clip.list_models()
"""
    done = run_python("-c", code, "--help")
    assert done.returncode == 0, done.stderr
