"""Epochs: exact passes and resampled ones, the same for any number of workers, resumed in their middle, over ranks."""

import itertools
import json
import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shard_maker import arguments, captions, flat, jitter, load, pair, read_back, write_shards, write_tar

COUNTS = [7, 30, 1, 55, 12, 90, 3, 41]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of very different sizes, counted."""
    folder = tmp_path_factory.mktemp("epochs") / "d"
    pattern = write_shards(folder, COUNTS)
    (folder / "sizes.json").write_text(json.dumps({f"{i:05d}.tar": n for i, n in enumerate(COUNTS)}))
    return pattern


def everything():
    return {f"caption {number:03d}{i:05d}" for number, count in enumerate(COUNTS) for i in range(count)}


@pytest.mark.parametrize("batch_size", [1, 64, 500])
def test_an_exact_pass_sees_everything_once_but_for_the_last_batch(shards, batch_size):
    data = load(arguments(shards, batch_size=batch_size))
    total, batches = sum(COUNTS), -(-sum(COUNTS) // batch_size)
    seen = flat(data)
    assert set(seen) == everything() and len(seen) == batches * batch_size == data.dataloader.num_samples
    assert data.dataloader.last.filled == len(seen) - total


def test_without_workers_the_gpus_keep_their_random_numbers(shards, monkeypatch):
    """The transforms are seeded in the training process then, for whose GPU torch.manual_seed would count too."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(1)
    assert seeded == [1]  # as torch does
    before = torch.get_rng_state()
    first = [images for images, _ in load(arguments(shards, batch_size=64), jitter).dataloader]
    assert seeded == [1] and torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = [images for images, _ in load(arguments(shards, batch_size=64), jitter).dataloader]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("resampled", [False, True])
def test_batches_depend_on_seed_and_epoch_and_not_on_workers(shards, resampled):
    def epochs(**changed):
        data = load(arguments(shards, dataset_resampled=resampled, **changed), jitter)
        out = []
        for epoch in range(2):
            data.set_epoch(epoch)
            out.append([(images, texts) for images, texts in data.dataloader])
        return out

    def same(a, b):
        return len(a) == len(b) and all(
            torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)
        )

    first = epochs(workers=0)
    for one, two in zip(first, epochs(workers=3), strict=True):
        assert same(one, two)
    assert not same(first[0], first[1])
    assert not same(first[0], epochs(workers=0, seed=1)[0])


@pytest.mark.parametrize("first_batch, shuffle", [(1, "5"), (17, "24000"), (59, "24000"), (60, "5")])
def test_an_exact_pass_resumes_at_any_batch_without_decoding_what_it_skips(shards, first_batch, shuffle):
    calls = []

    def counted(image):
        calls.append(1)
        return jitter(image)

    def epoch(**where):
        data = load(arguments(shards, "--train-data-shuffle-buffer", shuffle), counted)
        data.set_epoch(3, **where)
        return list(data.dataloader)

    whole = epoch()
    assert len(whole) == 60
    calls.clear()
    rest = epoch(first_batch=first_batch)
    assert len(calls) == 4 * len(rest)
    assert len(rest) == len(whole) - first_batch
    for (images, texts), (more_images, more_texts) in zip(whole[first_batch:], rest, strict=True):
        assert torch.equal(images, more_images) and torch.equal(texts, more_texts)


def test_a_pass_with_undecodable_images_resumes_the_same(tmp_path):
    for number in range(4):
        samples = [pair(f"{number}{i:02d}", image=b"\xff\xd8\xff broken" if i % 5 == 2 else None) for i in range(30)]
        write_tar(tmp_path / f"d/{number}.tar", samples)
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{i}.tar": 30 for i in range(4)}))
    data = load(arguments(f"{tmp_path}/d/{{0..3}}.tar", "--train-data-shuffle-buffer", "40"))
    whole = captions(data)
    data.set_epoch(0, first_batch=11)
    assert captions(data) == whole[11:]
    assert len({caption for batch in whole for caption in batch}) == 4 * 24


def go_on(shards, state, stop, *, world_size, accum=1, shuffle, **changed):
    """An epoch from `state` on, on all ranks, for `stop` batches or to its end: captions, state, first batch, how."""
    seen = []
    for rank in range(world_size):
        flags = ("--train-data-shuffle-buffer", shuffle)
        data = load(arguments(shards, *flags, world_size=world_size, rank=rank, **changed))
        first, how = (0, "") if state is None else data.dataloader.resume(3, state, accum)
        data.set_epoch(3, first_batch=first)
        end = min(data.dataloader.num_batches, first + stop) if stop else data.dataloader.num_batches
        batches = itertools.islice(data.dataloader, end - first)
        seen += [caption for _, texts in batches for caption in read_back(texts)]
    return seen, data.dataloader.state(end), first, how


@pytest.mark.parametrize("case", range(6))
def test_an_epoch_may_go_on_again_and_again_with_other_seeds_batches_and_ranks(shards, case):
    dice = random.Random(case)
    way = lambda: {  # noqa: E731
        "world_size": dice.choice([1, 2, 3]),
        "batch_size": dice.choice([1, 3, 4, 8]),
        "seed": dice.choice([0, 1]),
        "shuffle": dice.choice(["1", "20", "1000"]),
    }
    seen, state = [], None
    for _ in range(dice.choice([1, 2, 3])):
        some, state, _, _ = go_on(shards, state, dice.randrange(1, 7), **way())
        seen += some
    last, accum = way(), dice.choice([1, 2])
    some, _, first, how = go_on(shards, state, None, accum=accum, **last)
    assert set(seen + some) == everything() and first % accum == 0
    assert len(set(seen)) == len(seen)  # what is seen again is so at the very end, to fill the batches
    assert f"{len(seen) + len(some) - sum(COUNTS)} are seen again" in how
    assert len(seen) + len(some) - sum(COUNTS) < last["world_size"] * last["batch_size"] * accum


def test_an_epoch_that_goes_on_as_it_was_dealt_anew_gives_the_same_batches(shards):
    """A second restart, without any further change, and with workers: as if there had been none."""
    one, two = ({"world_size": 1, "batch_size": size, "seed": size, "shuffle": "30"} for size in (8, 4))
    _, state, _, _ = go_on(shards, None, 5, **one)
    whole, _, first, _ = go_on(shards, state, None, **two)
    begun, state, _, _ = go_on(shards, state, 7, **two)
    rest, _, again, how = go_on(shards, state, None, workers=2, **two)
    assert (first, again, how) == (10, 17, "with the samples that were left") and begun + rest == whole


def test_the_random_numbers_of_training_are_left_alone(shards):
    def draws(workers):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        for _ in load(arguments(shards, workers=workers), jitter).dataloader:
            pass
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draws(0) == draws(2)


def test_short_resampled_epochs_do_not_favour_the_beginning_of_shards(tmp_path):
    """Epochs of 8 samples over shards of 100: reading each from its beginning would show the first ones only."""
    pattern = write_shards(tmp_path / "d", [100, 10])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 100, "00001.tar": 10}))
    flags = ("--train-data-shuffle-buffer", "2")
    data = load(arguments(pattern, *flags, dataset_resampled=True, train_num_samples=8, batch_size=8))
    places = []
    for epoch in range(250):
        data.set_epoch(epoch)
        places += [(caption[8:11], int(caption[11:])) for caption in flat(data)]
    large = [i for shard, i in places if shard == "000"]
    assert abs(len(large) / len(places) - 100 / 110) < 0.05
    assert abs(np.mean(large) - 49.5) < 6
    assert set(np.digitize(large, range(0, 100, 10))) == set(range(1, 11))


def test_a_pass_over_uncounted_shards_sees_each_once_if_they_are_even(tmp_path):
    pattern = write_shards(tmp_path, [20] * 8)
    data = load(arguments(pattern, train_num_samples=160, workers=3))
    seen = flat(data)
    assert len(seen) == 160 == len(set(seen)) and data.dataloader.last.filled == 0


def main(argv):
    """Write what each of several ranks sees in two epochs."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load(arguments(argv[0], workers=2, world_size=world, rank=rank, distributed=True, seed=5))
    epochs = {}
    for epoch in range(2):
        data.set_epoch(epoch)
        seen = flat(data)
        last = data.dataloader.last
        epochs[epoch] = {"seen": seen, "used": sum(last.used.values()), "lost": sum(last.lost.values())}
    Path(argv[1], f"{rank}.json").write_text(json.dumps(epochs))
    dist.barrier()
    dist.destroy_process_group()


def test_real_ranks_agree_on_the_summary_and_share_the_pass(ranks, tmp_path):
    """Three processes, shards that do not divide evenly, one of them truncated."""
    pattern = write_shards(tmp_path / "d", COUNTS)
    (tmp_path / "d/sizes.json").write_text(json.dumps({f"{i:05d}.tar": n for i, n in enumerate(COUNTS)}))
    damaged = tmp_path / "d/00005.tar"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    printed = len(ranks.log.read_text())
    assert ranks.run(3, [pattern, tmp_path], module="test_data_epochs") == [0, 0, 0]
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for epoch in ("0", "1"):
        assert len({len(rank[epoch]["seen"]) for rank in answers}) == 1
        assert {rank[epoch]["used"] for rank in answers} == {sum(len(rank[epoch]["seen"]) for rank in answers)}
        (lost,) = {rank[epoch]["lost"] for rank in answers}
        came = {caption for rank in answers for caption in rank[epoch]["seen"] if caption.startswith("caption 005")}
        assert 30 < len(came) < 60 and lost == 90 - len(came)
    assert ranks.log.read_text()[printed:].count("Data of epoch 1: 240 samples") == 1
