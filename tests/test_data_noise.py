"""Noisy correspondence: which captions are exchanged, on any ranks, workers and epochs; what cannot be read."""

import collections
import io
import json

import pytest
from PIL import Image
from shard_maker import arguments, flat, load, pair, read_back, specify, write_tar

from pcmepp_openclip.data import caption_table
from pcmepp_openclip.data.count import count_shard, write_counts
from pcmepp_openclip.data.noise import exchange
from pcmepp_openclip.data.plan import seed_for
from pcmepp_openclip.data.sources import parse_sources

COUNTS = [11, 24, 5, 20]


def sample(key: str, count: int = 3) -> dict:
    texts = [f"{key} {i}" for i in range(count)]
    return {**pair(key, texts[0]), f"{key}.json": json.dumps({"captions": texts}).encode()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two sources, some samples of which are not usable; the colour of an image is that of no other."""
    folder = tmp_path_factory.mktemp("noise")
    for name, numbers in (("a", (0, 1)), ("b", (2, 3))):
        for number in numbers:
            samples = [coloured(key_of(number, i)) for i in range(COUNTS[number])]
            samples.insert(3, {"broken.txt": b"no image"})
            write_tar(folder / f"{name}/{number}.tar", samples)
        (source,) = parse_sources(f"{folder}/{name}/*.tar")
        write_counts(source, [count_shard(shard, 10**6) for shard in source.shards], None)
    return f"a={folder}/a/{{0..1}}.tar::b={folder}/b/{{2..3}}.tar"


def key_of(number: int, i: int) -> str:
    return f"{number}{i:02d}"


KEYS = [key_of(number, i) for number, count in enumerate(COUNTS) for i in range(count)]


def coloured(key: str) -> dict:
    """A sample whose colour says which one it is, in a batch as well."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (KEYS.index(key) * 4, 0, 0)).save(file, "PNG")
    members = {name.replace(".jpg", ".png"): data for name, data in sample(key).items()}
    return {**members, f"{key}.png": file.getvalue()}


def shown(data) -> list[tuple[str, str]]:
    """(key of the image, caption) of all samples of the epoch that is set."""
    found = []
    for images, texts in data.dataloader:
        colours = (images[:, 0, 0, 0] * 255 / 4).round().int().tolist()
        found += [(KEYS[colour], caption) for colour, caption in zip(colours, read_back(texts), strict=True)]
    return found


def slow_exchange(count, ratio, seed):
    """The definition, a sample at a time."""
    places = {index: seed_for("noise", seed, index) for index in range(count)}
    ring = []
    for _ in range(int(ratio * count)):
        best = min((index for index in places if index not in ring), key=places.get)
        ring.append(best)
    return {index: ring[(place + 1) % len(ring)] for place, index in enumerate(ring)}


@pytest.mark.parametrize("count, ratio, seed", [(10, 0.2, 0), (10, 0.5, 1), (25, 1.0, 0), (60, 0.29, 0), (7, 0.3, 1)])
def test_exchange_against_a_slow_form(count, ratio, seed):
    got = exchange(count, ratio, seed)
    assert got == slow_exchange(count, ratio, seed) and len(got) == int(ratio * count)
    assert set(got) == set(got.values()) and all(index != giver for index, giver in got.items())


def test_exchange_is_uniform_and_its_ends():
    assert exchange(10, 0.0, 0) == exchange(10, 0.1, 0) == exchange(0, 1.0, 0) == {}
    counts = collections.Counter(index for seed in range(400) for index in exchange(10, 0.3, seed))
    expected = 400 * 0.3
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 27.9  # chi-square, 9 degrees, p = 0.001
    assert set(exchange(100, 0.2, 5)) < set(exchange(100, 0.5, 5))


def test_captions_are_exchanged_as_the_maths_says(shards, seed="7"):
    expected = {index: index for index in range(len(KEYS))} | exchange(len(KEYS), 0.3, int(seed))
    data = load(arguments(shards, "--noise-ratio", "0.3", "--noise-seed", seed, batch_size=1))
    for epoch in range(2):
        data.set_epoch(epoch)
        seen = dict(shown(data))
        assert seen == {KEYS[index]: f"{KEYS[giver]} 0" for index, giver in expected.items()}
    assert len(expected) == len(KEYS) == 60 and sum(key != text[:3] for key, text in seen.items()) == 18


def test_the_seed_of_a_run_does_not_change_the_noise(shards):
    pairs = [
        {(key, text[:3]) for key, text in shown(load(arguments(shards, "--noise-ratio", "0.5", seed=seed)))}
        for seed in (0, 5)
    ]
    assert pairs[0] == pairs[1] and sum(key != giver for key, giver in pairs[0]) == 30


def test_all_captions_of_an_image_move_together(shards):
    flags = ("--noise-ratio", "0.5", "--captions", "all", "--captions-per-image", "3")
    seen = collections.defaultdict(set)
    for key, text in shown(load(arguments(shards, *flags))):
        seen[key].add(text)
    giver = {KEYS[index]: KEYS[other] for index, other in exchange(len(KEYS), 0.5, 0).items()}
    assert seen == {key: {f"{giver.get(key, key)} {i}" for i in range(3)} for key in KEYS}


@pytest.mark.parametrize("mode", ["first", "all"])
def test_single_captions_are_exchanged(shards, mode):
    """Against a slow form over all captions; with one caption per image it is the noise of whole images."""
    count = 3 if mode == "all" else 1
    flags = ["--captions", mode, *(["--captions-per-image", "3"] if count == 3 else [])]
    texts = [f"{key} {i}" for key in KEYS for i in range(count)]
    giver = slow_exchange(len(texts), 0.5, 3)
    expected = collections.defaultdict(set)
    for place in range(len(texts)):
        expected[KEYS[place // count]].add(texts[giver.get(place, place)])
    seen = collections.defaultdict(set)
    noise = ["--noise-ratio", "0.5", "--noise-seed", "3", "--noise-per-caption"]
    for key, text in shown(load(arguments(shards, *noise, *flags))):
        seen[key].add(text)
    assert seen == expected
    own = [sum(text.startswith(key) for text in found) for key, found in seen.items()]
    assert all(own.count(k) for k in range(3)) or count == 1


def test_resampled_epochs_have_the_same_noise(shards):
    giver = {KEYS[index]: KEYS[other] for index, other in exchange(len(KEYS), 0.5, 0).items()}
    for key, text in shown(load(arguments(shards, "--noise-ratio", "0.5", dataset_resampled=True))):
        assert text == f"{giver.get(key, key)} 0"


def test_captions_that_are_missing_keep_out_of_it(tmp_path):
    """A sample that was counted and is unusable now: its partner keeps its own captions, nothing else changes."""
    samples = [sample(f"s{i}") for i in range(10)]
    giver = exchange(10, 0.8, 0)
    lost = next(iter(giver))
    samples[lost][f"s{lost}.txt"] = b" "
    write_tar(tmp_path / "d/0.tar", samples)
    (tmp_path / "d/sizes.json").write_text('{"0.tar": 10}')
    args = arguments(f"{tmp_path}/d/0.tar", "--noise-ratio", "0.8")
    sources = specify(args).sources
    got = caption_table.exchanged_captions(sources, specify(args).sizes, False, 0.8, 0)
    receiver = next(index for index, other in giver.items() if other == lost)
    expected = {index: other for index, other in giver.items() if index not in (lost, receiver)}
    ids = {caption_table.sample_id(0, "0.tar", f"s{i}"): i for i in range(10)}
    assert {ids[key]: texts for key, texts in got.items()} == {i: (f"s{other} 0",) for i, other in expected.items()}


def test_what_cannot_be_read_beforehand_is_refused(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(caption_table, "MAX_SAMPLES", 50)
    with pytest.raises(ValueError, match="--noise-ratio reads all captions beforehand, of at most 50 samples"):
        specify(arguments(shards, "--noise-ratio", "0.5"))
    (tmp_path / "sizes.json").write_text('{"0.tar": 4}')
    remote = arguments("x=pipe:cat 0.tar", "--noise-ratio", "0.5", "--train-data-sizes", f"x={tmp_path}/sizes.json")
    with pytest.raises(ValueError, match="beforehand: copy source 'x' to a local disk"):
        specify(remote)
    place = f"{tmp_path}/0.tar"
    with pytest.raises(ValueError, match=r"The captions of .*0.tar cannot be read \(missing shard"):
        load(arguments(place, "--noise-ratio", "0.5"))
    write_tar(tmp_path / "0.tar", [sample(f"s{i}") for i in range(5)])
    whole = (tmp_path / "0.tar").read_bytes()
    (tmp_path / "0.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"The captions of .*0.tar cannot be read \(truncated shard"):
        load(arguments(place, "--noise-ratio", "0.5"))
    (tmp_path / "sizes.json").write_text('{"0.tar": 2}')  # as it was counted when it was broken already
    assert sorted(flat(load(arguments(place, "--noise-ratio", "1", batch_size=2)))) == ["s0 0", "s1 0"]
