"""The cache of frozen towers' tokens: what it holds, in which order it is read, and when it may be used."""

import collections
import json
import os
import random
from pathlib import Path

import open_clip
import pytest
import torch
from helpers import make_model, scramble
from kinds import KINDS, add_kinds, kind_batch, kind_model
from shard_maker import arguments, pair, picture, specify, write_tar

from pcmepp_openclip.data.decode import decode_image
from pcmepp_openclip.data.shards import iter_samples
from pcmepp_openclip.encode import token_pass, tokens
from pcmepp_openclip.encode.store import DIGEST, Rows, Store, join_rows, safe_open
from pcmepp_openclip.encode.token_loader import CacheLoader, EpochPlan, batch_of, permutation

COUNTS = [9, 1, 17, 12]
MODEL = "PCMEpp-tiny"


@pytest.fixture(scope="module")
def model():
    model = make_model(MODEL)
    model.freeze_towers()
    return model.train()


@pytest.fixture(scope="module")
def preprocess():
    return open_clip.image_transform(32, is_train=False)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return counted(tmp_path_factory.mktemp("shards"), COUNTS)


def counted(folder: Path, counts: list[int], claimed: list[int] | None = None) -> str:
    """Shards with captions of different lengths, and their sizes.json."""
    for number, count in enumerate(counts):
        keys = [f"{number:03d}{i:05d}" for i in range(count)]
        write_tar(folder / f"{number:05d}.tar", [pair(key, f"{'very ' * (int(key) % 9)}{key}") for key in keys])
    sizes = {f"{number:05d}.tar": count for number, count in enumerate(claimed or counts)}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    return str(folder / f"{{00000..{len(counts) - 1:05d}}}.tar")


@pytest.fixture
def small_files(monkeypatch):
    """At most 4 samples each."""
    monkeypatch.setattr(tokens, "FILE_BYTES", 4 * 7200)


def load(folder, shards, model, preprocess, *flags, ranks=None, precision="fp32", tokenizer=None, **values):
    """The training data of a run from a cache in that folder."""
    folder.mkdir(exist_ok=True)
    spec = specify(arguments(shards, *flags, **values))
    towers = tokens.Towers(model, open_clip.get_model_config(MODEL), precision)
    tokenizer = tokenizer or open_clip.get_tokenizer(MODEL)
    return tokens.train_data(folder, spec, towers, preprocess, 0, tokenizer, ranks or token_pass.Ranks())


@pytest.fixture(scope="module")
def rows(tmp_path_factory, shards, model, preprocess):
    return load(tmp_path_factory.mktemp("tokens"), shards, model, preprocess).dataloader._loader.dataset


def loader(rows, *, epoch=0, first=0, samples=None, world=1, rank=0, batch=4, seed=0, workers=0):
    plan = EpochPlan(len(rows), samples or len(rows), batch, rank, world, seed, lambda: (epoch, first))
    return CacheLoader(rows, "contents", plan, workers, 32, 0)


def names(batches) -> list[list[tuple]]:
    """Each sample by its text."""
    return [[tuple(x for x in row if x) for row in texts.text_NL.tolist()] for _, texts in batches]


def flat(batches) -> list[tuple]:
    return [name for batch in names(batches) for name in batch]


# --- What it holds ----------------------------------------------------------------------------------------


def test_a_cached_batch_gives_what_the_towers_would(rows, shards, model, preprocess):
    tokenizer = open_clip.get_tokenizer(MODEL)
    samples = [
        sample
        for number in range(len(COUNTS))
        for sample in iter_samples(shards.replace("{00000..00003}", f"{number:05d}"), lambda *_: None)
    ]
    images = torch.stack([preprocess(decode_image(sample.image)) for sample in samples])
    texts = tokenizer([sample.caption for sample in samples])
    computed, seen = model(images, texts), 0
    of_text = {tuple(x for x in row if x): i for i, row in enumerate(texts.tolist())}
    for batch in loader(rows):
        own = [of_text[name] for (name,) in zip(names([batch])[0], strict=True)]
        found = model(*(part.to(device="cpu", dtype=torch.float32, non_blocking=True) for part in batch))
        assert batch[0].x_NLC.dtype == torch.float16 and found["image_logvar"].requires_grad
        assert batch[1].text_NL.shape[1] % 8 == 0 and batch[1].text_NL.shape[1] <= 24  # of 32
        for name in ("image_features", "text_features"):
            torch.testing.assert_close(found[name], computed[name][own], rtol=0, atol=1e-6)
        for name in ("image_logvar", "text_logvar"):
            torch.testing.assert_close(found[name], computed[name][own], rtol=0, atol=5e-3)
            assert (found[name] - computed[name][own].roll(1, 0)).abs().max() > 5e-2  # other samples' would be noticed
        seen += len(batch[0])
    assert seen == -(-sum(COUNTS) // 4) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tower_gives_the_same_from_a_file(tmp_path, kind):
    """Their images have any number of tokens, and their texts may have padding that counts, or a token of their own."""
    add_kinds(tmp_path)
    model = scramble(kind_model(kind))
    model.freeze_towers()
    images, texts = kind_batch(model, samples=3)
    footprint = tokens.footprint_of(model.cache_image(images), model.cache_text(texts))
    towers, files, parts = tokens.Towers(model, {}, "fp32"), Store(tmp_path, "identity"), (slice(0, 2), slice(2, 3))
    files.write("x", join_rows([tokens.rows_of(*towers.encode(images[part], texts[part])) for part in parts]))
    assert files.content("x").rows == 3
    assert files.path("x").stat().st_size < 3 * footprint.total + 2000  # with its header
    batch = batch_of(Rows(files, ["x"], [3])[[2, 0]], texts.shape[1], model.text_pad_id)
    computed, found = model(images, texts), model(*batch)
    for name in ("image_features", "text_features", "image_logvar", "text_logvar"):
        torch.testing.assert_close(found[name], computed[name][[2, 0]], rtol=1e-3, atol=5e-3)


def test_what_does_not_fit_fp16_is_cut_off_and_nan_is_refused():
    assert tokens._half(torch.tensor([1e9, -1e9, 0.5])).tolist() == [65504, -65504, 0.5]
    with pytest.raises(ValueError, match="not finite"):
        tokens._half(torch.tensor([float("nan")]))


def test_the_size_that_is_said_is_that_of_the_files(tmp_path, shards, model, preprocess, caplog, small_files):
    caplog.set_level("INFO")
    load(tmp_path / "c", shards, model, preprocess)
    (line,) = [record.getMessage() for record in caplog.records if "will be written" in record.getMessage()]
    assert f"the tokens of {sum(COUNTS)} samples" in line and "are free" in line
    image, text = model.cache_image(torch.zeros(1, 3, 32, 32)), model.cache_text(torch.ones(1, 32, dtype=torch.int64))
    said = tokens.footprint_of(image, text)
    assert f"{tokens.readable_size(sum(COUNTS) * said.image)} for images" in line
    found = collections.Counter()
    for path in (tmp_path / "c").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                tensor = file.get_tensor(name)
                found[name.partition("_")[0]] += tensor.numel() * tensor.element_size()
    assert found["image"] == sum(COUNTS) * said.image
    assert 0.2 * said.text < found["text"] / sum(COUNTS) <= said.text
    assert "augmentations are off" in caplog.text


# --- In which order it is read ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_in_an_epoch_in_the_same_order_for_any_workers(rows, world):
    everything = set(flat(loader(rows)))
    assert len(everything) == sum(COUNTS)
    for epoch in range(2):
        whole = []
        for rank in range(world):
            settings = {"epoch": epoch, "world": world, "rank": rank}
            first = names(loader(rows, **settings))
            for workers in (1, 2) if rank == 0 else ():
                assert names(loader(rows, workers=workers, **settings)) == first
            whole += first
        counts = collections.Counter(name for batch in whole for name in batch)
        again = len(whole) * 4 - sum(COUNTS)
        assert set(counts) == everything and sum(counts.values()) - len(counts) == again < 4 * world


def test_epochs_and_seeds_have_orders_of_their_own(rows):
    orders = [names(loader(rows, **way)) for way in ({}, {"epoch": 1}, {"seed": 1}, {"epoch": 1, "seed": 1})]
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])
    assert permutation(6, 0, 0).tolist() == [4, 0, 1, 3, 5, 2]  # whatever the version of numpy


def test_an_epoch_is_entered_anywhere(rows):
    whole = names(loader(rows, epoch=3))
    for first in (1, 7, len(whole)):
        assert names(loader(rows, epoch=3, first=first, workers=first % 2)) == whole[first:]


@pytest.mark.parametrize("case", range(8))
def test_an_epoch_goes_on_with_other_batches_ranks_and_seeds(rows, case):
    dice = random.Random(case)
    seen, state, everything = [], None, set(flat(loader(rows)))
    stops = [dice.randrange(1, 4) for _ in range(dice.choice([1, 2]))]
    for stop in [*stops, None]:
        way = {"world": dice.choice([1, 2, 3]), "batch": dice.choice([1, 3, 4]), "seed": dice.choice([0, 1])}
        accum, some = dice.choice([1, 2]), []
        for rank in range(way["world"]):
            one = loader(rows, epoch=5, rank=rank, **way)
            first, how = (0, "") if state is None else one.resume(5, state, accum)
            one._plan.position = lambda first=first: (5, first)
            end = one.num_batches if stop is None else first + min(stop, 18 // one._plan.per_step)  # within the epoch
            some += flat([batch for batch, _ in zip(one, range(end - first), strict=False)])
        state = one.state(end)
        assert first % accum == 0 or not seen
        if stop is None:
            left = len(everything) - len(seen)
            assert set(seen + some) == everything and len(set(some[:left])) <= left
            assert len(some) - left < way["world"] * way["batch"] * accum
            assert f"{len(some) - left} are seen again" in how or len(some) - left < way["world"] * way["batch"]
        else:
            assert len(set(seen + some)) == len(seen + some)
        seen += some


def test_the_state_of_other_data_is_not_continued(rows):
    one = loader(rows)
    state = one.state(3)
    assert one.resume(0, state) == (3, "with the samples that were left")
    assert one.resume(0, {**state, "contents": "other"}) == (None, "the cache does not hold the same samples")
    for other in (None, {"kind": "pass"}):
        assert one.resume(0, other)[0] is None


# --- When it is used --------------------------------------------------------------------------------------


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_complete_cache_is_used_as_it_is(tmp_path, shards, model, preprocess, caplog, small_files):
    caplog.set_level("INFO")
    first = names(load(tmp_path / "c", shards, model, preprocess).dataloader)
    before = times(tmp_path / "c")
    assert len(before) == 3 + 1 + 5 + 3 and "Using the cache" not in caplog.text
    with torch.no_grad():
        model.visual.uncertainty_proj.add_(0.1)  # what is trained is no part of it
        model.logit_scale.add_(0.1)
    assert names(load(tmp_path / "c", shards, model, preprocess, workers=2).dataloader) == first
    assert times(tmp_path / "c") == before and "Using the cache" in caplog.text


class StopsAfter(token_pass.Ranks):
    """Is asked to stop after so many batches."""

    def __init__(self, batches):
        self.left, self.passed_on = batches, False

    def stop_asked(self):
        self.left -= 1
        return self.left < 0

    def pass_on_stop(self):
        self.passed_on = True


def test_an_interrupted_pass_continues_with_the_files_that_are_missing(
    tmp_path, shards, model, preprocess, caplog, small_files
):
    load(tmp_path / "whole", shards, model, preprocess)
    whole = content(tmp_path / "whole")
    ranks = StopsAfter(5)
    with pytest.raises(token_pass.Interrupted):
        load(tmp_path / "c", shards, model, preprocess, ranks=ranks)
    begun = times(tmp_path / "c")
    assert len(begun) == 5 and ranks.passed_on
    assert all(whole[name] == there for name, there in content(tmp_path / "c").items())
    cut = tmp_path / "c" / min(begun)
    cut.write_bytes(cut.read_bytes()[:-1])  # as by a disk that lost its end
    (tmp_path / "c/.x.safetensors.1.tmp").touch()
    os.utime(tmp_path / "c/.x.safetensors.1.tmp", (0, 0))
    caplog.set_level("INFO")
    load(tmp_path / "c", shards, model, preprocess, workers=2)
    after = times(tmp_path / "c")
    assert content(tmp_path / "c") == whole and not list((tmp_path / "c").glob(".*"))
    assert {name for name in begun if after[name] == begun[name]} == set(begun) - {cut.name}
    assert "samples are there already" in caplog.text


def test_a_file_that_is_gone_in_mid_run_is_one_sentence(tmp_path, shards, model, preprocess):
    train = load(tmp_path / "c", shards, model, preprocess, workers=1)
    next((tmp_path / "c").glob("000002*")).unlink()
    with pytest.raises(ValueError, match=r"000002-00000000\.safetensors is missing or damaged"):
        list(train.dataloader)


def overwrite(path: Path, tensor: str, change) -> None:
    """Write what `change` makes of the bytes of a tensor in a file; its header stays as it is."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    first, last = (start + at for at in json.loads(content[8:start])[tensor]["data_offsets"])
    content[first:last] = change(bytes(content[first:last]))
    path.write_bytes(content)


def flipped(data: bytes) -> bytes:
    return data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]


def numbers(*values: int):
    """The beginning of a tensor of int64 replaced by these."""
    return lambda data: torch.tensor(values).numpy().tobytes() + data[8 * len(values) :]


TENSORS = ("image_mean", "image_x", "text_mean", "text_x", "text_ids", "text_x_ends", "text_ids_ends", DIGEST)
DAMAGE = {
    **{f"flipped bit of {name}": (name, flipped) for name in TENSORS},
    **{f"zeros for {name}": (name, lambda data: bytes(len(data))) for name in TENSORS},
    **{f"ends of {value}": ("text_ids_ends", numbers(value)) for value in (-1, 10**6, 2**62, -(2**63))},
    "ends that descend": ("text_x_ends", numbers(20, 5)),
    "another sample's ids": ("text_ids", lambda data: data[4:] + data[:4]),
}


@pytest.mark.parametrize("name, change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tokens_are_refused_with_the_name_of_their_file(rows, tmp_path, name, change):
    """Tokens were trained on as they were, or ended a run with a traceback."""
    damaged = Rows(Store(tmp_path, rows.store.identity), rows.names[2:3], [17])
    path = damaged.store.path(rows.names[2])
    path.write_bytes(rows.store.path(rows.names[2]).read_bytes())
    overwrite(path, name, change)
    with pytest.raises(ValueError, match=rf"{path} is damaged: delete it"):
        list(loader(damaged, batch=17))


def replace(path, content):
    """Put a file in the place of another at once: a worker that has mapped the file keeps what it has."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_in_the_place_of_another_is_not_used(tmp_path, shards, model, preprocess, small_files, workers):
    first = names(load(tmp_path / "c", shards, model, preprocess).dataloader)
    copied, path = tmp_path / "c/000002-00000000.safetensors", tmp_path / "c/000000-00000000.safetensors"
    whole = path.read_bytes()
    replace(path, copied.read_bytes())
    begun = load(tmp_path / "c", shards, model, preprocess, workers=workers)  # computes it anew
    assert path.read_bytes() == whole and names(begun.dataloader) == first
    begun = load(tmp_path / "c", shards, model, preprocess, workers=workers)
    replace(path, copied.read_bytes())
    with pytest.raises(ValueError, match=rf"{path} is damaged: delete it"):
        list(begun.dataloader)
    head = bytearray(whole)
    at = head.index(rb"\"met\": ")
    head[at : at + 7] = rb"\"mat\":"
    replace(path, head)
    load(tmp_path / "c", shards, model, preprocess)
    assert path.read_bytes() == whole


def test_a_caption_that_changed_at_the_end_of_a_shard_is_noticed(tmp_path, model, preprocess, monkeypatch, caplog):
    pattern = counted(tmp_path / "d", COUNTS)
    load(tmp_path / "c", pattern, model, preprocess)
    shard, read = tmp_path / "d/00002.tar", []
    digest_of = tokens.digest_of
    monkeypatch.setattr(tokens, "digest_of", lambda file, *args: read.append(file.name) or digest_of(file, *args))
    caplog.set_level("INFO")
    os.utime(shard)  # as a copy has another time
    for expected in ([str(shard)], []):
        read.clear()
        load(tmp_path / "c", pattern, model, preprocess)
        assert read == expected and "Using the cache" in caplog.text
    before = shard.read_bytes()
    shard.write_bytes(before.replace(b"very 00200015", b"much 00200015"))
    assert len(before) == shard.stat().st_size and before != shard.read_bytes()
    with pytest.raises(ValueError, match=r"with a difference in what the shards hold: name a new folder, or delete"):
        load(tmp_path / "c", pattern, model, preprocess)


def test_tokens_of_something_else_are_refused(tmp_path, shards, model, preprocess):
    load(tmp_path / "c", shards, model, preprocess)
    other = make_model(MODEL, seed=1)
    other.freeze_towers()
    bigger = counted(tmp_path / "bigger", [*COUNTS[:-1], 13])
    changed = counted(tmp_path / "changed", COUNTS)
    write_tar(tmp_path / "changed/00000.tar", [pair(f"{i}", image=picture(i)) for i in range(9)])
    augmented = open_clip.image_transform(32, is_train=True)
    tokenizer = open_clip.get_tokenizer(MODEL, context_length=16)
    for way, what in [
        ({"model": other}, "the frozen weights"),
        ({"precision": "amp_bf16"}, "--precision"),
        ({"preprocess": augmented}, "the preprocessing of images"),
        ({"tokenizer": tokenizer}, "the tokenizer"),
        ({"shards": bigger}, "the shards of --train-data or their counts"),
        ({"shards": changed}, "what the shards hold"),
    ]:
        given = {"shards": shards, "model": model, "preprocess": preprocess, **way}
        with pytest.raises(ValueError, match=r"holds the tokens of another run, with a difference in .*") as refused:
            load(tmp_path / "c", **given)
        named = [words for words in tokens.WORDS.values() if words in str(refused.value)]
        assert what in named and (len(named) == 1 or "shards" in way)
    for text, what in (("{", "cannot be read"), ("[]", "cannot be read")):
        (tmp_path / "c/cache.json").write_text(text)
        with pytest.raises(ValueError, match=what):
            load(tmp_path / "c", shards, model, preprocess)
    with pytest.raises(ValueError, match="neither empty nor a cache"):
        load(tmp_path / "bigger", shards, model, preprocess)


def test_a_disk_that_is_too_small_is_noticed_before_the_work(tmp_path, model, preprocess):
    shards = counted(tmp_path / "d", [2, 2], claimed=[10**8, 2])
    with pytest.raises(ValueError, match=r"take up to [\d,.]+ GB, and [\d,.]+ GB are free: make room"):
        load(tmp_path / "c", shards, model, preprocess)
    assert not list((tmp_path / "c").glob("*.safetensors"))


# --- Bad samples ------------------------------------------------------------------------------------------


def test_bad_samples_are_left_out_and_counted(tmp_path, model, preprocess, caplog, small_files):
    caplog.set_level("INFO")
    bad = b"\xff\xd8\xff broken"
    samples = [pair(f"{i:02d}", image=bad if i in (3, 8, 9, 10, 11) else None) for i in range(14)]
    samples[5] = pair("05", caption="  ")
    write_tar(tmp_path / "d/0.tar", samples)
    write_tar(tmp_path / "d/1.tar", [pair(f"9{i}") for i in range(3)])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"0.tar": 14, "1.tar": 5}))
    for again in range(2):
        caplog.clear()
        train = load(tmp_path / "c", f"{tmp_path}/d/{{0..1}}.tar", model, preprocess)
        assert len(set(flat(train.dataloader))) == 14 - 6 + 3 == train.dataloader._plan.count
        assert "unusable: 5 broken image (first: " in caplog.text and "1 empty caption" in caplog.text
        assert "2 fewer samples than counted" in caplog.text
        assert ("further ones are only counted" in caplog.text) == (not again)
    with pytest.raises(ValueError, match=r"42\.1 % of the samples are unusable, more than --train-data-max-bad-frac"):
        load(tmp_path / "c", f"{tmp_path}/d/{{0..1}}.tar", model, preprocess, "--train-data-max-bad-fraction", "0.4")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_meets_only_bad_samples_ends(tmp_path, model, preprocess, workers, monkeypatch):
    for number in range(6):
        write_tar(tmp_path / f"d/{number}.tar", [pair(f"{number}{i}", image=b"no image") for i in range(4)])
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{number}.tar": 4 for number in range(6)}))
    flags = ("--train-data-max-empty-shards", "2")
    with pytest.raises(ValueError, match="source 'd' has no usable sample in 2 consecutive shards"):
        load(tmp_path / "c", f"{tmp_path}/d/{{0..5}}.tar", model, preprocess, *flags, workers=workers)
    monkeypatch.setattr(token_pass, "MIN_SAMPLES_TO_JUDGE", 4)
    monkeypatch.setattr(token_pass, "ROUND_S", 0.0001)
    with pytest.raises(ValueError, match=r"100\.0 % of the samples are unusable"):
        load(tmp_path / "new", f"{tmp_path}/d/{{0..5}}.tar", model, preprocess, workers=workers)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) < 6
