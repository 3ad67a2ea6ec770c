"""README, docs and CONTRIBUTING: links lead somewhere, code runs, commands and flags exist, the site builds."""

import argparse
import contextlib
import importlib
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
from exported import add_bank
from helpers import REPO, make_model
from markdown_files import anchors, blocks, commands, inline_code, links
from PIL import Image

import pcmepp_openclip
from pcmepp_openclip import cli
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.system.flags import CommandParser

FILES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SKILL.md", "launch/README.md")),
    *sorted((REPO / "docs").rglob("*.md")),
]
BLOCKS = [block for path in FILES for block in blocks(path)]
SHELL = [(block, command) for block in BLOCKS if block.language == "bash" for command in commands(block)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
PLAIN = {"text", "bibtex"}  # output, diagrams, formulas, references
ids = {"ids": str}


# --- Links ------------------------------------------------------------------------------------------------


def test_every_internal_link_leads_somewhere():
    broken = []
    for path in FILES:
        for link in links(path):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{path.relative_to(REPO)}: {link}")
    assert not broken


def test_links_are_found():
    found = [link for path in FILES for link in links(path)]
    assert "docs/images/uncertainty.png" in found and any("#" in link for link in found) and len(found) > 30


# --- Code -------------------------------------------------------------------------------------------------


def test_every_block_says_what_it_is():
    languages = {str(block): block.language for block in BLOCKS}
    assert {"python", "bash", "text"} <= set(languages.values())
    unknown = {name: language for name, language in languages.items() if language not in {"python", "bash", *PLAIN}}
    assert not unknown, "tests/test_docs.py runs `python`, checks `bash`, and leaves only `text` and `bibtex` alone"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with small substitutes for what the examples name: the demo's model with a bank, and a photo."""
    folder = tmp_path_factory.mktemp("examples")
    export_model(make_model("PCMEpp-tiny"), folder / "pcmepp-demo/model", "PCMEpp-tiny")
    add_bank(folder / "pcmepp-demo/model", "bank")
    for name in ("photo.jpg", "other.jpg"):
        Image.new("RGB", (64, 48), (200, 30, 30)).save(folder / name)
    return folder


@pytest.fixture
def repos(hub, place):
    """The repositories on the Hub that the examples name, with the same small model."""
    files = {path.name: path for path in (place / "pcmepp-demo/model").iterdir()}
    for block in PYTHON:
        for repo in re.findall(r"hf-hub:([\w./-]+)", block.text):
            hub.add(repo, files)
    hub.reset()


@pytest.mark.parametrize("block", PYTHON, **ids)
def test_python_examples_run(block, place, repos, registries, monkeypatch, capsys):
    monkeypatch.chdir(place)
    code = compile(block.text, str(block), "exec")
    exec(code, {"__name__": "example"})
    printed = capsys.readouterr().out
    shown = [b for b in BLOCKS if b.path == block.path and b.line > block.line and b.language == "text"]
    if "print(" in block.text:
        assert printed
        pattern = re.compile(r" +-?\d+(\.\d+)?\b")  # test_system_demo.py compares the numbers
        assert pattern.sub(" #", printed) == pattern.sub(" #", shown[0].text)


# --- Commands ---------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised in place of what a command would do after it has read its arguments."""


class Refused(Exception):
    """A parser's error."""


@contextlib.contextmanager
def parsing_only(seen: list[argparse.ArgumentParser]):
    """Within it, argument parsers do their work, and the command ends there."""
    parse, error = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.error

    def parse_args(self, args=None, namespace=None):
        seen.append(self)
        parse(self, args, namespace)
        raise Parsed

    def refuse(self, message):
        raise Refused(message)

    patch = pytest.MonkeyPatch()
    patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    patch.setattr(argparse.ArgumentParser, "error", refuse)

    def judge(self, parsed):  # without the checks of files, models and packages
        seen.append(self)
        self.mistakes.raise_all()
        raise Parsed

    patch.setattr(CommandParser, "judge", judge)
    try:
        yield
    finally:
        patch.undo()
    assert argparse.ArgumentParser.parse_args is parse and argparse.ArgumentParser.error is error


def start(program: list[str]) -> None:
    """Call what a command line calls: `pcmepp COMMAND ...` or `python -m MODULE ...`, without the Python."""
    if program[0] == "pcmepp":
        parser, module, _ = cli.COMMANDS[program[1]]
        try:
            if parser is not None:
                pkgutil.resolve_name(f"pcmepp_openclip.{parser}")().parse_args(program[2:])
            else:
                importlib.import_module(f"pcmepp_openclip.{module}").main(program[2:])
        except ValueError as error:
            raise Refused(str(error)) from None
    else:
        patch = pytest.MonkeyPatch()
        patch.setattr(sys, "argv", program)
        try:
            runpy.run_module(program[0], run_name="__main__")
        except SystemExit as end:
            raise Refused(f"exit code {end.code}") from None
        finally:
            patch.undo()


def check(words: list[str]) -> None:
    """Refused unless the program's own parser accepts the words; `...` stands for more of them."""
    cut = [word for word in words if word != "..."]
    try:
        with parsing_only([]):
            start(cut)
    except Parsed:
        return
    except Refused as error:
        if len(cut) < len(words) and "the following arguments are required" in str(error):
            return
        raise
    raise AssertionError(f"{words} was not parsed")


def check_command(command: str) -> None:
    words = shlex.split(re.sub(r"\[([^\]]*)\]", r"\1", command) if re.search(r" \[-", command) else command)
    while words and re.fullmatch(r"[A-Z]+=.*", words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/") if words else ":"  # only variables: they are for the next line
    if program == "pcmepp":
        check(["pcmepp", *words[1:]])
    elif program == "torchrun":
        inner = words[words.index("--") + 1 :]
        module = inner[0]
        if module == "pcmepp_openclip":
            return check_command(shlex.join(["python", "-m", *inner]))
        check(["pcmepp", "train", *inner[1:]] if module == "pcmepp_openclip.train" else ["pcmepp", *inner[1:]])
        assert module in ("pcmepp_openclip.train", "pcmepp_openclip.cli")
    elif program == "python" and words[1] == "-m" and words[2] == "pytest":
        check_pytest(words[3:])
    elif program == "python" and words[1] == "-m" and words[2].split(".")[0] in ("benchmarks", "research"):
        check(words[2:])
    elif program == "python" and words[1:3] == ["-m", "pcmepp_openclip"]:
        assert len(words) > 3  # hands over to another program
    elif program == "make":
        assert set(words[1:]) <= make_targets()
    elif program == "pip":
        assert words[1] == "install"
        for extra in re.findall(r"\[(\w+)\]", command):
            assert f"\n{extra} = [" in (REPO / "pyproject.toml").read_text()
    elif program.startswith("launch/"):
        assert os.access(REPO / program, os.X_OK)
    else:
        assert program in {"hf", "pre-commit", "mkdocs", "touch", ":"}, f"no test knows the program {program}"


def make_targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.+)$", (REPO / "Makefile").read_text(), flags=re.MULTILINE).group(1).split())


def check_pytest(words: list[str]) -> None:
    """The file exists, and `-k` selects something in it."""
    text = (REPO / words[0]).read_text()
    if "-k" in words:
        assert words[words.index("-k") + 1] in " ".join(re.findall(r"def (test_\w+)", text))


def test_commands_are_parsed_by_the_real_parsers(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    wrong = []
    for block, command in SHELL:
        try:
            check_command(command)
        except (Refused, AssertionError) as error:
            wrong.append(f"{block}: {command}: {error}")
    assert not wrong and len(SHELL) > 80


WRONG = """pcmepp train --model PCMEpp-tiny --no-such-flag 1
pcmepp data count --worker-count 3 a.tar
pcmepp eval --retrieval FOLDER
python -m benchmarks --outt DIR
python -m research.paper distances --seedss 2
make nothing
pip install '.[nothing]'
launch/nothing.sh
curl https://example.org
.venv/bin/python -m pytest tests/test_csd.py -k nothing"""


@pytest.mark.parametrize("command", WRONG.splitlines())
def test_a_wrong_command_would_be_noticed(command):
    with pytest.raises((Refused, AssertionError)):
        check_command(command)


def test_ci_runs_the_make_targets():
    """`.ci/run` and the workflow run the same targets, and the Makefile has them."""
    for name in (".ci/run", ".github/workflows/ci.yml"):
        steps = (REPO / name).read_text().split("\njobs:")[-1].split("\nset ")[-1]
        targets = set(re.findall(r"(?:^|run: |PATH\" )make ([a-z-]+)", steps, flags=re.MULTILINE))
        assert targets == {"test", "test-system"} <= make_targets()


# --- What prose names -------------------------------------------------------------------------------------

OTHERS = {  # flags of other programs, and of the loss term that CONTRIBUTING.md adds
    "--nproc-per-node", "--no_amp", "--signal", "--wait", "--nodes", "--gpus-per-node", "--cpus-per-task", "--time",
    "--dereference", "--hard-dereference", "--agreement-weight", "--fsdp",
}  # fmt: skip


STUDIES = [[f"research.{name}"] for name in ("paper", "toy", "sweep", "drift", "photos")]


def known_flags() -> set[str]:
    """Every flag of every command, as the parsers have them."""
    parsers: list[argparse.ArgumentParser] = []
    programs = [["pcmepp", name] for name in cli.COMMANDS if name != "data"]
    programs += [["pcmepp", "data", name, "x"] for name in ("count", "check")]
    for program in [*programs, ["benchmarks"], ["benchmarks", "models"], *STUDIES]:
        with contextlib.suppress(Parsed, Refused), parsing_only(parsers):
            start(program)
    from pcmepp_openclip.training.config import make_parser

    flags, parsers = set(), [*parsers, make_parser()]
    while parsers:
        parser = parsers.pop()
        flags |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return flags


def test_flags_named_in_prose_exist():
    known = known_flags()
    assert {"--train-data", "--match-weight", "--compare", "--retrieval", "--hub-tag", "--workers"} <= known
    unknown = {
        f"{path.relative_to(REPO)}: {flag}"
        for path in FILES
        if path.name != "CHANGELOG.md"
        for code in inline_code(path)
        if not code.startswith(("pip ", "sbatch", "srun"))
        for flag in re.findall(r"(?<![\w-])--[\w-]+", code)
        if flag not in known | OTHERS
    }
    assert not unknown


def test_files_named_in_prose_exist():
    """`tests/test_csd.py`, `launch/local.sh`, and tests by their names in docs/reliability.md."""
    missing = set()
    for path in FILES:
        for code in inline_code(path):
            named = re.fullmatch(r"(tests|launch|docs|recipes|models|host|research)/[\w./-]+\.(py|sh|sbatch|md)", code)
            if re.fullmatch(r"test_\w+", code):
                named, code = True, f"{code}.py"
            places = (REPO, path.parent, *(REPO / name for name in ("pcmepp_openclip", "tests", "tests/research")))
            if named and not any((place / code).exists() for place in places):
                missing.add(f"{path.relative_to(REPO)}: {code}")
    assert not missing


def test_tests_named_in_reliability_exist():
    tests = " ".join(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in (REPO / "tests").rglob("test_*.py"))))
    rows = [line for line in (REPO / "docs/reliability.md").read_text().splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split(" | ")[-1])}
    assert len(named) > 30
    assert not {name for name in named if not name.startswith("test_") and name not in tests}


# --- The README -------------------------------------------------------------------------------------------


def test_the_readme_is_read_in_a_minute():
    assert len((REPO / "README.md").read_text().splitlines()) <= 120


def test_the_file_map_is_the_tree():
    """Every folder that it names exists, and every folder of the package is named."""
    (tree,) = (block.text for block in blocks(REPO / "README.md") if block.text.startswith("pcmepp_openclip/ "))
    lines = tree.splitlines()
    within = {name for line in lines if line.startswith("  ") for name in re.findall(r"(\w+)/", line[:30])}
    outside = {name for line in lines if not line.startswith("  ") for name in re.findall(r"(\w+)/", line)}
    package = REPO / "pcmepp_openclip"
    assert within == {path.parent.name for path in package.glob("*/__init__.py")}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    folders = {line.split("/")[0] for line in tracked.splitlines() if "/" in line and not line.startswith(".")}
    assert outside == folders


def test_the_models_of_the_readme_are_those_that_load():
    text = (REPO / "README.md").read_text()
    for name in re.findall(r'"(PCMEpp-[\w-]+)"', text):
        assert name in open_clip.list_models()
    released = open_clip.pretrained._PRETRAINED["PCMEpp-ViT-B-16-unc2"].values()
    shown = set(re.findall(r"hf-hub:(SanghyukChun/[\w-]+)", text))
    places = {entry.get("hf_hub", "").removesuffix("/model.safetensors") for entry in released}
    assert shown == {place for place in places if "PCMEPP" in place}


# --- The site ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_every_page_and_asks_no_other_host(site):
    pages = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    sources = {str(path.relative_to(REPO / "docs").with_suffix("")) for path in (REPO / "docs").rglob("*.md")}
    assert sources <= pages
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())


def test_the_public_names_have_an_api_page(site):
    api = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    missing = [
        name
        for name in pcmepp_openclip.__all__
        if name != "MODEL_CONFIGS" and not re.search(rf'id="pcmepp_openclip\.[\w.]*\b{name}"', api)
    ]
    assert not missing
