"""pyproject.toml declares what the package imports, and the version is written in one place."""

import ast
import re
import sys
from importlib.metadata import packages_distributions

from helpers import REPO

import pcmepp_openclip

if sys.version_info >= (3, 11):
    import tomllib
else:  # huggingface_hub requires it there
    import tomli as tomllib

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
FOLDERS = ("pcmepp_openclip", "launch")
OPTIONAL = {
    "wandb": "only for `--report-to wandb`, which open_clip itself leaves to the user to install",
    "sitecustomize": "Python's own hook, which the environment may define too",
}
NOT_IMPORTED: dict[str, str] = {}  # declared dependencies that others import, and why


def name_of(requirement: str) -> str:
    """The normalised name of the distribution: `open_clip_torch[training]>=3.3` is `open-clip-torch`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def imported() -> dict[str, str]:
    """{top-level module of third parties: a file that imports it}, imports within functions included."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((REPO / folder).rglob("*.py")):
            if any(part.startswith(".") for part in path.relative_to(REPO).parts):
                continue  # an environment that launch/data made
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                else:
                    continue
                found.update({name.partition(".")[0]: str(path.relative_to(REPO)) for name in names})
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, "pcmepp_openclip"}}


def distributions(module: str) -> set[str]:
    """The installed distributions that bring a module; its own name where it is not installed."""
    return {name_of(name) for name in packages_distributions().get(module, [module])}


DEPENDENCIES = {name_of(requirement) for requirement in PROJECT["dependencies"]}
OPTIONAL_FEATURES = ("coco", "faiss", "jpeg", "plots")
EXTRAS = {name_of(x) for extra in OPTIONAL_FEATURES for x in PROJECT["optional-dependencies"][extra]}


def test_every_import_is_declared():
    modules = imported()
    assert {"torch", "open_clip", "PIL", "safetensors", "tqdm"} <= set(modules)  # the search finds what there is
    declared = DEPENDENCIES | EXTRAS
    missing = {
        module: path
        for module, path in modules.items()
        if module not in OPTIONAL and not distributions(module) & declared
    }
    assert not missing, f"add to pyproject.toml: {missing}"


def test_every_dependency_is_imported_or_has_a_reason():
    used = {name for module in imported() for name in distributions(module)}
    idle = DEPENDENCIES - used - set(NOT_IMPORTED)
    assert not idle, f"nothing imports {idle}: drop them, or give the reason in NOT_IMPORTED"


def test_no_exception_is_stale():
    modules = imported()
    used = {name for module in modules for name in distributions(module)}
    assert set(OPTIONAL) <= set(modules)
    assert set(NOT_IMPORTED) <= DEPENDENCIES and not set(NOT_IMPORTED) & used


def test_the_version_is_written_once():
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert "\nversion:" not in (REPO / "CITATION.cff").read_text()
    changes = re.findall(r"^## \[?([^]\s]+)", (REPO / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert changes[0] in ("Unreleased", pcmepp_openclip.__version__)
    assert pcmepp_openclip.__version__ in changes
