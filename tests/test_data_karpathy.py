"""COCO and Flickr30k to shards, on stand-ins in the layout of the published files; then trained and evaluated on."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import open_clip_train.data as stock
import pytest
from drawn_shards import SCENES, caption
from eval_data import captions, png
from shard_maker import arguments, flat, load, specify

from pcmepp_openclip.data.captioned import read_captioned
from pcmepp_openclip.data.count import count_shard, write_counts
from pcmepp_openclip.data.sources import parse_sources

SCRIPTS = Path(__file__).parent.parent / "launch/data"
PUBLISHED = {"coco": {"restval": 5, "train": 12, "val": 4, "test": 3}, "flickr30k": {"train": 12, "val": 4, "test": 3}}


def run(script: str, *args: object) -> subprocess.CompletedProcess:
    """NAME.sh with everything, or NAME without the count at the end, whose start takes most of the time."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHON": sys.executable}
    whole = (
        [str(SCRIPTS / script)] if script.endswith(".sh") else [sys.executable, str(SCRIPTS / "karpathy.py"), script]
    )
    return subprocess.run([*whole, *map(str, args)], capture_output=True, text=True, env=env, timeout=100)


def published(folder: Path, dataset: str, packed: bool = False) -> tuple[Path, Path, list[dict]]:
    """Annotations and images as they are published, with the entries of the annotations."""
    entries = []
    for split, count in PUBLISHED[dataset].items():
        for _ in range(count):
            i = len(entries)
            year = "train2014" if split == "train" else "val2014"
            name = f"COCO_{year}_{i:012d}.jpg" if dataset == "coco" else f"1000{i:05d}.jpg"
            texts = [*captions(SCENES[i]), f"  picture {i}\n", f"{caption(*SCENES[i])} once more"]
            sentids = list(range(5 * i, 5 * i + 5))
            entry = {"sentids": sentids, "imgid": i, "split": split, "filename": name}
            entry["sentences"] = [
                {"tokens": text.split(), "raw": text, "imgid": i, "sentid": sentid}
                for text, sentid in zip(texts, sentids, strict=True)
            ]
            entries.append(entry | ({"filepath": year, "cocoid": i} if dataset == "coco" else {}))
    (folder / "a.json").write_text(json.dumps({"images": entries, "dataset": dataset}))
    images = folder / "images"
    images.mkdir()
    for entry in entries:
        inside = Path(entry.get("filepath", "flickr30k-images" if packed else ""))
        if packed:
            with zipfile.ZipFile(images / f"{inside}.zip", "a") as archive:
                archive.writestr(f"{inside}/{entry['filename']}", png(SCENES[entry["imgid"]]))
        else:
            (images / inside).mkdir(exist_ok=True)
            (images / inside / entry["filename"]).write_bytes(png(SCENES[entry["imgid"]]))
    return folder / "a.json", images, entries


@pytest.mark.parametrize("dataset, packed", [("coco", True), ("flickr30k", False)])
def test_published_files_become_shards(tmp_path, dataset, packed):
    annotations, images, entries = published(tmp_path, dataset, packed)
    whole = dataset == "coco" and packed
    done = run(f"{dataset}{'.sh' * whole}", annotations, images, tmp_path / "out", "--per-shard", "4")
    assert done.returncode == 0, done.stderr
    train = [entry for entry in entries if entry["split"] in ("train", "restval")]
    pattern = f"{tmp_path}/out/train/*.tar"
    if whole:
        assert f"{dataset}: {len(train)} usable pairs of {len(train)} samples in" in done.stdout
    else:
        (source,) = parse_sources(pattern)
        write_counts(source, [count_shard(shard, 10**6) for shard in source.shards], None)
    texts = {" ".join(sentence["raw"].split())[:38] for entry in train for sentence in entry["sentences"]}
    first = {entry["sentences"][0]["raw"][:38] for entry in train}
    assert set(flat(load(arguments(pattern)))) == first
    specify(arguments(pattern, "--captions", "all"), check=True)
    assert set(flat(load(arguments(pattern, "--captions", "all")))) == texts

    for split in ("val", "test"):
        expected = [entry for entry in entries if entry["split"] == split]
        found = read_captioned(str(tmp_path / "out"), split)
        assert [image.read() for image in found.images] == [png(SCENES[entry["imgid"]]) for entry in expected]
        assert found.captions == [" ".join(s["raw"].split()) for entry in expected for s in entry["sentences"]]
        assert [fact["imgid"] for fact in found.facts] == [entry["imgid"] for entry in expected]
        assert [fact["key"] for fact in found.facts] == [Path(entry["filename"]).stem for entry in expected]


def test_an_interrupted_call_resumes(tmp_path):
    annotations, images, _ = published(tmp_path, "coco")
    out = tmp_path / "out"
    assert run("coco", annotations, images, out, "--per-shard", "4").returncode == 0
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("train/*.tar")}
    (out / "train/00001.tar").unlink()
    (out / "train/00001.part").write_text("half of it")
    (out / "val/nshards.txt").unlink()
    assert run("coco", annotations, images, out, "--per-shard", "4").returncode == 0
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("train/*.tar")}
    assert [name for name in before if before[name] != after[name]] == ["00001.tar"]
    assert before["00001.tar"][0] == after["00001.tar"][0] and not list(out.rglob("*.part"))
    assert (out / "val/nshards.txt").read_text().strip() == "1"


def test_open_clip_reads_the_first_caption(tmp_path):
    """Its own reader of --val-data takes the .txt; ours, of shards on a disk, takes all."""
    annotations, images, entries = published(tmp_path, "flickr30k")
    assert run("flickr30k", annotations, images, tmp_path / "out").returncode == 0
    args = arguments("", val_data=f"{tmp_path}/out/val/0.tar", val_num_samples=4)

    def tokens(texts):
        return [texts]

    data = stock.get_wds_dataset(args, lambda image: len(image.getbands()), False, tokenizer=tokens)
    ((_, texts),) = list(data.dataloader)
    assert sorted(texts) == sorted(e["sentences"][0]["raw"] for e in entries if e["split"] == "val")


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "a.json does not hold Karpathy's annotations (JSONDecodeError"),
        ("[]", "a.json does not hold Karpathy's annotations (TypeError"),
        ('{"images": [{"split": "train"}]}', "annotations (KeyError: 'sentences')"),
        ('{"images": []}', "a.json has no images of train and val and test: is it Karpathy's file?"),
        (None, "COCO_val2014_000000000003.jpg, neither as a file nor in a .zip: give the images' folder."),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, content, message):
    annotations, images, entries = published(tmp_path, "coco")
    if content is None:
        (images / "val2014" / entries[3]["filename"]).unlink()
    else:
        annotations.write_text(content)
    done = run("coco", annotations, images, tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr and message in done.stderr.splitlines()[-1]


def test_bad_places_and_archives(tmp_path):
    annotations, images, _ = published(tmp_path, "flickr30k", packed=True)
    out = tmp_path / "out"
    for change, args, message in (
        (lambda: None, (tmp_path / "x.json", images, out), "x.json: download flickr30k first."),
        (lambda: None, (annotations, tmp_path / "x", out), "x: download flickr30k first."),
        (lambda: None, (annotations, images, out, "--per-shard", "0"), "--per-shard must be at least 1."),
        (lambda: out.write_text("a file"), (annotations, images, out), "cannot be written to"),
        (
            lambda: (images / "flickr30k-images.zip").write_bytes(b"PK no zip"),
            (annotations, images, tmp_path / "other"),
            "has a .zip file that cannot be read",
        ),
    ):
        change()
        done = run("flickr30k", *args)
        assert done.returncode == 1 and message in done.stderr.splitlines()[-1], done.stderr
    assert run("coco.sh", annotations).returncode == 2
    dry = run("coco.sh", "--dry-run", annotations, images, tmp_path / "dry")
    assert "karpathy.py coco" in dry.stdout and not (tmp_path / "dry").exists()
