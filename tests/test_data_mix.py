"""Mixing by samples: the realised shares against the wanted ones."""

import json
import random

import pytest
from shard_maker import arguments, flat, load, specify, write_shards, write_tar

from pcmepp_openclip.data.mixing import Mixer, natural_mix, parse_mix


def write_source(folder, counts, size=1):
    """Shards whose images are a few bytes: what is read here is never decoded."""
    for number, count in enumerate(counts):
        write_tar(folder / f"{number}.tar", [{f"{i}.jpg": b"x" * size, f"{i}.txt": b"t"} for i in range(count)])
    (folder / "sizes.json").write_text(json.dumps({f"{i}.tar": n for i, n in enumerate(counts)}))
    return f"{folder.name}={folder}/{{0..{len(counts) - 1}}}.tar"


def test_the_loader_realises_logs_and_keeps_the_mix_when_samples_are_bad(tmp_path, caplog):
    caplog.set_level("INFO")
    write_shards(tmp_path / "a", [200, 3], "a")
    write_shards(tmp_path / "b", [9] * 5, "b")
    from shard_maker import pair

    write_tar(tmp_path / "b/00005.tar", [pair(f"bad{i}", image=b"\xff\xd8\xffno") for i in range(9)])
    (tmp_path / "a/sizes.json").write_text(json.dumps({"00000.tar": 200, "00001.tar": 3}))
    (tmp_path / "b/sizes.json").write_text(json.dumps({f"{i:05d}.tar": 9 for i in range(6)}))
    pattern = f"{tmp_path}/a/{{00000..00001}}.tar::{tmp_path}/b/{{00000..00005}}.tar"
    args = arguments(pattern, "--train-data-mix", "a=1,b=3", dataset_resampled=True, train_num_samples=800, workers=2)
    seen = flat(load(args))
    share = sum(caption.startswith("caption b") for caption in seen) / len(seen)
    assert abs(share - 0.75) < 0.01
    line = next(
        record.getMessage()
        for record in caplog.records
        if "wanted 75.00 %" in record.getMessage() and "epoch" in record.getMessage()
    )
    assert f"b {100 * share:.2f} % (wanted 75.00 %)" in line


def test_without_a_mix_every_sample_counts_alike(tmp_path):
    pattern = "::".join([write_source(tmp_path / "a", [30, 10]), write_source(tmp_path / "b", [5] * 4)])
    assert specify(arguments(pattern, dataset_resampled=True)).shares == pytest.approx([40 / 60, 20 / 60])
    factors = arguments(pattern, dataset_resampled=True, train_data_upsampling_factors="1::4")
    assert specify(factors).shares == pytest.approx([40 / 120, 80 / 120])


def test_the_mixer_is_never_off_by_more_than_one():
    shares = [0.5, 0.0, 0.3, 0.2]
    mixer, counts = Mixer(shares, random.Random(1)), [0] * 4
    for n in range(1, 2000):
        counts[mixer.next()] += 1
        assert all(abs(count - n * share) <= 2 for count, share in zip(counts, shares, strict=True))
    assert counts[1] == 0


def test_mixes_and_factors_that_cannot_be():
    for mix, words in (
        ("a=1", "add b=NUMBER"),
        ("a=1,b=x", "NAME=NUMBER"),
        ("a=1,b=-1", "NAME=NUMBER"),
        ("a=1,b=nan", "NAME=NUMBER"),
        ("a=1,c=1", "no source 'c'"),
        ("a=1,a=1,b=1", "twice"),
        ("a=0,b=0", "nothing to train on"),
    ):
        with pytest.raises(ValueError, match=f"--train-data-mix.*{words}"):
            parse_mix(mix, ["a", "b"])
    for factors, words in (("1", "1 numbers for 2"), ("1::x", "numbers joined"), ("1::-1", "negative")):
        with pytest.raises(ValueError, match=words):
            natural_mix([1, 1], factors)


def test_flags_that_do_not_go_together(tmp_path):
    pattern = "::".join([write_source(tmp_path / "a", [4]), write_source(tmp_path / "b", [4])])
    with pytest.raises(ValueError, match="--train-data-mix needs --dataset-resampled"):
        specify(arguments(pattern, "--train-data-mix", "a=1,b=1"))
    with pytest.raises(ValueError, match="not both"):
        both = {"dataset_resampled": True, "train_data_upsampling_factors": "1::1"}
        specify(arguments(pattern, "--train-data-mix", "a=1,b=1", **both))
    (tmp_path / "b/sizes.json").unlink()
    with pytest.raises(ValueError, match=r"'b' was not counted: give --train-data-mix, or run `pcmepp data count"):
        specify(arguments(pattern, dataset_resampled=True, train_num_samples=10))
