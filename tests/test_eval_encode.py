"""Images and texts to Gaussians: one loader for all images, no wait per batch, and bit for bit the obvious numbers."""

import io

import pytest
import torch
import torch.multiprocessing as mp
from drawn_shards import SCENES
from eval_data import png, write_tar
from helpers import make_model
from PIL import Image
from torch.utils.data import DataLoader

from pcmepp_openclip.data.captioned import locate_samples
from pcmepp_openclip.encode import encode
from pcmepp_openclip.encode.encode import Encoder
from pcmepp_openclip.encode.load import LoadedModel
from pcmepp_openclip.encode.store import Store

CHUNK, BATCH = 16, 5
COUNT = 42  # two whole chunks and a part, of batches that do not divide them
TEXTS = [f"a {colour} {shape} at the {place}" for colour, shape, place in SCENES[:COUNT]]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(encode, "CHUNK", CHUNK)


@pytest.fixture(scope="module")
def parts():
    import open_clip

    _, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny")
    return make_model("PCMEpp-tiny"), preprocess, open_clip.get_tokenizer("PCMEpp-tiny")


CONFIGS = {  # which leave every tensor as it is
    "activation": {"quick_gelu": True},
    "its form": {"text_cfg": {"act_kwargs": {"approximate": "tanh"}}},
    "eps": {"vision_cfg": {"norm_kwargs": {"eps": 0.1}}},
    "mask": {"text_cfg": {"no_causal_mask": True}},
    "pool": {"vision_cfg": {"pool_type": "avg"}},
    "pooled token": {"text_cfg": {"pool_type": "first"}},
    "heads": {"text_cfg": {"heads": 4}},
    "cleaning": {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=list(CONFIGS))
def test_another_config_of_the_same_weights_is_encoded_anew(parts, places, tmp_path, changes):
    import open_clip

    config = open_clip.get_model_config("PCMEpp-tiny")
    blocks = {key: {**config[key], **value} if isinstance(value, dict) else value for key, value in changes.items()}
    other = open_clip.create_model("PCMEpp-tiny", **blocks)
    other.load_state_dict(parts[0].state_dict())
    cleaning = blocks.get("text_cfg", {}).get("tokenizer_kwargs", {})
    tokenizer = open_clip.tokenizer.SimpleTokenizer(context_length=32, **cleaning)
    before, again, expected = (
        (encoder.images(places[:4]), encoder.texts(["A dog, and a cat.", "a red_circle"]))
        for encoder in (
            make_encoder(parts, tmp_path / "embeddings"),
            make_encoder((other, parts[1], tokenizer), tmp_path / "embeddings"),
            make_encoder((other, parts[1], tokenizer), tmp_path / "other"),
        )
    )
    assert not all(torch.equal(one.mean, two.mean) for one, two in zip(before, expected, strict=True))
    for got, right in zip(again, expected, strict=True):
        assert torch.equal(got.mean, right.mean) and torch.equal(got.logvar, right.logvar)


@pytest.fixture
def places(tmp_path):
    write_tar(tmp_path / "0.tar", [{"png": png(scene), "txt": "x"} for scene in SCENES[:COUNT]])
    return [image for _, image, _ in locate_samples([str(tmp_path / "0.tar")], "--retrieval")]


@pytest.fixture
def encoder(parts, tmp_path):
    return make_encoder(parts, tmp_path / "embeddings")


def make_encoder(parts, cache, **settings):
    return Encoder(LoadedModel("PCMEpp-tiny", None, *parts, True, "cpu"), cache, batch_size=BATCH, **settings)


def obvious(parts, crops=None):
    """Image by image read from the scenes, batch by batch within each chunk, everything in this process."""
    model, preprocess, _ = parts
    pixels = [preprocess(Image.open(io.BytesIO(png(scene)))) for scene in SCENES[:COUNT]]
    if crops is not None:
        pixels = [encode.centre_crop(image, crop) for image, crop in zip(pixels, crops, strict=True)]
    means, logvars = [], []
    for start in range(0, COUNT, CHUNK):
        chunk = pixels[start : start + CHUNK]
        for first in range(0, len(chunk), BATCH):
            with torch.inference_mode():
                found = model.encode_image_gaussian(torch.stack(chunk[first : first + BATCH]))
            means.append(found.mean)
            logvars.append(found.logvar)
    return torch.cat(means), torch.cat(logvars)


class Counted:
    """The loaders that were made, and the worker processes that were started for them."""

    def __init__(self, monkeypatch):
        self.loaders, self.starts, start = [], [], mp.Process.start
        monkeypatch.setattr(encode, "DataLoader", self.make)
        monkeypatch.setattr(mp.Process, "start", lambda process: self.starts.append(process.name) or start(process))

    def make(self, *args, **kwargs):
        self.loaders.append(kwargs)
        return DataLoader(*args, **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
def test_bit_for_bit_and_one_loader(parts, places, tmp_path, monkeypatch, workers):
    counted = Counted(monkeypatch)
    encoder = make_encoder(parts, tmp_path / "embeddings", workers=workers)
    found = encoder.images(places)
    for got, expected in zip(found, obvious(parts), strict=True):
        assert torch.equal(got, expected) and not got.is_inference()
    assert len(counted.loaders) == 1 and len(counted.starts) == workers
    assert len(list(encoder.cache.rglob("*.safetensors"))) == 3
    encoder.images(places)
    assert len(counted.loaders) == 1  # nothing is missing, so no worker is started
    crops = [0.3 + 0.01 * i for i in range(COUNT)]
    for got, expected in zip(encoder.images(places, "crops", crops), obvious(parts, crops), strict=True):
        assert torch.equal(got, expected)


def test_not_more_workers_than_batches(parts, places, tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    make_encoder(parts, tmp_path / "embeddings", workers=4).images(places[:3])
    assert len(counted.starts) == 1


def test_a_missing_and_a_half_written_chunk_are_encoded_alone(encoder, places, monkeypatch, capsys):
    whole = encoder.images(places)
    first, second, third = sorted(encoder.cache.rglob("*.safetensors"))
    before = [path.read_bytes() for path in (first, second, third)]
    first.unlink()
    third.write_bytes(before[2][: len(before[2]) // 2])
    sizes, stock = [], Encoder._gaussian
    monkeypatch.setattr(
        Encoder, "_gaussian", lambda self, batch, kind: sizes.append(len(batch)) or stock(self, batch, kind)
    )
    again = encoder.images(places)
    assert sizes == [5, 5, 5, 1, 5, 5]  # 16 and 10 rows, the second chunk is not read again
    assert torch.equal(again.mean, whole.mean) and torch.equal(again.logvar, whole.logvar)
    assert [path.read_bytes() for path in (first, second, third)] == before
    errors = capsys.readouterr().err
    assert f"{third} is damaged" in errors and str(first) not in errors


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named_and_the_chunks_before_it_stay(parts, tmp_path, workers):
    samples = [{"png": png(scene), "txt": "x"} for scene in SCENES[:COUNT]]
    samples[20]["png"] = samples[20]["png"][:60]
    write_tar(tmp_path / "0.tar", samples)
    places = [image for _, image, _ in locate_samples([str(tmp_path / "0.tar")], "--retrieval")]
    encoder = make_encoder(parts, tmp_path / "embeddings", workers=workers)
    with pytest.raises(ValueError) as caught:
        encoder.images(places)
    message = str(caught.value)
    assert message.startswith(f"An image of {places[20].file} (at byte {places[20].offset}) cannot be read: ")
    assert "\n" not in message
    assert [path.name for path in encoder.cache.rglob("*.safetensors")] == ["000000.safetensors"]


def test_one_copy_per_chunk(encoder, places, monkeypatch):
    """Whatever reads a value or copies to the CPU would make the host wait for a GPU."""
    waits = []

    def watch(name):
        stock = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: waits.append(name) or stock(*args, **kwargs))

    assert encoder.fingerprint  # it reads the weights, once
    saved = {}
    monkeypatch.setattr(
        Store, "write", lambda store, name, rows: waits.append("saved") or saved.update({store.path(name): rows})
    )
    monkeypatch.setattr(Store, "read", lambda store, name: saved.get(store.path(name)))
    pixels = [torch.randn(size, 3, 32, 32) for size in (5, 5, 5, 1, 5, 5, 5, 1, 5, 5)]
    monkeypatch.setattr(encode, "image_batches", lambda *args: iter(pixels))  # decoding has tensors of its own
    for name in ("cpu", "item", "__bool__", "tolist", "numpy"):
        watch(name)
    encoder.images(places)
    assert waits == ["cpu", "__bool__", "saved"] * 3  # the check for finite values reads the copy
    waits.clear()
    encoder.texts(TEXTS)
    assert [wait for wait in waits if wait in ("cpu", "saved")] == ["cpu", "saved"] * 3


def test_pinned_memory_on_cuda_alone(places, parts, monkeypatch):
    made = []
    monkeypatch.setattr(encode, "DataLoader", lambda *args, **kwargs: made.append(kwargs) or [])
    data = encode.ImageDataset(places, parts[1])
    for device in ("cpu", "cuda", "cuda:1"):
        list(encode.image_batches(data, [[0]], 0, device))
    assert [kwargs["pin_memory"] for kwargs in made] == [False, True, True]


@pytest.mark.parametrize("part, value", [("mean", torch.nan), ("logvar", torch.nan), ("logvar", 100.0)])
def test_values_that_are_not_finite(parts, places, tmp_path, monkeypatch, part, value):
    encoder = make_encoder(parts, tmp_path / "embeddings")
    stock = encode.gaussians
    calls = []

    def broken(*args):
        calls.append(0)
        found = stock(*args)
        return found._replace(**{part: torch.full_like(found.mean, value)}) if len(calls) == 6 else found

    monkeypatch.setattr(encode, "gaussians", broken)
    with pytest.raises(ValueError, match="output is not finite: try --precision fp32"):
        encoder.images(places)
    assert len(list(encoder.cache.rglob("*.safetensors"))) == 1  # the chunk before it


def test_fp32_is_exact_in_convolutions_too(encoder, places, parts):
    """As cuDNN is told while the model runs; the caller's own setting is as before."""
    seen = []
    handle = parts[0].visual.conv1.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = True
        encoder.images(places)
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cudnn.allow_tf32 = before
        handle.remove()
    assert seen == [False] * 10
