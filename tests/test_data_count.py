"""Counting and checking: what is written, what is said, and that stock open_clip can use it."""

import json
import os
import re
import subprocess
import threading

import pandas
import pytest
from open_clip_train.data import get_dataset_size
from shard_maker import arguments, flat, load, pair, picture, serve, specify, within, write_shards, write_tar

from pcmepp_openclip import cli
from pcmepp_openclip.data import count as count_module


def test_count_writes_what_stock_open_clip_reads(tmp_path, capsys):
    pattern = write_shards(tmp_path / "d", [7, 3, 12])
    assert cli.main(["data", "count", pattern]) == 0
    assert get_dataset_size(pattern) == (22, 3)
    assert "22 usable pairs of 22 samples in 3 shards" in capsys.readouterr().out


def test_the_report(tmp_path, capsys):
    samples = [
        pair("a", "one two three", picture(size=(40, 30))),
        pair("b", "one", picture(size=(100, 90))),
        {"c.txt": b"no image"},
        pair("d", ""),
        pair("e", image=picture()[:100]),
    ]
    write_tar(tmp_path / "0.tar", samples)
    assert cli.main(["data", "count", str(tmp_path / "0.tar")]) == 0
    report = json.loads((tmp_path / "sizes.report.json").read_text())
    assert (report["samples"], report["usable"]) == (5, 2)
    assert report["unusable"] == {"no image": 1, "empty caption": 1, "broken image": 1}
    assert report["bytes"] == sum(len(data) for sample in samples for data in sample.values())
    assert report["shorter_side_pixels"] == pytest.approx({"min": 30, "5%": 33, "median": 60, "95%": 87, "max": 90})
    assert report["caption_words"] == pytest.approx({"min": 1, "5%": 1.1, "median": 2, "95%": 2.9, "max": 3})
    assert report["shards"]["0.tar"]["unusable"] == {"no image": [2], "empty caption": [3], "broken image": [4]}
    out = capsys.readouterr().out
    assert "2 usable pairs of 5" in out and "1 broken image" in out and "pixels: min 30" in out


def test_a_table_has_one_row_per_shard_of_all_sources(tmp_path, capsys):
    write_tar(tmp_path / "a/0.tar", [pair("a", "one two three", picture(size=(40, 30))), pair("b", ""), pair("c", "")])
    write_tar(tmp_path / "b/1.tar", [pair("d", "one", picture(size=(100, 90))), {"e.txt": b"no image"}])
    (tmp_path / "b/2.tar").write_bytes(b"<html>")
    pattern = f"{tmp_path}/a/0.tar::{tmp_path}/b/{{1,2}}.tar"
    for suffix in ("csv", "html"):
        assert cli.main(["data", "count", pattern, "--table", str(tmp_path / f"t.{suffix}")]) == 1
    page = (tmp_path / "t.html").read_text()
    assert page.count("<tr") == 4 and all(f"<td>{i}.tar</td>" in page for i in range(3)) and "<html>" not in page
    names = ["source", "shard", "samples", "usable", "empty caption", "no image", "median_shorter_side_pixels"]
    table = pandas.read_csv(tmp_path / "t.csv").astype(object).where(lambda table: table.notna(), None)
    rows = [
        (*(row[name] for name in [*names, "median_caption_words"]), "not a tar" in (row["problem"] or ""))
        for _, row in table.iterrows()
    ]
    assert rows == [
        ("a", "0.tar", 3, 1, 2, 0, 30.0, 3.0, False),
        ("b", "1.tar", 2, 1, 0, 1, 90.0, 1.0, False),
        ("b", "2.tar", 0, 0, 0, 0, None, None, True),
    ]
    assert cli.main(["data", "count", "x.tar", "--table", "t.xlsx"]) == 2
    assert "--table must end in .csv or .html" in capsys.readouterr().err


def test_bad_shards_are_counted_up_to_their_end_and_said(tmp_path, capsys):
    pattern = write_shards(tmp_path / "d", [20, 20, 20])
    damaged = tmp_path / "d/00001.tar"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2 + 100])
    (tmp_path / "d/00002.tar").unlink()
    assert cli.main(["data", "count", pattern]) == 1
    sizes = json.loads((tmp_path / "d/sizes.json").read_text())
    assert sizes["00000.tar"] == 20 and 5 < sizes["00001.tar"] < 20 and sizes["00002.tar"] == 0
    out = capsys.readouterr().out
    assert "truncated shard" in out and "missing shard" in out
    data = load(arguments(pattern))
    assert len(set(flat(data))) == 20 + sizes["00001.tar"]


def test_shards_in_several_folders_have_a_manifest_each(tmp_path):
    write_shards(tmp_path / "a", [5])
    write_shards(tmp_path / "b", [7])
    pattern = f"{tmp_path}/{{a,b}}/00000.tar"
    cli.main(["data", "count", pattern])
    assert json.loads((tmp_path / "b/sizes.json").read_text()) == {"00000.tar": 7}
    assert specify(arguments(pattern)).samples == 12


def test_counting_a_part_keeps_the_rest(tmp_path):
    pattern = write_shards(tmp_path, [5, 6, 7])
    cli.main(["data", "count", pattern])
    write_tar(tmp_path / "00001.tar", [pair("x")])
    cli.main(["data", "count", str(tmp_path / "00001.tar")])
    assert json.loads((tmp_path / "sizes.json").read_text()) == {"00000.tar": 5, "00001.tar": 1, "00002.tar": 7}


def test_counts_of_pipes_go_to_a_file_that_training_is_given(tmp_path, capsys):
    write_shards(tmp_path / "d", [5, 6])
    pattern = f"p=pipe:cat {tmp_path}/d/{{00000..00001}}.tar"
    assert cli.main(["data", "count", pattern]) == 2
    assert "--output p.sizes.json" in capsys.readouterr().err
    output = tmp_path / "p.sizes.json"
    assert cli.main(["data", "count", pattern, "--output", str(output)]) == 0
    assert specify(arguments(pattern, "--train-data-sizes", f"p={output}")).samples == 11


def test_an_uncounted_source_is_an_error_with_a_command_that_cures_it(tmp_path):
    pattern = write_shards(tmp_path / "d", [5, 6])
    with pytest.raises(ValueError, match="was not counted") as error:
        specify(arguments(pattern), check=True)
    command = re.search(r"`pcmepp (.*?) '(.*?)'`", str(error.value))
    assert cli.main([*command[1].split(), command[2]]) == 0
    specify(arguments(pattern), check=True)
    os.remove(tmp_path / "d/sizes.json")
    specify(arguments(pattern, train_num_samples=11), check=True)


MANIFESTS = {
    "[1, 2]": "not a sizes.json",
    '{"00000.tar": "__import__(1)"}': "not a sizes.json",
    '{"00000.tar": -3}': "not a sizes.json",
    '{"00000.tar": true}': "not a sizes.json",
    '{"00000.tar"': "not JSON",
    '{"other.tar": 3}': "does not list 00000.tar",
    '{"00000.tar": 0}': "no usable sample",
    "[" * 100_000: "not JSON",
    f'{{"00000.tar": {10**18}}}': "more than 1,000,000,000 samples",
    f'{{"00000.tar": {"9" * 5000}}}': "not JSON",
    f'{{"00000.tar": "{"9" * 5000}"}}': "not a sizes.json",
    '{"00000.tar": "²"}': "not a sizes.json",
    '{"00000.tar": 1e18}': "not a sizes.json",
    '{"00000.tar": NaN}': "not a sizes.json",
}


def test_manifests_that_cannot_be_are_one_sentence(tmp_path):
    pattern = write_shards(tmp_path / "d", [2])

    def sentences():
        for content in MANIFESTS:
            (tmp_path / "d/sizes.json").write_text(content)
            try:
                yield flat(load(arguments(pattern)))
            except ValueError as error:
                yield str(error)

    for shown, words in zip(within(20, lambda: list(sentences())), MANIFESTS.values(), strict=True):
        assert words in shown and "sizes.json" in shown and "\n" not in shown and len(shown) < 1000


def test_check_finds_sources_that_do_not_exist(tmp_path):
    good = write_shards(tmp_path / "a", [3])
    with pytest.raises(ValueError, match=r"--train-data: no shard of source 'b' exists, the first would be .*/0.tar"):
        specify(arguments(f"{good}::b={tmp_path}/nowhere/{{0..9}}.tar", train_num_samples=1), check=True)
    with serve(tmp_path) as server, pytest.raises(ValueError, match=r"source 'b' can be read .*404"):
        specify(arguments(f"{good}::b={server.url}/nowhere/{{0..9}}.tar", train_num_samples=1), check=True)


def test_check_says_what_the_first_shard_holds_instead(tmp_path):
    for samples, words in (
        ([{"a.jpg": picture(), "a.json": b"{}"}], r"hold \.jpg, \.json \(no caption\)"),
        ([{"a.gif": b"1", "a.txt": b"x"}], r"hold \.gif, \.txt \(no image\)"),
        ([pair("a", b"\xff\xfe")], "caption not UTF-8"),
        ([pair("a", image=b"no")], "unknown image format"),
        ([], "not a tar|holds no files"),
    ):
        write_tar(tmp_path / "d/0.tar", samples)
        with pytest.raises(ValueError, match=words) as error:
            specify(arguments(str(tmp_path / "d/0.tar"), train_num_samples=1), check=True)
        assert "'d'" in str(error.value) and "\n" not in str(error.value)


def test_check_wants_enough_shards_for_workers_and_ranks(tmp_path):
    pattern = write_shards(tmp_path / "d", [2] * 5)
    cli.main(["data", "count", pattern])
    specify(arguments(pattern, workers=5), check=True)
    with pytest.raises(ValueError, match=r"--workers 3 on 2 ranks .* 6 shards .* has 5: use --workers 2"):
        specify(arguments(pattern, workers=3, world_size=2), check=True)
    specify(arguments(pattern, workers=3, world_size=2, dataset_resampled=True), check=True)


def test_the_command_checks_alone_and_fully(tmp_path, capsys):
    pattern = write_shards(tmp_path / "d", [9] * 4)
    assert cli.main(["data", "check", pattern]) == 0
    assert "not counted: run `pcmepp data count" in capsys.readouterr().out
    cli.main(["data", "count", pattern])
    assert cli.main(["data", "check", pattern, "--full"]) == 0
    damaged = tmp_path / "d/00002.tar"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    assert cli.main(["data", "check", pattern]) == 0
    assert cli.main(["data", "check", pattern, "--full"]) == 1
    assert "00002.tar: sizes.json says 9" in capsys.readouterr().out
    assert cli.main(["data", "check", pattern, "--workers", "2", "--ranks", "4"]) == 2
    assert "would need at least 8 shards" in capsys.readouterr().err


def test_other_kinds_of_data_are_left_to_open_clip(tmp_path):
    """Even the check does not look for the file."""
    for place, kind in ((str(tmp_path / "x.csv"), "csv"), (str(tmp_path / "x.csv"), "auto"), ("", "synthetic")):
        spec = specify(arguments(place, dataset_type=kind), check=True)
        assert (spec.sources, spec.samples, spec.config.train_data) == ([], 0, place)
    with pytest.raises(ValueError, match="no shard of source"):
        specify(arguments(str(tmp_path / "x.tar"), dataset_type="auto"), check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def count(pattern, *more):
    """`pcmepp data count` with the shards that it reads."""
    read, stock = [], count_module.count_source

    def counted(source, *args, **kwargs):
        read.append(source.name)
        return stock(source, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pcmepp_openclip.data.command.count_source", counted)
        return cli.main(["data", "count", pattern, *map(str, more)]), read


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path, small_disk, capsys):
    pattern = write_shards(tmp_path / "a", [3])
    write_shards(small_disk / "d", [3])
    assert count(pattern, "--output", tmp_path / "nowhere/x.json") == (2, [])
    assert "There is no folder" in capsys.readouterr().err
    (small_disk / "full").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    assert count(f"{pattern}::{small_disk}/d/00000.tar") == (2, [])
    assert "(No space left on device): add --output" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert count(f"{small_disk}/d/00000.tar") == (2, [])
    assert "(Read-only file system): add --output d.sizes.json" in capsys.readouterr().err
    (tmp_path / "a/sizes.json").write_text("{")
    assert count(pattern) == (2, [])
    assert "not JSON" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["00000.tar", "sizes.json"]


def test_counts_that_cannot_be_written_after_the_work_are_kept_elsewhere(tmp_path, small_disk, capsys, monkeypatch):
    """The disk becomes full while the shards are read."""
    write_shards(small_disk / "d", [3, 4])
    monkeypatch.chdir(tmp_path)
    fifo = tmp_path / "wait.tar"
    os.mkfifo(fifo)

    def fill_then_let_go():
        with open(fifo, "wb") as file:
            (small_disk / "full").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
            file.write((small_disk / "d/00000.tar").read_bytes())

    filler = threading.Thread(target=fill_then_let_go)
    filler.start()
    (small_disk / "d/00002.tar").symlink_to(fifo)
    pattern = f"{small_disk}/d/{{00000..00002}}.tar"
    assert cli.main(["data", "count", pattern]) == 2
    filler.join()
    said = capsys.readouterr().err.splitlines()[-1]
    kept = re.search(r"\(No space left on device\): the counts are kept in (\S+\.json);", said)[1]
    assert specify(arguments(pattern, "--train-data-sizes", f"d={kept}")).samples == 10
    assert not list((small_disk / "d").glob("*.part"))


def test_a_count_that_is_a_lie_ends_the_run_with_the_cause(tmp_path):
    pattern = write_shards(tmp_path / "d", [10, 10])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 10**9, "00001.tar": 10}))

    def train():
        try:
            return len(flat(load(arguments(pattern, workers=2))))
        except ValueError as error:
            return str(error)

    assert "fewer samples than counted" in within(20, train)
