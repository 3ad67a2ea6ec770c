"""`python -m pcmepp_openclip ...` against the same command without it: it must not be noticed."""

import pytest
from helpers import REPO, run_python

LAUNCH = ("-m", "pcmepp_openclip")

PROGRAM = """\
import sys, json
{body}
"""


@pytest.fixture
def program(tmp_path):
    """A folder with a script and a package; `program(body)` writes both and returns the ways to run them."""

    def write(body: str) -> list[list[str]]:
        (tmp_path / "script.py").write_text(PROGRAM.format(body=body))
        (tmp_path / "package").mkdir(exist_ok=True)
        (tmp_path / "package" / "__init__.py").write_text("")
        (tmp_path / "package" / "__main__.py").write_text(PROGRAM.format(body=body))
        (tmp_path / "package" / "tool.py").write_text(PROGRAM.format(body=body))
        return [["script.py"], [str(tmp_path / "script.py")], ["-m", "package"], ["-m", "package.tool"], ["package"]]

    return write


def both(way: list[str], args=(), flags=(), **kwargs):
    plain = run_python(*flags, *way, *args, **kwargs)
    launched = run_python(*flags, *LAUNCH, *way, *args, **kwargs)
    return plain, launched


def assert_same(plain, launched):
    assert (launched.returncode, launched.stdout, launched.stderr) == (plain.returncode, plain.stdout, plain.stderr)


ARGS = ["--flag", "a b", "-m", "x", "--", "-m", "pcmepp_openclip", ""]


def test_argv_path_and_name(program, tmp_path):
    for way in program("print(json.dumps([sys.argv, sys.path, __name__, __file__, sys.flags.optimize]))"):
        plain, launched = both(way, ARGS, cwd=tmp_path)
        assert plain.returncode == 0 and "a b" in plain.stdout
        assert_same(plain, launched)


@pytest.mark.parametrize("body, code", [("sys.exit(3)", 3), ("sys.exit('bye')", 1), ("", 0), ("1 / 0", 1)])
def test_exit_code_and_traceback(program, tmp_path, body, code):
    for way in program(body):
        plain, launched = both(way, cwd=tmp_path)
        assert plain.returncode == code
        assert_same(plain, launched)


def test_a_signal_kills_it_the_same(program, tmp_path):
    for way in program("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")[:1]:
        plain, launched = both(way, cwd=tmp_path)
        assert plain.returncode == -15
        assert_same(plain, launched)


def test_what_is_not_there(tmp_path):
    for way in (["nothing.py"], ["-m", "nothing_here"], ["-m", "json.nothing"]):
        plain, launched = both(way, cwd=tmp_path)
        assert plain.returncode != 0 and plain.stderr
        assert_same(plain, launched)


def test_stdin_and_code_on_the_command_line(program, tmp_path):
    for way in [*program("print(sys.stdin.read()[::-1])"), ["-c", "print(input()[::-1])"]]:
        plain, launched = both(way, cwd=tmp_path, stdin="hello")
        assert plain.stdout.strip() == "olleh"
        assert_same(plain, launched)
    assert_same(*both(["-"], cwd=tmp_path, stdin="print('from stdin', __name__)"))


@pytest.mark.parametrize("flags", [["-u", "-O"], ["-uOO"], ["-X", "dev", "-W", "error"], ["-B", "-P"]])
def test_python_s_own_flags_are_kept(program, tmp_path, flags):
    body = "print(sys.flags, sys.warnoptions, sys._xoptions, __debug__, sys.stdout.write_through, sys.path)"
    for way in program(body)[:3:2]:
        plain, launched = both(way, flags=flags, cwd=tmp_path, path=str(REPO))
        assert_same(plain, launched)


@pytest.mark.parametrize("launch", [["-mpcmepp_openclip"], ["-um", "pcmepp_openclip"], ["-Oumpcmepp_openclip"]])
def test_the_other_ways_of_writing_the_option(program, tmp_path, launch):
    program("print(sys.argv, __debug__)")
    plain = run_python(*(["-O"] if "O" in launch[0] else []), "-m", "package", "x", cwd=tmp_path)
    launched = run_python(*launch, "-m", "package", "x", cwd=tmp_path)
    assert plain.returncode == 0
    assert_same(plain, launched)


def test_an_empty_entry_of_the_path_still_means_the_current_folder(program, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "neighbour.py").write_text("word = 'found'")
    program("import neighbour; print(neighbour.word, sys.path)")
    plain, launched = both([str(tmp_path / "script.py")], cwd=tmp_path / "work", path=f":{REPO}")
    assert plain.stdout.startswith("found")
    assert_same(plain, launched)


def test_the_environment_s_own_sitecustomize_still_runs(program, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins; builtins.greeting = 'hello'")
    program("print(greeting, sys.modules['sitecustomize'].__file__)")
    plain, launched = both(["script.py"], cwd=tmp_path, path=f"{site}:{REPO}")
    assert plain.stdout.startswith("hello")
    assert_same(plain, launched)


@pytest.mark.parametrize("fault", ["import not_installed", "1 / 0"])
def test_a_broken_sitecustomize_is_reported(program, tmp_path, fault):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(fault)
    program("print('runs')")
    plain, launched = both(["script.py"], cwd=tmp_path, path=f"{site}:{REPO}")
    assert "Error in sitecustomize" in plain.stderr
    assert launched.stdout == "runs\n"
    assert launched.stderr == 2 * plain.stderr  # by the Python that launches, and by the one that it becomes


def test_a_program_without_open_clip_imports_no_torch(program, tmp_path):
    program("print([name for name in ('torch', 'open_clip', 'pcmepp_openclip') if name in sys.modules])")
    done = run_python(*LAUNCH, "script.py", cwd=tmp_path)
    assert done.stdout.strip() == "[]" and done.returncode == 0


def test_open_clip_knows_the_models_here_and_in_children(program, tmp_path):
    """A program that never heard of the plugin, and a child of it started the usual way."""
    child = "import open_clip; print(type(open_clip.create_model('PCMEpp-tiny')).__name__)"
    body = f"""
import subprocess
from open_clip import create_model, list_models
print("PCMEpp-tiny" in list_models(), type(create_model("PCMEpp-tiny")).__name__)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    program(body)
    done = run_python(*LAUNCH, "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "PCMEppCLIP", "PCMEppCLIP"]


def test_open_clip_s_training_program_runs(tmp_path):
    done = run_python(*LAUNCH, "-m", "open_clip_train.main", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--train-data" in done.stdout


def test_usage():
    done = run_python(*LAUNCH)
    assert done.returncode == 2 and done.stdout.startswith("usage: python -m pcmepp_openclip")
    done = run_python(*LAUNCH, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m pcmepp_openclip")


@pytest.mark.parametrize("flag", ["-E", "-S"])
def test_flags_that_shut_it_out_are_an_error_that_says_so(flag):
    done = run_python(flag, *LAUNCH, "x.py", cwd=REPO)
    assert done.returncode == 1
    assert done.stderr.strip() == "python -m pcmepp_openclip works by PYTHONPATH: drop the options -E, -I and -S."
