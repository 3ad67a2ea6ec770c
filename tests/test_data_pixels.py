"""From an image file to normalized images on the device: the same crop, the same pixels or nearly so, the streams."""

import contextlib
import io
import itertools
import math
import random
from unittest import mock

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from shard_maker import arguments, jitter, load, pair, picture, specify, write_tar
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import transforms

from pcmepp_openclip.data import jpeg
from pcmepp_openclip.data.batches import Batch, WorkerBatches
from pcmepp_openclip.data.build import make_loader_spec
from pcmepp_openclip.data.crops import RandomCrop
from pcmepp_openclip.data.decode import BadImage, decode_image
from pcmepp_openclip.data.mixup import Mixing, mix_images
from pcmepp_openclip.data.pixels import normalize
from pcmepp_openclip.data.tally import Tally
from pcmepp_openclip.data.to_device import ToDevice
from pcmepp_openclip.host import data as host_data

SIZE, MANY = 64, 10**8
AUGMENTED = {"color_jitter": (0.3, 0.3, 0.3, 0.1), "color_jitter_prob": 0.8, "gray_scale_prob": 0.3}


def photo(seed: int = 0, size: tuple[int, int] = (200, 150), **save) -> bytes:
    """A picture with edges and grain, which resizing must deal with."""
    rng = np.random.default_rng(seed)
    pixels = np.asarray(Image.open(io.BytesIO(picture(seed, size, format="PNG"))), float)
    pixels = pixels + rng.normal(0, 6, pixels.shape)
    pixels[20:60, 30:90] = rng.integers(0, 255, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90, **save)
    return file.getvalue()


def crop_of(transform, **how) -> RandomCrop:
    steps = host_data.split_crop(host_data.split_transform(transform)[0])
    assert steps is not None
    return RandomCrop(*steps, **how)


@pytest.fixture(params=["simplejpeg", "Pillow"])
def codec(request, monkeypatch):
    """With the optional package, and without it."""
    assert jpeg.simplejpeg is not None
    if request.param == "Pillow":
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    return request.param


FILES = {
    "JPEG": photo(),
    "4:4:4": photo(1, subsampling=0),
    "progressive": photo(2, progressive=True),
    "greyscale": picture(3, (150, 90), "L"),
    "CMYK": picture(4, (150, 90), "CMYK"),
    "PNG": picture(5, (150, 90), format="PNG"),
    "small": photo(6, (100, 61)),
    "a strip": picture(7, (900, 3)),
}


@pytest.mark.parametrize("scale, aug", [((0.9, 1.0), {}), ((0.08, 1.0), AUGMENTED)], ids=["plain", "augmented"])
def test_an_exact_crop_has_the_pixels_and_the_random_numbers_of_the_transform(codec, aug, scale):
    transform = open_clip.image_transform(SIZE, is_train=True, aug_cfg={"scale": scale, **aug})
    crop, slow = crop_of(transform, exact=True), host_data.split_transform(transform)[0]
    for seed, data in enumerate(FILES.values()):
        torch.manual_seed(seed)
        random.seed(seed)
        expected = np.asarray(slow(decode_image(data)))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        random.seed(seed)
        pixels = crop(data, MANY, False)
        assert pixels.dtype == torch.uint8 and np.array_equal(pixels.numpy(), expected)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "a strip"])
def test_a_crop_to_a_share_of_both_sides_against_a_slow_form(codec, name):
    """The box by its definition, squashed to a square by Pillow and flipped by a coin."""
    transform = host_data.with_crop(open_clip.image_transform(SIZE, is_train=True), [0.6, 1.0], True)
    crop, image, flips, shares = crop_of(transform, exact=True), decode_image(FILES[name]), 0, []
    for seed in range(12):
        torch.manual_seed(seed)
        pixels = crop(FILES[name], MANY, False)
        torch.manual_seed(seed)
        shares.append(0.6 + 0.4 * torch.rand(1).item())
        width, height = (max(1, int(side * shares[-1])) for side in image.size)
        top, left = (int(torch.randint(n, (1,))) for n in (image.height - height + 1, image.width - width + 1))
        slow = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        flip = torch.rand(1).item() < 0.5
        flips += flip
        expected = np.asarray(slow)[:, ::-1] if flip else np.asarray(slow)
        assert np.array_equal(pixels.numpy(), expected)
    assert 0 < flips < 12 and min(shares) < 0.7 and max(shares) > 0.9


def test_the_flags_of_the_crop_reach_the_loader(tmp_path):
    write_tar(tmp_path / "0.tar", [pair(f"s{i}") for i in range(4)])
    (tmp_path / "sizes.json").write_text('{"0.tar": 4}')
    place, transform, tokenizer = f"{tmp_path}/0.tar", open_clip.image_transform(8, is_train=True), lambda x: [[1, 0]]
    spec = specify(arguments(place, "--crop-sides", "0.6", "1", "--flip"))
    crop = make_loader_spec(spec, transform, tokenizer, rank=0, ranks=1).crop
    assert crop.crop.scale == (0.6, 1.0) and "Flip" in str(crop.after)
    for flags, words in ((["1", "0.6"], "takes the least share first"), (["0", "1"], "above 0")):
        with pytest.raises(ValueError, match=words):
            specify(arguments(place, "--crop-sides", *flags))


@pytest.mark.parametrize("reduced, mean, psnr", [(False, 0.05, 50), (True, 3.0, 30)])
def test_other_crops_are_within_the_stated_error_of_the_exact_one(codec, reduced, mean, psnr):
    transform = open_clip.image_transform(SIZE, is_train=True)
    exact, other = crop_of(transform, exact=True), crop_of(transform, reduced=reduced)
    for seed in range(8):
        data, pixels = photo(seed), []
        for crop in (exact, other):
            torch.manual_seed(seed)
            pixels.append(crop(data, MANY, False).double())
        error = (pixels[0] - pixels[1]).abs()
        assert error.mean() < mean and 10 * math.log10(255**2 / error.square().mean()) > psnr
        assert (error.mean() > 0.3) == reduced  # it was decoded at another scale


def test_both_codecs_decode_the_same_pixels_at_the_smallest_scale_that_keeps_the_crop(monkeypatch):
    crop = crop_of(open_clip.image_transform(SIZE, is_train=True), reduced=True)
    heights, original = [], jpeg.decode_jpeg
    monkeypatch.setattr("pcmepp_openclip.data.crops.decode_jpeg", lambda *x: heights.append(x[1]) or original(*x))
    for height, expected in ((70, 70), (150, 75), (301, 76), (640, 80), (1200, 150)):
        data = photo(height, (height, height))
        torch.manual_seed(0)
        fast = crop(data, MANY, False)
        with monkeypatch.context() as without:
            without.setattr(jpeg, "simplejpeg", None)
            torch.manual_seed(0)
            assert torch.equal(crop(data, MANY, False), fast)
        assert heights.pop() == expected and not heights


def test_a_bad_image_has_its_cause_and_draws_no_random_numbers(codec):
    crop = crop_of(open_clip.image_transform(SIZE, is_train=True))
    for data, limit, cause in (
        (photo()[:3000], MANY, "broken image"),
        (photo()[:100], MANY, "broken image"),
        (photo(), 200 * 150 - 1, "too many pixels"),
        (b"GIF89a", MANY, "broken image"),
        (b"no image", MANY, "unknown image format"),
    ):
        before = torch.get_rng_state()
        with pytest.raises(BadImage) as caught:
            crop(data, limit, False)
        assert caught.value.cause == cause and torch.equal(torch.get_rng_state(), before)


def test_an_upright_crop_is_drawn_in_the_turned_image(codec):
    exif = Image.Exif()
    exif[0x0112] = 6
    transform = open_clip.image_transform(SIZE, is_train=True, aug_cfg={"scale": (0.2, 0.5)})
    crop = crop_of(transform, exact=True)
    for data in (photo(1, exif=exif), photo(1)):
        torch.manual_seed(1)
        expected = np.asarray(host_data.split_transform(transform)[0](decode_image(data, upright=True)))
        torch.manual_seed(1)
        assert np.array_equal(crop(data, MANY, True).numpy(), expected)


def test_other_transforms_are_no_random_crop():
    first = transforms.RandomResizedCrop(8, interpolation=transforms.InterpolationMode.BICUBIC)
    assert host_data.split_crop(transforms.Compose([first])) == (first, "bicubic", None)
    nearest = transforms.RandomResizedCrop(8, interpolation=transforms.InterpolationMode.NEAREST)
    for other in (jitter, first, transforms.Compose([]), transforms.Compose([nearest])):
        assert host_data.split_crop(other) is None
    assert host_data.split_crop(transforms.Compose([transforms.Resize(8), first])) is None
    assert host_data.split_crop(host_data.split_transform(open_clip.image_transform(8, is_train=False))[0]) is None


def test_uint8_leaves_the_workers_and_a_custom_transform_is_left_alone(tmp_path):
    write_tar(tmp_path / "0.tar", [pair(str(i), image=photo(i)) for i in range(4)])
    args = arguments(str(tmp_path / "0.tar"), train_num_samples=4)
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    transform = open_clip.image_transform(SIZE, is_train=True)
    for given, dtype, shape in ((transform, torch.uint8, (4, SIZE, SIZE, 3)), (jitter, torch.float32, (4, 3, 8, 8))):
        spec = make_loader_spec(specify(args), given, tokenizer, rank=0, ranks=1)
        (batch,) = WorkerBatches(spec, 0, 1, lambda: (0, 0))
        assert batch.images.dtype == dtype and batch.images.shape == shape
        ((images, _),) = load(args, given).dataloader
        assert images.dtype == torch.float32 and images.shape[1] == 3
        assert torch.equal(images, normalize(batch.images, spec.normalization))


def test_workers_and_position_do_not_change_the_batches(tmp_path):
    """Also beside a damaged image, which an epoch that is entered in its middle may decode at another time."""
    images = [photo(i)[:3000] if i % 5 == 0 else photo(i) for i in range(40)]
    write_tar(tmp_path / "0.tar", [pair(f"{i:02d}", image=image) for i, image in enumerate(images)])
    transform = open_clip.image_transform(SIZE, is_train=True, aug_cfg={"scale": (0.1, 1.0)})
    (tmp_path / "sizes.json").write_text('{"0.tar": 40}')
    whole = list(load(arguments(str(tmp_path / "0.tar")), transform).dataloader)
    parts = load(arguments(str(tmp_path / "0.tar"), workers=2), transform)
    for first in (0, 3, 7):
        parts.set_epoch(0, first)
        rest = list(parts.dataloader)
        assert len(rest) == len(whole) - first == 10 - first
        for (image, text), (other_image, other_text) in zip(whole[first:], rest, strict=True):
            assert torch.equal(image, other_image) and torch.equal(text, other_text)


MEAN, STD = torch.tensor([0.48, 0.45, 0.4]).view(3, 1, 1), torch.tensor([0.26, 0.27, 0.28]).view(3, 1, 1)


def batch_of(index: int) -> Batch:
    pixels = torch.randint(0, 256, (3, 5, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
    return Batch(pixels, torch.full((3, 8), index), Tally())


def test_normalized_pixels_are_those_of_torchvision():
    pixels = batch_of(0).images
    slow = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN.flatten(), STD.flatten())])
    expected = torch.stack([slow(image.numpy()) for image in pixels])
    result = normalize(pixels, (MEAN, STD))
    assert result.is_contiguous() and (result - expected).abs().max() < 1e-6
    assert normalize(pixels, None) is pixels


def test_on_cuda_one_batch_is_copied_ahead_by_a_side_stream(monkeypatch):
    """On fake tensors, with noted streams: every copy is begun before the step in front of it, and waited for alone."""
    cuda, fetched, real = mock.Mock(), [], torch.Tensor.to
    cuda.side.record_event.side_effect = itertools.count()
    current = [cuda.step]

    @contextlib.contextmanager
    def within(stream):
        current.append(stream)
        yield
        current.pop()

    def copy(x, device, **how):
        if how:  # the copy of a batch: what stays on the CPU is never moved here
            assert how == {"non_blocking": True} and x.dtype == torch.uint8
            current[-1].copies(len(fetched) - 1)
        return real(x, device, **how)

    def batches():
        for index in range(3):
            fetched.append(index)
            yield batch_of(index)
        cuda.end()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: cuda.side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: stream.owns())
    with FakeTensorMode(allow_non_fake_inputs=True):
        to_device = ToDevice(torch.device("cuda", 0), (MEAN, STD))
        monkeypatch.setattr(torch.Tensor, "to", copy)
        assert to_device.copies
        for index, batch in enumerate(to_device(batches())):
            assert fetched == list(range(min(3, index + 2)))
            assert batch.images.device.type == "cuda" and batch.texts.device.type == "cpu"
            assert batch.images.dtype == torch.float32 and batch.images.shape == (3, 3, 5, 4)
            current[-1].step(index)
            mixed, partner, share = mix_images(batch.images, Mixing(mixup=1.0, share=1.0), np.random.default_rng(0))
            assert mixed.device.type == "cuda" and partner.device.type == share.device.type == "cpu"
    step, side, end = mock.call.step, mock.call.side, [mock.call.end()]
    arrive = [[step.wait_event(i), step.owns(), step.step(i)] for i in range(3)]
    copies = [[side.copies(i), side.record_event()] for i in range(3)]
    assert cuda.mock_calls == [*copies[0], *copies[1], *arrive[0], *copies[2], *arrive[1], *end, *arrive[2]]
