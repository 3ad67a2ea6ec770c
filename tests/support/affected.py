"""Print the `--ignore` arguments for pytest that leave out tests of parts that no change reaches, and say so on stderr.

    python tests/support/affected.py [BASE]

A change is a file that differs from the commit BASE. Without it that is the merge base with origin/main, and on main
itself the newest commit that is a day older than the last. Where git cannot tell what has changed, nothing is left out.
"""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
DAY_S = 24 * 60 * 60
# Changes that reach every part, and the tests of each part with what they depend on beside that. A name that ends in
# "/" stands for all that is below it.
SHARED = ("tests/support/", "tests/conftest.py", "pyproject.toml", "Makefile")
PACKAGE = ("pcmepp_openclip/", "model_configs/")
PARTS = {
    "benchmarks": ("tests/test_benchmarks*.py", (*PACKAGE, "benchmarks/", "docs/")),
    "research": ("tests/research", (*PACKAGE, "research/", "tests/research/", "benchmarks/", "docs/")),
    "data scripts": ("tests/test_data_[km]a*.py", ("launch/data/", "pcmepp_openclip/data/", "pcmepp_openclip/system/")),
}


def changed_files(base: str | None) -> set[str]:
    """Return the files that differ from the base in commits or in the work tree, and those that git does not know."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()

    if base is None:
        (base,) = git("merge-base", "HEAD", "origin/main")
        if git("rev-parse", "HEAD") == [base]:
            last = int(git("log", "-1", "--format=%ct")[0])
            (base,) = git("rev-list", "-1", f"--before={last - DAY_S}", "HEAD")
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def reaches(changed: str, pattern: str) -> bool:
    return changed.startswith(pattern) if pattern.endswith("/") else Path(changed).match(pattern)


def left_out(changed: set[str]) -> dict[str, list[str]]:
    """Return the test files of the parts that no changed file reaches, by part."""
    return {
        part: sorted(str(path.relative_to(REPO)) for path in REPO.glob(tests))
        for part, (tests, others) in PARTS.items()
        if not any(reaches(name, pattern) for name in changed for pattern in (tests, *others, *SHARED))
    }


if __name__ == "__main__":
    try:
        ignored = left_out(changed_files(*(sys.argv[1:] or [None])))
    except (subprocess.CalledProcessError, ValueError, OSError):
        ignored = {}
    if ignored:
        print(f"No change reaches {', '.join(ignored)}: `make test-all` runs their tests.", file=sys.stderr)
    print(*(f"--ignore={path}" for paths in ignored.values() for path in paths))
