"""Tests that a change does not reach are left out of `make test`; in doubt nothing is."""

import os
import shutil
import subprocess
import sys

import affected
import pytest
from helpers import REPO


@pytest.mark.parametrize(
    "changed, run",
    [
        ({"tests/test_loss.py", "tests/test_system_demo.py"}, set()),
        ({"README.md", "launch/local.sh"}, set()),
        ({"docs/notes/paper.md"}, {"benchmarks", "research"}),
        ({"benchmarks/loss.py"}, {"benchmarks", "research"}),
        ({"launch/data/cc3m.sh"}, {"data scripts"}),
        ({"tests/research/test_toy.py"}, {"research"}),
        ({"tests/test_data_making.py"}, {"data scripts"}),
        ({"pcmepp_openclip/losses/vib.py"}, {"benchmarks", "research"}),
        ({"pcmepp_openclip/data/plan.py"}, set(affected.PARTS)),
        ({"tests/support/shard_maker.py"}, set(affected.PARTS)),
    ],
)
def test_a_change_reaches_the_parts_that_depend_on_it(changed, run):
    left_out = affected.left_out(changed)
    assert set(left_out) == set(affected.PARTS) - run
    for paths in left_out.values():
        assert paths and all((REPO / path).exists() for path in paths)


def run(repo, *words, **variables):
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return done.stdout.split(), done.stderr


def test_commits_and_the_work_tree_are_compared_with_main(tmp_path):
    """On main the last day counts, beside it all since the merge base, and new files in both; without git all."""
    origin, repo = tmp_path / "origin", tmp_path / "repo"
    (origin / "tests/support").mkdir(parents=True)
    for name in ("tests/support/affected.py", "tests/test_data_making.py", "tests/test_benchmarks.py"):
        shutil.copy(REPO / name, origin / name)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    script = [sys.executable, "tests/support/affected.py"]
    assert run(origin, *script) == ([], "")
    run(origin, *git, "init", "--initial-branch=main")
    for day, name in ((1, "research/a.py"), (3, "launch/data/a.sh"), (4, "LICENSE"), (4, "NOTICE")):
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text(name)
        run(origin, *git, "add", ".")
        run(origin, *git, "commit", "-m", name, GIT_COMMITTER_DATE=f"2026-01-0{day} 12:00:00 +0000")
        if name == "research/a.py":  # the only commit: there is no older one to compare with
            run(tmp_path, *git, "clone", str(origin), str(tmp_path / "new"))
            assert run(tmp_path / "new", *script) == ([], "")
    run(tmp_path, *git, "clone", str(origin), str(repo))
    all_parts = ["--ignore=tests/test_benchmarks.py", "--ignore=tests/test_data_making.py"]
    ignored, said = run(repo, *script)
    assert ignored == all_parts and "No change reaches benchmarks, research, data scripts" in said
    assert run(repo, *script, "HEAD~2")[0] == all_parts
    assert run(repo, *script, "HEAD~3")[0] == all_parts[:1]
    (repo / "benchmarks").mkdir()
    (repo / "benchmarks/b.py").write_text("new")
    assert run(repo, *script)[0] == all_parts[1:]
    run(repo, *git, "add", ".")
    run(repo, *git, "commit", "-m", "benchmarks")
    assert run(repo, *script)[0] == all_parts[1:]
    assert run(repo, *script, "HEAD")[0] == all_parts
