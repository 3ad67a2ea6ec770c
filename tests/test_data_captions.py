"""Several captions per image: one drawn per epoch, all of them, or as several positives of a batch; bad input."""

import collections
import json
import re

import pytest
import torch
from helpers import split
from shard_maker import (
    arguments,
    captions,
    flat,
    load,
    pair,
    picture,
    read_back,
    several,
    specify,
    write_shards,
    write_tar,
)

from pcmepp_openclip.data import defects
from pcmepp_openclip.data.captions import CaptionChoice, Unusable, read_captions
from pcmepp_openclip.data.count import count_shard
from pcmepp_openclip.data.shards import Sample
from pcmepp_openclip.models.batches import LabelledImages
from pcmepp_openclip.training import command

COUNTS, PER_IMAGE = [7, 13, 1, 19], 5


def keys() -> list[str]:
    return [f"{number}{i:02d}" for number, count in enumerate(COUNTS) for i in range(count)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions") / "d"
    for number, count in enumerate(COUNTS):
        write_tar(folder / f"{number}.tar", [several(f"{number}{i:02d}") for i in range(count)])
    (folder / "sizes.json").write_text(json.dumps({f"{i}.tar": n for i, n in enumerate(COUNTS)}))
    return f"{folder}/{{0..3}}.tar"


def drawn(data, epoch: int) -> dict[str, str]:
    """The caption of each image in an epoch."""
    data.set_epoch(epoch)
    return {caption[:3]: caption for caption in flat(data)}


def test_one_caption_is_drawn_per_image_and_epoch(shards):
    data = load(arguments(shards, "--captions", "draw", batch_size=1))
    epochs = [drawn(data, epoch) for epoch in range(25)]
    assert all(sorted(epoch) == keys() for epoch in epochs)
    counts = collections.Counter(epoch[key][-1] for epoch in epochs for key in keys())
    assert set(counts) == set("01234")
    expected = len(epochs) * len(keys()) / PER_IMAGE
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 18.5  # chi-square, 4 degrees, p = 0.001
    for key in keys():
        assert len({epoch[key] for epoch in epochs}) >= 3


WAYS = {
    "draw": ("--captions", "draw"),
    "all": ("--captions", "all"),
    "positives": ("--captions", "all", "--multi-positives"),
    "noise": ("--captions", "draw", "--noise-ratio", "0.5"),
}


@pytest.mark.parametrize("way", WAYS)
def test_samples_are_the_same_on_any_ranks_workers_and_after_a_resume(shards, way):
    """Images, captions and, where there are several positives, the ids that say which belong together."""
    size = PER_IMAGE if way == "positives" else 1

    def batches(first=0, **values):
        for rank in range(values.get("world_size", 1)):
            data = load(arguments(shards, *WAYS[way], rank=rank, **{"batch_size": size, **values}))
            data.set_epoch(3, first_batch=first)
            for images, texts in data.dataloader:
                ids = images.own_id_N if way == "positives" else torch.zeros(len(texts))
                pixels = images.image_NCHW if way == "positives" else images
                yield list(zip(pixels.flatten(1)[:, :9].tolist(), read_back(texts), ids.tolist(), strict=True))

    def samples(**values):
        return sorted(sample for batch in batches(**values) for sample in batch)

    alone = samples()
    assert samples(world_size=4) == samples(world_size=2, workers=2) == alone
    assert samples(seed=1) != alone or way in ("all", "positives")
    whole = list(batches(batch_size=2 * size))
    assert list(batches(batch_size=2 * size, first=4)) == whole[4:] != whole[3:-1]


@pytest.mark.parametrize("world_size, per_image", [(1, 5), (2, 3), (3, 5)])
def test_all_captions_make_an_exact_epoch(shards, world_size, per_image):
    """Against a count of what was seen: each image so often, each time with another caption."""
    seen, sizes = [], set()
    flags = ("--captions", "all", "--captions-per-image", str(per_image))
    for rank in range(world_size):
        data = load(arguments(shards, *flags, world_size=world_size, rank=rank))
        sizes.add((data.dataloader.num_batches, data.dataloader.num_samples))
        seen += flat(data)
    total = per_image * len(keys())
    ((_, samples),) = sizes
    assert samples == len(seen) == -(-total // (4 * world_size)) * 4 * world_size
    unique = set(seen)
    assert len(unique) == total, "no caption twice but for the last batch"
    assert collections.Counter(caption[:3] for caption in unique) == dict.fromkeys(keys(), per_image)
    if per_image == PER_IMAGE:
        assert unique == {f"{key} caption {i}" for key in keys() for i in range(PER_IMAGE)}


def test_images_with_other_numbers_of_captions(tmp_path):
    """Fewer captions are repeated as evenly as possible; of more, some are used, and others in other epochs."""
    write_tar(tmp_path / "d/0.tar", [several("a", 1), several("b", 2), several("c", 7), pair("t", "t caption 0")])
    (tmp_path / "d/sizes.json").write_text('{"0.tar": 4}')
    data = load(arguments(f"{tmp_path}/d/0.tar", "--captions", "all", "--captions-per-image", "4"))
    later = set()
    for epoch in range(6):
        data.set_epoch(epoch)
        seen = collections.Counter(flat(data))
        assert seen["a caption 0"] == seen["t caption 0"] == 4
        assert seen["b caption 0"] == seen["b caption 1"] == 2
        of_c = {caption: n for caption, n in seen.items() if caption.startswith("c")}
        assert len(of_c) == 4 and set(of_c.values()) == {1}
        later |= set(of_c)
    assert len(later) > 4


@pytest.mark.parametrize("seeds", [(0, 0, 0), (0, 1, 2)])
def test_all_captions_resumed_with_other_settings(shards, seeds):
    """An epoch that goes on twice, with another batch size, more ranks, and other seeds, which the captions must not
    follow: each caption once, but for the last batch."""
    state, seen = None, []
    for seed, (batch_size, world_size, batches) in zip(seeds, ((4, 1, 17), (3, 2, 5), (3, 2, None)), strict=True):
        for rank in range(world_size):
            settings = {"batch_size": batch_size, "world_size": world_size, "rank": rank, "seed": seed}
            data = load(arguments(shards, "--captions", "all", **settings))
            first, how = (0, "") if state is None else data.dataloader.resume(1, state)
            data.set_epoch(1, first_batch=first)
            seen += [caption for batch in captions(data)[:batches] for caption in batch]
        state = batches and data.dataloader.state(first + batches)
        assert not first or state is None or "--batch-size 4 is now 3" in how
    assert len(set(seen)) == PER_IMAGE * len(keys()) and len(seen) - len(set(seen)) < 8
    if seeds[1] != seeds[2]:
        assert f"{len(seen) - len(set(seen))} are seen again" in how


def test_a_run_with_other_captions_is_not_resumed_within_the_epoch(shards):
    state = load(arguments(shards, "--captions", "draw")).dataloader.state(3)
    assert load(arguments(shards, "--captions", "all")).dataloader.resume(0, state)[0] is None


# --- Several positives ------------------------------------------------------------------------------------


def positives(shards, *flags, **values):
    return load(arguments(shards, "--captions", "all", "--multi-positives", *flags, **{"batch_size": 10, **values}))


def test_batches_of_several_positives_hold_all_captions_of_their_images(shards):
    data = positives(shards, workers=2)
    batches = list(data.dataloader)
    assert len(batches) == data.dataloader.num_batches == -(-len(keys()) // 2)
    assert data.dataloader.num_samples == 10 * len(batches)
    ids = {}
    for images, texts in batches:
        assert isinstance(images, LabelledImages) and len(images) == len(texts) == 10
        assert images.own_id_N.dtype == torch.int64 and torch.equal(images.own_id_N, images.partner_id_N)
        assert images.own_share_N.dtype == torch.float32 and (images.own_share_N == 1).all()
        words = read_back(texts)
        for i in range(0, 10, PER_IMAGE):
            key = words[i][:3]
            assert set(words[i : i + PER_IMAGE]) == {f"{key} caption {j}" for j in range(PER_IMAGE)}
            assert (images.image_NCHW[i : i + PER_IMAGE] == images.image_NCHW[i]).all()
        for word, own in zip(words, images.own_id_N.tolist(), strict=True):
            assert ids.setdefault(word[:3], own) == own
    assert sorted(ids) == keys() and len(set(ids.values())) == len(keys())


def test_several_positives_are_resumed(shards):
    def words(batches):
        return [read_back(texts) for _, texts in batches]

    data = positives(shards)
    whole = words(data.dataloader)
    state, seen = data.dataloader.state(7), {word for batch in whole[:7] for word in batch}
    data = positives(shards, batch_size=15)
    first, how = data.dataloader.resume(0, state)
    assert "--batch-size 10 is now 15" in how
    data.set_epoch(0, first_batch=first)
    rest = [word for batch in words(data.dataloader) for word in batch]
    again = int(how.split(";")[1].split()[0])  # in images
    assert 0 <= again < 3 and len(seen) + len(rest) == PER_IMAGE * (len(keys()) + again)
    assert seen | set(rest) == {f"{key} caption {i}" for key in keys() for i in range(PER_IMAGE)}


# --- Members ----------------------------------------------------------------------------------------------

JSON = {
    "both": '{"captions": ["a", " b ", " "]}',
    "empty": '{"captions": []}',
    "none": '{"caption": "x"}',
    "list": "[1]",
}


@pytest.mark.parametrize(
    "text, facts, first, every",
    [
        ("t", None, ("t",), ("t",)),
        ("t", JSON["both"], ("t",), ("a", "b")),
        (None, JSON["both"], ("a",), ("a", "b")),
        ("t", JSON["empty"], ("t",), ("t",)),
        ("t", JSON["none"], ("t",), ("t",)),
        ("t", JSON["list"], ("t",), ("t",)),
        (None, JSON["none"], defects.NO_CAPTION, defects.NO_CAPTION),
        (None, '{"captions": [" ", "\\u0000"]}', defects.NO_CAPTION, defects.NO_CAPTION),
        ("t", "{", ("t",), defects.BAD_CAPTIONS),
        ("t", "\xff", ("t",), defects.BAD_CAPTIONS),
        ("t", '{"captions": "a"}', ("t",), defects.BAD_CAPTIONS),
        ("t", '{"captions": ["a", 1]}', ("t",), defects.BAD_CAPTIONS),
        (None, "[" * 100_000, defects.BAD_CAPTIONS, defects.BAD_CAPTIONS),
        (" ", JSON["none"], defects.EMPTY_CAPTION, defects.EMPTY_CAPTION),
        (" ", JSON["both"], defects.EMPTY_CAPTION, ("a", "b")),
    ],
)
def test_captions_of_a_sample(text, facts, first, every):
    members = {} if text is None else {"txt": text.encode()}
    members |= {} if facts is None else {"json": facts.encode("latin-1")}
    for expected, all_of_them in ((first, False), (every, True)):
        if isinstance(expected, str):
            with pytest.raises(Unusable, match=expected):
                read_captions(members, all_of_them)
        else:
            assert read_captions(members, all_of_them) == expected


def test_files_that_are_too_large_are_not_read():
    for members, every in (({"txt": None}, False), ({"json": None}, False), ({"txt": b"t", "json": None}, True)):
        with pytest.raises(Unusable, match=defects.HUGE_FILE):
            read_captions(members, every)
    assert read_captions({"txt": b"t", "json": None}) == ("t",)


def test_a_sample_without_a_text_counts_and_trains(tmp_path):
    samples = [{name: data for name, data in several(f"k{i}").items() if not name.endswith("txt")} for i in range(4)]
    samples += [{"x.jpg": picture(), "x.json": b'{"captions": 3}'}]
    write_tar(tmp_path / "d/0.tar", samples)
    count = count_shard(f"{tmp_path}/d/0.tar", 10**6)
    assert count.usable == 4 and count.unusable == {defects.BAD_CAPTIONS: [4]} and count.words == [3] * 4
    (tmp_path / "d/sizes.json").write_text('{"0.tar": 5}')
    data = load(arguments(f"{tmp_path}/d/0.tar"))
    assert set(flat(data)) == {f"k{i} caption 0" for i in range(4)}
    assert data.dataloader.last.lost == {(0, defects.BAD_CAPTIONS): 1}


def test_a_choice_depends_on_its_sample_and_not_on_the_folder():
    def drawn(shard, key="k", source=0, epoch=0, seed=0):
        sample = Sample(source, shard, key, b"", tuple(map(str, range(1000))), 0, False)
        return tuple(CaptionChoice("draw", seed).of(sample, epoch))

    alike = {drawn("/a/0.tar"), drawn("/b/c/0.tar")}
    others = {drawn("/a/1.tar"), drawn("/a/0.tar", "l"), drawn("/a/0.tar", source=1), drawn("/a/0.tar", epoch=1)}
    assert len(alike) == 1 and len(alike | others | {drawn("/a/0.tar", seed=1)}) == 6


# --- Mistakes ---------------------------------------------------------------------------------------------

MISTAKES = [
    (["--multi-positives"], {}, "--multi-positives needs several captions of an image in a batch: add --captions all."),
    (["--captions-per-image", "3"], {}, "--captions-per-image is for --captions all: add that, or drop it."),
    (["--captions", "all", "--captions-per-image", "1"], {}, "--captions-per-image must be at least 2"),
    (["--captions", "all"], {"dataset_resampled": True}, "--captions all needs exact passes: drop --dataset-resampled"),
    (["--captions", "all", "--multi-positives"], {}, "--batch-size 4 must be a multiple of the 5 captions per image"),
    (["--captions", "draw"], {"dataset_type": "csv"}, "--captions draw needs shards: give them by --train-data"),
    (["--noise-ratio", "0.2"], {"dataset_type": "synthetic"}, "--noise-ratio needs shards"),
    (["--noise-seed", "3"], {}, "--noise-seed has no effect without --noise-ratio: add that, or drop it."),
    (["--noise-ratio", "0.03"], {}, "--noise-ratio 0.03 of 40 samples are not two that could exchange"),
]


def test_flags_that_cannot_work_are_refused(shards):
    for flags, values, message in MISTAKES:
        with pytest.raises(ValueError, match=f"^{message}"):
            specify(arguments(shards, *flags, **values))


def test_data_that_cannot_work_are_refused(tmp_path, shards):
    pattern = write_shards(tmp_path / "plain", [4])
    with pytest.raises(ValueError, match='have one caption each: put a list "captions" into'):
        specify(arguments(pattern, "--captions", "draw", train_num_samples=4), check=True)
    specify(arguments(shards, "--captions", "draw"), check=True)
    for flags in (["--captions", "all"], ["--noise-ratio", "0.5"]):
        with pytest.raises(ValueError, match=f"^{' '.join(flags)[:13]}.* needs counts, .* run `pcmepp data count"):
            specify(arguments(pattern, *flags, train_num_samples=4))
    for folder in "ab":
        write_tar(tmp_path / f"two/{folder}/0.tar", [several(f"{folder}{i}") for i in range(4)])
        (tmp_path / f"two/{folder}/sizes.json").write_text('{"0.tar": 4}')
    for flags in (["--captions", "all", "--multi-positives"], ["--noise-ratio", "0.5"]):
        with pytest.raises(ValueError, match="two shards of the same name in different folders"):
            specify(arguments(f"{tmp_path}/two/{{a,b}}/0.tar", *flags, batch_size=5))


def test_values_that_make_no_sense():
    for flag, value, message in (
        ("--captions", "some", "invalid choice: 'some'"),
        ("--captions-per-image", "0", "must be at least 1"),
        ("--noise-ratio", "nan", "must be between 0 and 1"),
        ("--noise-seed", "-1", "must be at least 0"),
    ):
        with pytest.raises(ValueError, match=f"^{flag}.* {message}"):
            arguments("x.tar", flag, value)


TOGETHER = ["--captions", "all", "--multi-positives", "--batch-size", "5"]
CACHED = ["--model", "PCMEpp-tiny", "--head-only", "--cache-tokens", "c"]


def test_models_and_losses_that_cannot_work_are_refused(shards, capsys):
    for flags, message in (
        (
            ["--model", "PCMEpp-tiny", *TOGETHER],
            "add --contrastive-weight 0 --train-means-by all",
        ),
        (["--model", "RN50", *TOGETHER], "--multi-positives is for PCME++ models"),
        ([*CACHED, "--captions", "draw"], "drop --captions draw, or --cache-tokens"),
        ([*CACHED, "--noise-ratio", "0.5"], "drop --noise-ratio, or --cache-tokens"),
    ):
        assert command.main([*flags, "--train-data", shards, "--dataset-type", "webdataset", "--dry-run"]) == 2
        assert message in capsys.readouterr().err


FLAGS = split("--dataset-type webdataset --precision fp32 --model PCMEpp-tiny --epochs 1 --warmup 1 --workers 1")
SOFT = split("--contrastive-weight 0 --train-means-by all --captions all --batch-size 10")


def test_a_dry_run_counts_an_image_once_per_caption(shards, capsys):
    for more in ([], ["--multi-positives"]):
        assert command.main([*FLAGS, *SOFT, *more, "--train-data", shards, "--device", "cpu", "--dry-run"]) == 0
        assert "20 per epoch, 20 in 1 epochs" in capsys.readouterr().out


def train(shards, folder, *more):
    """The log and the hyperparameters of a run; what the batches hold is tested above."""
    assert command.main([*FLAGS, *more, "--train-data", shards, "--logs", str(folder), "--name", "run"]) == 0
    about = torch.load(folder / "run/checkpoints/epoch_1.pt", weights_only=True)["about"]
    return (folder / "run/out.log").read_text(), about["hyperparameters"]


def test_a_run_trains_on_drawn_and_noisy_captions(shards, tmp_path):
    noise = ["--noise-ratio", "0.25", "--noise-seed", "1"]
    log, about = train(shards, tmp_path, "--batch-size", "8", "--captions", "draw", *noise)
    assert "Data: one caption of each image is drawn per epoch" in log
    assert "Data: 10 samples have captions of others (noise)" in log
    assert (about["captions"], about["noise_ratio"], about["noise_seed"]) == ("draw", 0.25, 1)


def test_a_run_trains_with_several_positives_and_mixed_images(shards, tmp_path):
    more = split("--pp-weight 0.1 --mixup 2 --multi-positives --accum-freq 2 --log-every-n-steps 1")
    log, about = train(shards, tmp_path, *SOFT, *more)
    (matches,) = set(re.findall(r"Train Epoch: 0 \[.* Match_loss: ([0-9.]+)", log)[:1])
    assert float(matches) > 0 and about["multi_positives"] and about["captions"] == "all"
