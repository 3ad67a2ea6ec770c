"""Shards that were made to stop everything: each costs itself, whoever reads it."""

import io
import json
import tarfile
import time

import pytest
from hostile_tars import GOOD, HARMLESS, HOSTILE, compressed
from shard_maker import arguments, flat, load, pair, serve, within, write_shards, write_tar

from pcmepp_openclip import cli
from pcmepp_openclip.data import defects
from pcmepp_openclip.data.shards import iter_samples


def read(place: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The keys of the usable samples, and what was noted."""
    noted = []
    samples = iter_samples(place, lambda cause, count, where: noted.append((cause, where)), retries=0)
    return [sample.key for sample in samples if sample is not None], noted


@pytest.mark.parametrize("way", ["", "pipe:cat "])
def test_the_samples_in_front_are_used_and_the_rest_is_one_note(tmp_path, way):
    """A file passes over what is not wanted, a stream reads it."""

    def read_all():
        for data in HOSTILE.values():
            (tmp_path / "0.tar").write_bytes(data)
            begin = time.monotonic()
            yield *read(f"{way}{tmp_path}/0.tar"), time.monotonic() - begin

    for attack, (keys, noted, seconds) in zip(HOSTILE, within(60, lambda: list(read_all())), strict=True):
        assert keys == ([*GOOD, "late"] if attack in HARMLESS else GOOD), attack
        assert [cause for cause, _ in noted] == [defects.TRUNCATED_SHARD] * (attack not in HARMLESS), attack
        assert all("\n" not in where and len(where) < 300 for _, where in noted) and seconds < 5, attack


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """All attacks beside two good shards."""
    folder = tmp_path_factory.mktemp("hostile") / "d"
    write_shards(folder, [8, 8])
    for number, data in enumerate(HOSTILE.values(), 2):
        (folder / f"{number:05d}.tar").write_bytes(data)
    return folder


def test_counting_survives_all_of_them(hostile, capfd):
    assert within(60, cli.main, ["data", "count", f"{hostile}/*.tar", "--workers", "2"]) == 1
    sizes = json.loads((hostile / "sizes.json").read_text())
    assert len(sizes) == 2 + len(HOSTILE) and sum(sizes.values()) == 16 + 2 * len(HOSTILE) + len(HARMLESS)
    unreadable = json.loads((hostile / "sizes.report.json").read_text())["unreadable_shards"]
    assert len(unreadable) == len(HOSTILE) - len(HARMLESS)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("resampled", [False, True])
def test_training_survives_all_of_them(hostile, resampled):
    def train():
        args = arguments(
            f"{hostile}/*.tar", dataset_resampled=resampled, train_num_samples=100, batch_size=5, workers=2
        )
        data = load(args)
        return flat(data), data.dataloader.last.by_source(["d"])["d"]

    (hostile / "sizes.json").unlink(missing_ok=True)
    (hostile / "sizes.report.json").unlink(missing_ok=True)
    seen, lost = within(60, train)
    assert len(seen) == 100 and {f"caption {key}" for key in GOOD} <= set(seen)
    assert set(lost) == {defects.TRUNCATED_SHARD}


def test_a_small_file_does_not_unpack_to_gigabytes(tmp_path):
    for name, data in compressed().items():
        (tmp_path / name).write_bytes(data)
        assert len(data) < 1 << 20
        keys, noted = within(30, read, str(tmp_path / name))
        assert keys[:2] == GOOD and len(keys) < 6 and [cause for cause, _ in noted] == [defects.EXPANDS], name
    assert within(60, cli.main, ["data", "count", f"{tmp_path}/bomb.tar.*"]) == 1


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_compressed_shards_are_read_as_before(tmp_path, suffix):
    write_tar(tmp_path / "0.tar", [pair(f"{i}") for i in range(40)])
    with tarfile.open(tmp_path / f"1.tar.{suffix}", f"w:{suffix}") as tar:
        for i in range(40):
            for name, data in pair(f"{i}").items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with serve(tmp_path) as server:
        for place in (str(tmp_path / f"1.tar.{suffix}"), f"{server.url}/1.tar.{suffix}"):
            assert read(place) == read(str(tmp_path / "0.tar")) == ([f"{i}" for i in range(40)], [])


def test_long_names_are_read_whoever_wrote_them(tmp_path):
    names = ["a" * 99, "b" * 300, "c/" * 1000 + "d" * 90, "ü" * 200]
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "0.tar", "w", format=format, pax_headers={"comment": "x"}) as tar:
            for name in names:
                for member, data in pair(name, "text").items():
                    info = tarfile.TarInfo(member)
                    info.size, info.mtime = len(data), 1.5
                    tar.addfile(info, io.BytesIO(data))
        assert read(str(tmp_path / "0.tar")) == (names, [])


def test_a_zeroed_header_is_said_by_count(tmp_path, capsys):
    """Of 128 samples 120 were counted, without a word."""
    path = write_tar(tmp_path / "d/0.tar", [pair(f"{i:04d}") for i in range(128)])
    with tarfile.open(path) as tar:
        at = next(info.offset for info in tar if info.name == "0120.jpg")
    data = bytearray(path.read_bytes())
    data[at : at + 512] = bytes(512)
    path.write_bytes(data)
    assert cli.main(["data", "count", str(path)]) == 1
    out = capsys.readouterr().out
    assert "120 usable pairs of 120" in out and "truncated shard, 120 pairs before that" in out
    assert "zeros in its middle" in out
