"""Validation data that cannot be read are said at the start and by --dry-run: one sentence that names the flag."""

from pathlib import Path

import pytest
from drawn_shards import write_csv, write_shards

from pcmepp_openclip.data.validation import ValidationFlags, check_validation
from pcmepp_openclip.training import command as train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("validation")


@pytest.fixture(scope="module")
def shards(folder):
    return write_shards(folder / "shards", shards=2, samples=4)


@pytest.fixture(scope="module")
def table(folder):
    return write_csv(folder, 4)


def check(val_data=None, imagenet_val=None, kind="auto", columns=("filepath", "title", ",")):
    check_validation(ValidationFlags(val_data, imagenet_val, kind, *columns), max_pixels=10**8)


def test_what_can_be_read_is_accepted(folder, shards, table):
    (folder / "classes/n01440764").mkdir(parents=True)
    check(shards)
    check(shards, kind="webdataset")
    check(table)
    check(table, kind="csv")
    check(imagenet_val=str(folder / "classes"))
    check("nothing/there.tar", kind="synthetic")
    check("pipe:cat nothing.tar::https://example.invalid/{0..3}.tar")  # not looked at


def test_several_patterns_are_all_looked_at(shards):
    with pytest.raises(ValueError, match=r"^--val-data: .*gone.tar cannot be read \(No such file or directory\)"):
        check(f"{shards}::{Path(shards).parent}/gone.tar")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("gone.tar", None, r"gone.tar cannot be read \(No such file or directory\); is the path right\?$"),
        ("text.tar", b"no tar at all", r"the first samples of .*text.tar hold no pair of an image and a .txt \(.*\)"),
        ("empty.tar", b"", r"the first samples of .*empty.tar hold no pair"),
        ("{0..x}.tar", None, r"cannot be read|cannot be expanded"),
        ("*.tar", None, r"open_clip, which does not expand \*: use braces, as in {00..09}.tar"),
        ("gone.csv", None, r"gone.csv cannot be read \(No such file or directory\)"),
        ("empty.csv", b"", r"empty.csv is not a table \(EmptyDataError\)"),
        ("binary.csv", b"\xff\xfe\x00\x80,\x81", r"binary.csv is not a table \(UnicodeDecodeError\)"),
        ("other.csv", b"path,title\n1.png,x", r"has no column filepath, only path, title: change --csv-img-key or"),
        ("texts.csv", b"filepath,text\n1.png,x", r"has no column title, .*: change --csv-caption-key or --csv-sep"),
        ("tabs.csv", b"filepath\ttitle\n1.png\tx", r"has no column filepath, only filepath\\ttitle: .*--csv-separator"),
        ("rows.csv", b"filepath,title\n", r"rows.csv has no rows"),
        ("image.csv", b"filepath,title\ngone.png,x", r"gone.png, the first image of .*image.csv, does not exist"),
    ],
)
def test_what_cannot_is_one_sentence(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        check(str(tmp_path / name))
    assert str(caught.value).startswith("--val-data") and "\n" not in str(caught.value)


def test_the_folder_of_imagenet(tmp_path):
    with pytest.raises(ValueError, match=r"--imagenet-val .*gone cannot be read \(No such file"):
        check(imagenet_val=str(tmp_path / "gone"))
    (tmp_path / "an image.jpg").touch()
    with pytest.raises(ValueError, match="it must hold one subfolder of images per class"):
        check(imagenet_val=str(tmp_path))


@pytest.mark.parametrize("more", [["--dry-run", "2"], []])
@pytest.mark.parametrize("flag", ["--val-data", "--imagenet-val"])
def test_a_run_says_it_before_its_model_is_built(shards, tmp_path, capsys, flag, more):
    argv = [
        "--model",
        "PCMEpp-tiny",
        "--train-data",
        shards,
        "--train-num-samples",
        "8",
        "--dataset-type",
        "webdataset",
    ]
    argv += ["--batch-size", "4", "--workers", "0", "--precision", "fp32", "--logs", str(tmp_path / "logs")]
    assert train.main([*argv, flag, str(tmp_path / "gone.tar"), *more]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and flag in said[0] and "No such file or directory" in said[0]
    assert not list(tmp_path.rglob("out.log"))
