"""Mixed images and augmented captions: each against a slow loop; then the flags, and whole runs of `pcmepp train`."""

import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import open_clip
import pytest
import torch
from drawn_shards import write_shards
from open_clip.tokenizer import HFTokenizer

from pcmepp_openclip.data.mixup import Mixing, cut_boxes, mix_images
from pcmepp_openclip.data.size_augment import TokenIds, augment_captions, cut_captions
from pcmepp_openclip.host.tokenizers import token_ids
from pcmepp_openclip.models.batches import LabelledImages
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training.augment import BatchAugmentation
from pcmepp_openclip.training.config import RunConfig, make_parser, parse


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


def numbered(n, height=9, width=14):
    """Images whose every pixel is the number of the image, so that a pixel tells where it comes from."""
    return torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 3, height, width).clone()


# Images.


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("mode", ["elem", "batch"])
@pytest.mark.parametrize("mixup, cutmix", [(2.0, 0.0), (0.0, 2.0), (1e-6, 1e6)])
def test_the_share_is_what_is_left_of_an_image(n, mode, mixup, cutmix):
    image, mixing = numbered(n), Mixing(mixup, cutmix, share=1.0, mode=mode)
    before = image.clone()
    mixed = mix_images(image, mixing, rng())
    assert torch.equal(image, before) and len(set(((mixed.partner_N - torch.arange(n)) % n).tolist())) == 1
    for i in range(n):
        j, share, pixels = mixed.partner_N[i].item(), mixed.own_share_N[i].item(), mixed.image_NCHW[i]
        assert j != i and 0 <= share <= 1
        assert pixels.mean().item() == pytest.approx(share * i + (1 - share) * j, abs=1e-5)
        if not mixup:
            own = sum(bool(pixels[0, y, x] == i) for y in range(9) for x in range(14))
            assert share == pytest.approx(own / (9 * 14)) and set(pixels.unique().tolist()) <= {i, j}
        elif not cutmix:
            assert len(pixels.unique()) == 1
    if mode == "batch" or not (mixup and cutmix):
        assert (len(mixed.own_share_N.unique()) == 1) == (mode == "batch")


def test_a_single_image_stays_as_it_is():
    mixed = mix_images(numbered(1), Mixing(2.0, 2.0, share=1.0), rng())
    assert torch.equal(mixed.image_NCHW, numbered(1)) and mixed.partner_N.tolist() == [0] and mixed.own_share_N == 1


@pytest.mark.parametrize("mode", ["elem", "batch"])
@pytest.mark.parametrize("n", [2, 13])
def test_a_share_of_the_images_is_mixed(mode, n):
    random, mixing, image = rng(), Mixing(2.0, 2.0, share=0.25, mode=mode), numbered(n, 2, 2)
    own_N = torch.arange(n)
    counts = [int((mix_images(image, mixing, random).partner_N != own_N).sum()) for _ in range(2000)]
    assert set(counts) <= ({0, n} if mode == "batch" else {int(n / 4), int(n / 4) + 1})
    assert np.mean(counts) == pytest.approx(n / 4, rel=0.15)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 8.0])
def test_shares_follow_a_beta_distribution(alpha):
    share_N = mix_images(numbered(4000, 1, 1), Mixing(mixup=alpha, share=1.0), rng()).own_share_N
    assert share_N.mean().item() == pytest.approx(0.5, abs=0.02)
    assert share_N.var().item() == pytest.approx(1 / (8 * alpha + 4), rel=0.1)


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_the_switch_chooses_between_both(prob):
    mixed = mix_images(numbered(4000, 4, 4), Mixing(2.0, 2.0, share=1.0, switch_prob=prob), rng())
    pairs = enumerate(zip(mixed.image_NCHW, mixed.partner_N, strict=True))
    is_cutmix_N = torch.tensor([bool(((x == i) | (x == j)).all()) for i, (x, j) in pairs])
    assert is_cutmix_N.float().mean().item() == pytest.approx(prob, abs=0.03)


def test_boxes_have_the_area_unless_a_border_cuts_them():
    share = rng(1).random(2000)
    top, bottom, left, right = cut_boxes(share, 30, 50, rng()).T
    assert (top >= 0).all() and (top <= bottom).all() and (bottom <= 30).all() and (right <= 50).all()
    area = (bottom - top) * (right - left) / 1500
    inside = (top > 0) & (bottom < 30) & (left > 0) & (right < 50)
    assert abs(area - (1 - share))[inside].max() < 0.06 and (area <= 1 - share + 0.06).all() and inside.sum() > 200


# Captions.


CLIP = TokenIds(**token_ids(open_clip.get_tokenizer("PCMEpp-tiny")))
CAPTIONS = ["", "a red circle", "Many WORDS, and more!!", "M! m! a photograph of a dog " * 5]


def slow_captions(texts, p, ids, random):
    """The same draws, one token at a time."""
    out, draws = [], random.random(texts.shape)
    replacements = random.integers(len(ids.ordinary), size=texts.shape)
    for row, row_draws, row_replacements in zip(texts.tolist(), draws, replacements, strict=True):
        end = len(row)
        while end and row[end - 1] == ids.pad:
            end -= 1
        new = []
        for token, draw, replacement in zip(row[:end], row_draws[:end], row_replacements[:end], strict=True):
            if token in ids.special.tolist() or draw >= p:
                new.append(token)
            elif draw < 0.5 * p:
                new.append(ids.mask)
            elif draw < 0.6 * p:
                new.append(ids.ordinary[replacement].item())
        out.append(new + [ids.pad] * (len(row) - len(new)))
    return torch.tensor(out)


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("length", [8, 32])
def test_captions_are_those_of_a_slow_loop(p, length):
    texts = open_clip.get_tokenizer("PCMEpp-tiny")(CAPTIONS * 20, context_length=length)
    texts[5, 2:4] = 0  # an exclamation mark within a word has the id of the padding
    before = texts.clone()
    got = augment_captions(texts, p, CLIP, rng())
    assert torch.equal(texts, before) and torch.equal(got, slow_captions(texts, p, CLIP, rng()))
    assert torch.equal(got, texts) == (p == 0)
    assert (got[:, 0] == texts[:, 0]).all() and ((got == 49407).sum(dim=1) == 1).all()
    assert (got.argmax(dim=1) <= texts.argmax(dim=1)).all()  # where a CLIP finds EOT


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [8, 32])
def test_cut_captions_are_runs_of_their_tokens(p, length):
    texts = open_clip.get_tokenizer("PCMEpp-tiny")(CAPTIONS * 200, context_length=length)
    before = texts.clone()
    got = cut_captions(texts, p, CLIP, rng())
    assert torch.equal(texts, before) and got.shape == texts.shape

    def words(row):
        end = row.index(49407)
        assert row[0] == 49406 and not any(row[end + 1 :])
        return row[1:end]

    lengths = {}
    for new, old in zip(map(words, got.tolist()), map(words, texts.tolist()), strict=True):
        assert new == old or new in [old[i : i + len(new)] for i in range(len(old))]
        assert new or not old
        lengths.setdefault(len(old), []).append(len(new))
    longest = max(lengths)
    kept, whole = np.array(lengths[longest]), (1 - p) + p / longest  # a run may be the whole caption
    assert np.mean(kept == longest) == pytest.approx(whole, abs=0.1)
    if p == 1:
        assert kept.mean() == pytest.approx((longest + 1) / 2, rel=0.15)
        first = [words(row)[0] for row, old in zip(got.tolist(), texts.tolist(), strict=True) if len(words(old)) == 3]
        assert {first.count(token) > 10 for token in words(texts[1].tolist())} == {True}  # runs start anywhere


def test_half_of_the_changed_tokens_are_masked():
    texts = torch.full((400, 52), 7)
    texts[:, 0], texts[:, -1] = 49406, 49407
    got = augment_captions(texts, 0.2, CLIP, rng())
    masked, deleted = (got == CLIP.mask).sum().item(), (got == CLIP.pad).sum().item()
    replaced = ((got != 7) & (got != CLIP.mask) & (got != CLIP.pad)).sum().item() - 800
    assert np.array([masked, replaced, deleted]) / (400 * 50) == pytest.approx([0.1, 0.02, 0.08], abs=0.01)


def test_the_mask_of_clip_is_in_no_caption():
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    assert tokenizer.decode([CLIP.mask]) == "M" and not (tokenizer(CAPTIONS) == CLIP.mask).any()
    assert set(CLIP.special.tolist()) == {49406, 49407} and CLIP.ordinary.max() == 49405 and CLIP.pad == 0


@pytest.mark.parametrize("mask, expected", [(103, 103), (None, 100)])
def test_other_tokenizers_have_a_mask_or_what_they_do_not_know(mask, expected):
    tokenizer = object.__new__(HFTokenizer)
    tokenizer.tokenizer_mode, tokenizer.context_length = "", 6
    tokenizer.clean_fn, tokenizer.strip_sep_token = str, False
    encoded = SimpleNamespace(input_ids=torch.tensor([[101, 102, 1, 1, 1, 1]]))

    class Inner(SimpleNamespace):
        def __call__(self, *args, **kwargs):
            return encoded

    specials = {"all_special_ids": [1, 100, 101, 102], "vocab_size": 500, "unk_token_id": 100, "mask_token_id": mask}
    tokenizer.tokenizer = Inner(**specials)
    ids = TokenIds(**token_ids(tokenizer))
    assert (ids.mask, ids.pad, len(ids.ordinary)) == (expected, 1, 496)
    text = torch.tensor([[101, 7, 8, 100, 102, 1, 1]])
    assert augment_captions(text, 1.0, ids._replace(ordinary=torch.tensor([9])), rng())[0, 0] == 101
    tokenizer.tokenizer_mode = "clips"
    with pytest.raises(ValueError, match="no id that could stand for a masked token"):
        token_ids(tokenizer)


# Batches.


MIXED = ("--mixup", "2", "--cutmix", "2", "--mix-share", "0.5")


def augmentation(*flags, rank=0, seed=0, cfg=None):
    """The augmentation of batches of 8 on one of two ranks; by default half of the images are mixed."""
    config = make_parser().read(flags or MIXED, RunConfig(rank=rank, world_size=2, batch_size=8, seed=seed))
    config.pcmepp_cfg = cfg
    return BatchAugmentation(config, CLIP)


def test_images_of_cut_captions_are_cropped():
    """Images whose pixels say where they are, with captions of ten different words."""
    rows, columns = torch.linspace(0, 1, 32)[:, None].expand(32, 32), torch.linspace(0, 1, 32).expand(32, 32)
    images = torch.stack([rows, columns, torch.ones(32, 32)]).expand(64, 3, 32, 32)
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    batch = images, tokenizer(["one two three four five six seven eight nine ten"] * 64)
    pixels, texts = augmentation("--caption-cut", "0.5", "--cut-images")(batch, 0, 0)
    is_cut, is_cropped = (texts != batch[1]).any(dim=1), (pixels != images).flatten(1).any(dim=1)
    assert 15 < int(is_cropped.sum()) < 49 and not (is_cut & ~is_cropped).any()
    assert int((is_cropped & ~is_cut).sum()) < 9  # a run may be the whole caption
    spread = pixels[is_cropped, :2].amax(dim=(2, 3)) - pixels[is_cropped, :2].amin(dim=(2, 3))
    share = spread.prod(dim=1)
    assert 0.01 < share.min() < 0.3 and 0.6 < share.max() < 1.2
    assert (pixels[is_cropped, 2] - 1).abs().max() < 1e-4
    alone = augmentation("--caption-cut", "0.5")(batch, 0, 0)
    assert torch.equal(alone[0], images)


def test_a_batch_has_random_numbers_of_its_own():
    batch = numbered(8), torch.ones(8, 4, dtype=torch.int64)
    first, again = (augmentation(cfg={"image_token_augment": 0.2})(batch, epoch=1, index=2)[0] for _ in range(2))
    assert isinstance(first, LabelledImages)
    for name, x in vars(first).items():
        assert torch.equal(x, getattr(again, name)), name
    others = [augmentation(rank=1)(batch, 1, 2), augmentation()(batch, 2, 2), augmentation()(batch, 1, 3)]
    others.append(augmentation(seed=1)(batch, 1, 2))
    for other, _ in others:
        assert not torch.equal(other.image_NCHW, first.image_NCHW) and other.token_seed_N is None
    assert len(set(first.token_seed_N.tolist())) == 8 and first.token_seed_N.min() >= 0


def test_ids_are_those_of_the_loader_or_like_no_other():
    texts = torch.ones(8, 4, dtype=torch.int64)
    seen = [augmentation(rank=rank)((numbered(8), texts), 0, i)[0] for i in range(3) for rank in range(2)]
    assert len(set(torch.cat([x.own_id_N for x in seen]).tolist())) == 48
    for x in seen:
        is_mixed_N = x.own_share_N < 1
        assert torch.equal(is_mixed_N, x.partner_id_N != x.own_id_N) and is_mixed_N.sum() == 4
        assert set(x.partner_id_N.tolist()) <= set(x.own_id_N.tolist())  # on its own rank, in its own batch
    ids = torch.tensor([5, 5, 5, 7, 7, 9, 9, 9])
    several = LabelledImages(numbered(8), ids, ids, torch.ones(8))
    assert augmentation("--flip")((several, texts), 0, 0)[0] is several
    both, _ = augmentation()((several, texts), 0, 0)
    assert torch.equal(both.own_id_N, ids) and torch.equal(several.image_NCHW, numbered(8))
    assert set(both.partner_id_N.tolist()) <= {5, 7, 9} and (both.own_share_N < 1).sum() == 4


def test_without_mixing_images_stay_pixels():
    images, texts = numbered(2), open_clip.tokenize(["a dog", "two cats"])
    got, augmented = augmentation("--caption-augment", "1")((images, texts), 0, 0)
    assert got is images and not torch.equal(augmented, texts)


# Flags.


SOFT = ["--contrastive-weight", "0", "--train-means-by", "all", "--pp-weight", "0.1"]


REFUSED = [
    (
        ["--mixup", "2"],
        "--mixup gives pairs soft labels, which InfoNCE does not take: add --contrastive-weight 0 --t",
    ),
    (["--cutmix", "2", "--train-means-by", "all"], "--cutmix gives pairs soft labels"),
    (
        [*SOFT, "--mixup", "1", "--difficulty-weight", "1"],
        "the loss term 'difficulty' does not take: add --difficult",
    ),
    ([*SOFT, "--mixup", "-1"], "--mixup must be at least 0, not -1"),
    ([*SOFT, "--cutmix", "nan"], "--cutmix must be at least 0, not nan"),
    ([*SOFT, "--cutmix", "much"], "--cutmix invalid float value: 'much'"),
    (["--mix-share", "0.5"], "--mix-share says how to mix images: give --mixup or --cutmix"),
    (["--mixup", "0", "--mix-mode", "batch"], "--mix-mode says how to mix images"),
    ([*SOFT, "--mixup", "1", "--mix-share", "0"], "--mix-share must be above 0 and at most 1, not 0"),
    ([*SOFT, "--mixup", "1", "--mix-share", "1.5"], "--mix-share must be above 0 and at most 1, not 1.5"),
    ([*SOFT, "--mixup", "1", "--mix-mode", "pair"], "--mix-mode: invalid choice: 'pair'"),
    ([*SOFT, "--mixup", "1", "--mix-switch-prob", "0.5"], "only --mixup is given: give both"),
    ([*SOFT, "--mixup", "1", "--cutmix", "1", "--mix-switch-prob", "2"], "--mix-switch-prob must be between 0 and 1"),
    ([*SOFT, "--mixup", "1", "--batch-size", "1"], "raise --batch-size to 2"),
    (["--caption-augment", "1.1"], "--caption-augment must be between 0 and 1, not 1.1"),
    (["--caption-augment", "-0.1"], "--caption-augment must be between 0 and 1, not -0.1"),
    (["--caption-cut", "2"], "--caption-cut must be between 0 and 1, not 2"),
    (["--model", "ViT-B-32", "--mixup", "1"], "--mixup is for PCME++ models, and ViT-B-32 is a plain one"),
    (["--model", "ViT-B-32", "--caption-augment", "0.1"], "--caption-augment is for PCME++ models"),
    *(
        (
            ["--train-data", "x.tar", "--dataset-type", "webdataset", "--head-only", "--cache-tokens", "c", *flags],
            f"{flags[-2]} changes samples in every epoch, and --cache-tokens keeps them",
        )
        for flags in ([*SOFT, "--mixup", "1"], ["--caption-augment", "0.1"])
    ),
]


def test_what_cannot_work_is_refused_in_one_sentence():
    base = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8", "--batch-size", "4"]
    for flags, words in REFUSED:
        with pytest.raises(ValueError, match=r"^--") as refused:
            parse([*base, *flags])
        assert words in str(refused.value) and "\n" not in str(refused.value)


# Runs.


def losses(log):
    """{(epoch, samples): loss}, the last word on each step."""
    found = re.findall(r"Train Epoch: (\d+) \[ *(\d+)/.* Loss: ([\d.]+) \(", log.read_text())
    return {(int(epoch), int(samples)): float(loss) for epoch, samples, loss in found}


def test_a_run_of_two_ranks_that_was_killed_goes_on_as_if_it_had_not_been(ranks, tmp_path):
    data = write_shards(tmp_path / "shards", shards=4, samples=32)
    argv = ["--model", "PCMEpp-tiny", "--train-data", data, "--train-num-samples", "128", "--dataset-type"]
    argv += [
        "webdataset",
        "--batch-size",
        "4",
        "--accum-freq",
        "2",
        "--epochs",
        "2",
        "--workers",
        "1",
        "--precision",
        "fp32",
    ]
    argv += ["--warmup", "2", "--lr", "1e-3", "--log-every-n-steps", "1", "--resume", "latest", "--logs", tmp_path]
    argv += [*SOFT, "--mixup", "2", "--cutmix", "2", "--caption-augment", "0.2", "--save-every-minutes", "0.0001"]
    run = tmp_path / "killed"
    assert ranks.run(2, [*argv, "--name", "whole"]) == [0, 0], ranks.log.read_text()[-2000:]
    pids = ranks.start(2, [*argv, "--name", "killed"])
    end = time.monotonic() + 60
    while not list(run.glob("checkpoints/epoch_0_batch_*.pt")):  # one is saved after the first step
        assert time.monotonic() < end and ranks.alive(pids[1])
        time.sleep(0.005)
    os.kill(pids[1], signal.SIGKILL)
    assert ranks.wait(pids)[1] == -signal.SIGKILL
    assert checkpoints.position(checkpoints.newest_good(run / "checkpoints"))[1] > 0  # within an epoch
    assert ranks.run(2, [*argv, "--name", "killed"]) == [0, 0]
    whole, killed = losses(tmp_path / "whole/out.log"), losses(run / "out.log")
    assert len(whole) == 2 * 8 and killed.keys() == whole.keys()
    for step, loss in whole.items():
        assert killed[step] == pytest.approx(loss, rel=1e-6), step
    ends = [checkpoints.load(tmp_path / name / "checkpoints/epoch_2.pt") for name in ("whole", "killed")]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.allclose(tensor, ends[1]["state_dict"][name], rtol=1e-5, atol=1e-7), name
    known = ends[0]["about"]["hyperparameters"]
    assert (known["mixup"], known["mix_share"], known["mix_mode"], known["mix_switch_prob"]) == (2, 0.25, "elem", 0.5)
