"""Speed without a change of the result: captions cut to the longest of the batch, JPEGs decoded at a reduced scale."""

import io
import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from shard_maker import arguments, get_data, pair, picture, to_tensor, write_tar

import pcmepp_openclip
from pcmepp_openclip.data.batches import cut_texts
from pcmepp_openclip.data.decode import decode_image
from pcmepp_openclip.data.plan import seed_for
from pcmepp_openclip.host import data as host_data

CAPTIONS = ["a dog", "a small black dog on a red sofa in the rain", "!!!", "word " * 100]


def test_texts_are_cut_to_a_multiple_of_8_and_give_the_same_output(tiny_model):
    model = tiny_model.eval()
    for number, length in ((1, 8), (2, 16), (3, 16), (4, 32)):
        whole = open_clip.get_tokenizer("PCMEpp-tiny")(CAPTIONS[:number])
        cut = cut_texts(whole, pad=0)
        assert cut.shape == (number, length) and torch.equal(cut, whole[:, :length])
        with torch.inference_mode():
            a, b = model.encode_text_gaussian(whole), model.encode_text_gaussian(cut)
        assert torch.allclose(a.mean, b.mean, atol=1e-5) and torch.allclose(a.logvar, b.logvar, atol=1e-4)


@pytest.fixture
def shard(tmp_path):
    write_tar(tmp_path / "0.tar", [pair(str(i), "a small black dog on a red sofa") for i in range(8)])
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": 8}))
    return str(tmp_path / "0.tar")


@pytest.mark.parametrize(
    "model, flags, length",
    [("PCMEpp-tiny", (), 16), ("PCMEpp-tiny", ("--no-trim-captions",), 32), ("ViT-B-32", (), 77)],
)
def test_only_pcmepp_models_get_cut_texts(shard, model, flags, length):
    tokenizer = open_clip.get_tokenizer(model)
    args = arguments(shard, *flags, model=model)
    data = get_data(args, (to_tensor, to_tensor), tokenizer=tokenizer)["train"]
    assert {texts.shape for _, texts in data.dataloader} == {(4, length)}
    expected = tokenizer("a small black dog on a red sofa")[0, :length]
    assert all(torch.equal(row, expected) for _, texts in data.dataloader for row in texts)


def test_a_model_without_a_causal_mask_keeps_whole_texts(shard, tmp_path):
    config = json.loads((pcmepp_openclip.MODEL_CONFIGS / "PCMEpp-tiny.json").read_text())
    config["text_cfg"]["no_causal_mask"] = True
    (tmp_path / "PCMEpp-unmasked.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "PCMEpp-unmasked.json")
    data = get_data(
        arguments(shard, model="PCMEpp-unmasked"),
        (to_tensor, to_tensor),
        tokenizer=open_clip.get_tokenizer("PCMEpp-tiny"),
    )["train"]
    assert {texts.shape[1] for _, texts in data.dataloader} == {32}


def test_a_batch_is_what_the_transform_makes_of_each_image(tmp_path):
    """Cropping first and normalising in fewer passes, against open_clip's transform step by step."""
    images = [picture(i, (90, 70), mode) for i, mode in enumerate(["RGB", "L", "CMYK", "RGB"])]
    write_tar(tmp_path / "0.tar", [pair(str(i), str(i), image) for i, image in enumerate(images)])
    transform = open_clip.image_transform(64, is_train=False)
    fast, normalization = host_data.split_transform(transform)
    assert normalization is not None and len(fast.transforms) == len(transform.transforms) - 2
    args = arguments(str(tmp_path / "0.tar"), "--train-data-decoding", "exact", train_num_samples=4)
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    ((batch, texts),) = get_data(args, (transform, transform), tokenizer=tokenizer)["train"].dataloader
    assert batch.shape == (4, 3, 64, 64) and batch.dtype == torch.float32 and batch.is_contiguous()
    order = [next(i for i in range(4) if torch.equal(tokenizer(str(i))[0, : len(row)], row)) for row in texts]
    torch.manual_seed(seed_for("transform", 0, 0, 0, 0))
    slow = torch.stack([transform(decode_image(images[i])) for i in order])
    assert torch.allclose(batch, slow, atol=1e-6, rtol=0)


def test_jpegs_are_reduced_by_the_codec_but_not_below_the_input():
    for size, at_least, expected in (
        ((512, 512), 224, (256, 256)),
        ((512, 400), 224, (512, 400)),
        ((1200, 900), 224, (300, 225)),
        ((512, 512), None, (512, 512)),
        ((200, 200), 224, (200, 200)),
    ):
        data = picture(1, size)
        image = decode_image(data, at_least=at_least)
        assert image.size == expected and image.mode == "RGB"
        slow = Image.open(io.BytesIO(data)).convert("RGB").resize(expected, Image.Resampling.BOX)
        assert np.abs(np.asarray(image, float) - np.asarray(slow, float)).mean() < 2
    assert decode_image(picture(1, (512, 512), format="PNG"), at_least=224).size == (512, 512)
    assert decode_image(picture(1, (512, 512), mode="CMYK"), at_least=224).size == (256, 256)


def test_the_flag_reaches_the_decoder(tmp_path):
    write_tar(tmp_path / "0.tar", [pair(str(i), image=picture(i, (512, 512))) for i in range(4)])
    sizes = []

    def transform(image):
        sizes.append(image.size)
        return to_tensor(image)

    for flags in ((), ("--train-data-reduced-decoding",)):
        args = arguments(str(tmp_path / "0.tar"), *flags, train_num_samples=4, force_image_size=200)
        list(
            get_data(args, (transform, transform), tokenizer=open_clip.get_tokenizer("PCMEpp-tiny"))["train"].dataloader
        )
    assert sizes == [(512, 512)] * 4 + [(256, 256)] * 4
