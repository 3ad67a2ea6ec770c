"""`ImageTextModel` against open_clip's own calls, and against loops over pairs and references in fp64."""

import copy
import json
import math
import shutil
import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from drawn_shards import SCENES, caption, draw
from exported import add_bank, export_tiny, random_bank
from helpers import make_model, plain_twin, run_code
from PIL import Image
from safetensors.torch import load_file, save_file

import pcmepp_openclip
from pcmepp_openclip import Gaussian, ImageTextModel
from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.ambiguity.model import SCORES
from pcmepp_openclip.ambiguity.store import BANK_FILE, CALIBRATION_FILE, save_bank
from pcmepp_openclip.data.captioned import image_file
from pcmepp_openclip.encode.encode import Encoder
from pcmepp_openclip.encode.load import load_model
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.models.fingerprint import bank_fingerprint

IMAGES = [draw(*scene) for scene in SCENES[:5]]
TEXTS = [*(caption(*scene) for scene in SCENES[:6]), "", "a photo of a dog " * 20]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By name: a PCME++ and a plain model, each bare and with a bank and a calibration."""
    root = tmp_path_factory.mktemp("models")
    for name, probabilistic in (("pcmepp", True), ("plain", False)):
        export_tiny(root / name, probabilistic)
        shutil.copytree(root / name, root / f"{name}-bank")
        add_bank(root / f"{name}-bank", "bank")
    shutil.copytree(root / "pcmepp", root / "pcmepp-variance")
    add_bank(root / "pcmepp-variance", "variance")
    return root


@pytest.fixture(scope="module")
def models(folders):
    return {path.name: ImageTextModel(f"local-dir:{path}") for path in folders.iterdir()}


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=torch.float32), rtol=tolerance, atol=tolerance / 10
    )


# --- Slow forms, one pair and one exponential at a time ----------------------------------------------------


def slow_hubness(bank, mean_D, of, without=None):
    references = (bank.texts_BD if of == "images" else bank.images_BD).double()
    terms = [math.exp(bank.scale * float(mean_D @ r)) for i, r in enumerate(references) if i != without]
    return math.log(sum(terms) / len(terms))


def slow_confusion(bank, mean_D, of, order=2):
    other, kind = (bank.texts_BD, "texts") if of == "images" else (bank.images_BD, "images")
    weights = [
        math.exp(bank.scale * float(mean_D @ r) - slow_hubness(bank, r, kind, without=j))
        for j, r in enumerate(other.double())
    ]
    p = [w / sum(weights) for w in weights]
    return 1 / sum(x**2 for x in p) if order == 2 else math.exp(-sum(x * math.log(x) for x in p))


def each_pair(images, texts, value):
    """[N, M] of a function of (image mean, text mean, image uncertainty, text uncertainty), all in fp64."""
    rows = []
    for i in range(len(images.mean)):
        v, u_v = images.mean[i].double(), float(images.logvar[i].double().exp().sum())
        row = []
        for j in range(len(texts.mean)):
            t, u_t = texts.mean[j].double(), float(texts.logvar[j].double().exp().sum())
            row.append(value(v, t, u_v, u_t))
        rows.append(row)
    return rows


# --- Encoding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pcmepp", "plain"])
@pytest.mark.parametrize("batch_size", [2, 64])
def test_encoding_is_open_clip_s(folders, name, batch_size):
    model = ImageTextModel(f"local-dir:{folders / name}", batch_size=batch_size)
    stock, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folders / name}")
    stock.eval()
    pixels = torch.stack([preprocess(image) for image in IMAGES])
    tokens = open_clip.get_tokenizer(f"local-dir:{folders / name}")(TEXTS)
    with torch.no_grad():
        expected = F.normalize(stock.encode_image(pixels), dim=-1), F.normalize(stock.encode_text(tokens), dim=-1)
    found = model.encode_images(IMAGES), model.encode_texts(TEXTS)
    for gaussian, mean in zip(found, expected, strict=True):
        assert isinstance(gaussian, Gaussian) and gaussian.logvar.dtype == torch.float32
        torch.testing.assert_close(gaussian.mean, mean, rtol=1e-5, atol=1e-5)
    if name == "plain":
        assert all((gaussian.logvar == -torch.inf).all() for gaussian in found)
    else:
        with torch.no_grad():
            slow = stock.encode_image_gaussian(pixels).logvar, stock.encode_text_gaussian(tokens).logvar
        for gaussian, logvar in zip(found, slow, strict=True):
            torch.testing.assert_close(gaussian.logvar, logvar, rtol=1e-4, atol=1e-4)


def test_one_image_a_batch_of_pixels_and_what_is_encoded_already(models):
    model = models["pcmepp-bank"]
    images, texts = model.encode_images(IMAGES), model.encode_texts(TEXTS)
    torch.testing.assert_close(model.encode_images(IMAGES[0]).mean, images.mean[:1])
    torch.testing.assert_close(model.encode_texts(TEXTS[0]).mean, texts.mean[:1])
    pixels = torch.stack([model.preprocess(image) for image in IMAGES])
    assert torch.equal(model.encode_images(pixels).mean, images.mean)
    assert torch.equal(model.encode_images(pixels.double()).mean, images.mean)  # the model is fp32
    for score in SCORES:
        assert torch.equal(model.similarity(images, texts, score), model.similarity(IMAGES, TEXTS, score))
    assert torch.equal(model.confusion(texts=texts), model.confusion(texts=TEXTS))


def as_file(image, kind, path):
    """The image as a file whose pixels are no plain RGB; an EXIF orientation is not followed unless it is asked for."""
    if kind == "16 bits":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif kind == "EXIF":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path, exif=exif)
        return
    elif kind == "palette":
        image = image.quantize(7)
        image.info["transparency"] = 0
    else:
        image = image.convert(kind)
    image.save(path)


@pytest.mark.parametrize("kind", ["16 bits", "1", "palette", "EXIF", "LA", "RGBA"])
def test_images_are_decoded_as_in_evaluation(models, kind, tmp_path):
    model, paths = models["pcmepp"], [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(paths):
        as_file(IMAGES[i].resize((150, 100)), kind, path)  # another size, in which the preprocessing resizes
    encoder = Encoder(load_model(model.name), tmp_path)
    expected = encoder.images([image_file(path) for path in paths])
    found = model.encode_images([Image.open(path) for path in paths])
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logvar, expected.logvar, rtol=1e-4, atol=1e-4)


def test_an_untrained_branch_gives_means_only(models, tmp_path):
    torch.save(models["plain"].model.state_dict(), tmp_path / "plain.pt")
    model = ImageTextModel("PCMEpp-tiny", str(tmp_path / "plain.pt"))
    assert not model.probabilistic and (model.encode_texts(["a dog"]).logvar == -torch.inf).all()
    assert not model.model.training
    with pytest.raises(
        ValueError, match="PCMEpp-tiny has no trained variances: train them with pcmepp train --head-only"
    ):
        model.vagueness(texts=["a dog"])


# --- Questions and scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pcmepp-bank", "plain-bank"])
def test_confusion_and_multiplicity_ask_the_bank(models, name):
    model = models[name]
    images, texts = model.encode_images(IMAGES), model.encode_texts(TEXTS)
    for of, given, found, other in (("texts", TEXTS, texts, IMAGES), ("images", IMAGES, images, TEXTS)):
        confusion = model.confusion(**{of: given})
        close(confusion, [slow_confusion(model.bank, x, of) for x in found.mean.double()])
        assert confusion.max() / confusion.min() > 1.0001 and confusion.min() >= 1 and confusion.max() <= 12
        among = (images if of == "texts" else texts).mean
        for question in ("confusion", "multiplicity"):
            ask, of_bank = getattr(model, question), getattr(model.bank, question)
            assert torch.equal(ask(**{of: given}), of_bank(found.mean, of))
            assert torch.equal(ask(**{of: given}, gallery=other), of_bank(found.mean, of, among))


def test_vagueness_is_the_variance_and_warns_where_it_was_trained_by_matching(models):
    model = models["pcmepp"]
    for kind, given in (("texts", TEXTS), ("images", IMAGES)):
        logvar = getattr(model, f"encode_{kind}")(given).logvar.double()
        with pytest.warns(UserWarning, match="trained by matching.*--objective vagueness"):
            found = model.vagueness(**{kind: given})
        close(found, [float(row.exp().sum()) for row in logvar])
    trained = replace(model.model.pcmepp_cfg, weights={"difficulty_weight": 1.0})
    with warnings.catch_warnings(), mock.patch.object(model.model, "pcmepp_cfg", trained):
        warnings.simplefilter("error")
        assert torch.equal(model.vagueness(images=IMAGES), model.encode_images(IMAGES).uncertainty)


def test_the_old_names_say_what_to_ask(models):
    with pytest.raises(AttributeError, match=r"confusion.*multiplicity.*vagueness"):
        models["pcmepp-bank"].ambiguity(texts=TEXTS)
    for name in ("entropy", "share"):
        with pytest.raises(AttributeError, match=f"{name}.*confusion.*multiplicity"):
            getattr(models["pcmepp-bank"].bank, name)


@pytest.mark.parametrize("name", ["pcmepp-bank", "plain-bank"])
def test_scores_by_the_bank(models, name):
    model = models[name]
    images, texts, bank = model.encode_images(IMAGES), model.encode_texts(TEXTS), model.bank

    def csd(v, t, u_v, u_t):
        return float(v @ t) - (slow_hubness(bank, v, "images") + slow_hubness(bank, t, "texts")) / 2 / bank.scale

    def entailment(v, t, u_v, u_t):
        return (
            float(v @ t)
            - (slow_hubness(bank, t, "texts") - math.log(slow_confusion(bank, t, "texts", order=1) / 12)) / bank.scale
        )

    close(model.similarity(IMAGES, TEXTS), each_pair(images, texts, lambda v, t, u_v, u_t: float(v @ t)))
    close(model.similarity(IMAGES, TEXTS, "csd"), each_pair(images, texts, csd))
    close(model.similarity(IMAGES, TEXTS, score="entailment"), each_pair(images, texts, entailment))


@pytest.mark.parametrize("name, estimator", [("pcmepp", None), ("pcmepp-bank", "variance")])
def test_scores_by_the_variance(models, name, estimator):
    model = models[name]
    images, texts = model.encode_images(IMAGES), model.encode_texts(TEXTS)
    k = model.model.pcmepp_cfg.match_ratio
    assert model.model.pcmepp_cfg.match_logit == "tied" and k == 0.5
    forms = {
        "cosine": lambda v, t, u_v, u_t: float(v @ t),
        "csd": lambda v, t, u_v, u_t: float(v @ t) - (u_v + u_t) / 2,
        "entailment": lambda v, t, u_v, u_t: float(v @ t) + k / (2 * (1 - k)) * u_t,
    }
    for score, value in forms.items():
        close(model.similarity(IMAGES, TEXTS, score, estimator=estimator), each_pair(images, texts, value))


def test_the_corrected_score_ranks_both_ways_as_the_distances_do(models):
    from pcmepp_openclip.ambiguity import HubnessCorrected

    model = models["plain-bank"]
    images, texts = model.encode_images(IMAGES), model.encode_texts(TEXTS)
    found = model.similarity(images, texts, "csd")
    by_image = HubnessCorrected(model.bank).matrix(images, texts)
    by_text = HubnessCorrected(model.bank).transposed.matrix(texts, images)
    close(found - found[:, :1], by_image[:, :1] - by_image)
    close((found - found[:1]).T, by_text[:, :1] - by_text)


@pytest.mark.parametrize("prior", [0.5, 0.02])
@pytest.mark.parametrize("name", ["pcmepp-bank", "plain-bank", "pcmepp-variance"])
def test_match_probability(models, name, prior):
    model = models[name]
    images, texts, bank = model.encode_images(IMAGES), model.encode_texts(TEXTS), model.bank
    s = math.exp(float(model.model.logit_scale))

    def probability(v, t, u_v, u_t):
        if name == "pcmepp-variance":
            x_v, x_t = u_v * s / 2, u_t * s / 2
        else:
            x_v, x_t = slow_hubness(bank, v, "images"), slow_hubness(bank, t, "texts")
        logit = 1.3 * s * float(v @ t) - 0.4 * x_v - 0.7 * x_t - 2.5 + math.log(prior / (1 - prior))
        return 1 / (1 + math.exp(-logit))

    close(model.match_probability(IMAGES, TEXTS, prior=prior), each_pair(images, texts, probability))


# --- Mistakes ----------------------------------------------------------------------------------------------

MISTAKES = {
    "no bank": ("pcmepp", lambda m: m.confusion(texts="a"), "has no bank: make one by `pcmepp bank`"),
    "no variances": ("plain-bank", lambda m: m.vagueness(texts="a"), "has no trained variances"),
    "neither": ("plain", lambda m: m.similarity(IMAGES, TEXTS, "csd"), "plain.* has no bank: make one"),
    "estimator": (
        "pcmepp",
        lambda m: m.similarity(IMAGES, TEXTS, "csd", "x"),
        "must be one of bank, variance, not 'x'",
    ),
    "score": ("pcmepp", lambda m: m.similarity(IMAGES, TEXTS, "x"), "one of cosine, csd, entailment, not 'x'"),
    "no calibration": ("pcmepp", lambda m: m.match_probability(IMAGES, TEXTS), "run `pcmepp calibrate`"),
    "prior": ("pcmepp-bank", lambda m: m.match_probability(IMAGES, TEXTS, prior=1), "strictly between 0 and 1"),
    "both": ("pcmepp-bank", lambda m: m.confusion(texts=TEXTS, images=IMAGES), "one of the two"),
    "nothing": ("pcmepp-bank", lambda m: m.multiplicity(), "one of the two"),
    "empty": ("pcmepp-bank", lambda m: m.encode_texts([]), "There are no texts to encode"),
    "a path": ("plain", lambda m: m.encode_images(["photo.jpg"]), "not str: open a file with PIL.Image.open"),
    "an array": ("plain", lambda m: m.encode_images(np.zeros((3, 8, 8))), "images must be .* not ndarray"),
    "numbers": ("plain", lambda m: m.encode_texts([1, 2]), "texts must be strings or a Gaussian, not int"),
    "swapped": ("plain", lambda m: m.similarity(TEXTS, IMAGES), "images must be .* not str"),
    "a set": ("plain", lambda m: m.encode_images(set(TEXTS)), "images must be .* not set"),
    "a set of texts": ("plain", lambda m: m.similarity(IMAGES, set(TEXTS)), "texts must be .* not set"),
    "sparse": ("plain", lambda m: m.encode_images(torch.zeros(1, 3, 32, 32).to_sparse()), "images must be .*sparse"),
    "meta": ("plain", lambda m: m.encode_images(torch.zeros(1, 3, 32, 32, device="meta")), "images must be .*meta"),
    "bytes": ("plain", lambda m: m.encode_images(torch.zeros(1, 3, 32, 32).byte()), "images must be .*uint8"),
    "no pixels": ("plain", lambda m: m.encode_images(Image.new("RGB", (0, 0))), "images .*broken image"),
    "one channel": ("plain", lambda m: m.encode_images(torch.zeros(2, 1, 32, 32)), r"not \[2, 1, 32, 32\]"),
    "one tensor": ("plain", lambda m: m.encode_images(torch.zeros(3, 32, 32)), r"not \[3, 32, 32\]"),
}


@pytest.mark.parametrize("name, call, words", MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_are_one_sentence(models, name, call, words):
    with pytest.raises(ValueError, match=words) as error:
        call(models[name])
    assert "\n" not in str(error.value)


def test_a_plain_model_without_a_bank_has_the_cosine(models):
    assert models["plain"].similarity(IMAGES, TEXTS).shape == (5, 8)


@pytest.mark.parametrize("name", ["PCMEpp-tiny", "ViT-B-32"])
def test_random_weights_answer_nothing(name):
    with pytest.raises(ValueError, match=f"{name} has random weights: give pretrained="):
        ImageTextModel(name)


@pytest.mark.parametrize("probabilistic", [True, False])
def test_nor_does_a_folder_without_weights(probabilistic, tmp_path):
    (export_tiny(tmp_path / "bare", probabilistic) / "open_clip_model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        ImageTextModel(f"local-dir:{tmp_path / 'bare'}")


@pytest.mark.parametrize(
    "argument, value",
    [("name", None), ("pretrained", 5), ("bank", {"x"}), ("batch_size", "8"), ("batch_size", 1.5), ("batch_size", 0)],
)
def test_an_argument_of_another_kind(folders, argument, value):
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must be "):
        ImageTextModel(**{"name": f"local-dir:{folders / 'pcmepp'}", argument: value})


@pytest.mark.parametrize("name", ["no-such-model", "local-dir:/nowhere"])
def test_a_model_that_does_not_exist(name):
    with pytest.raises(ValueError):
        ImageTextModel(name)


# --- Where a bank is looked for ----------------------------------------------------------------------------


def test_a_bank_by_its_file_or_its_folder(folders, models, tmp_path):
    shutil.copy(folders / "plain-bank" / BANK_FILE, tmp_path / "other.safetensors")
    expected = models["plain-bank"].confusion(texts=TEXTS)
    by_file = ImageTextModel(f"local-dir:{folders / 'plain'}", bank=tmp_path / "other.safetensors")
    assert torch.equal(by_file.confusion(texts=TEXTS), expected) and by_file.calibration is None
    by_folder = ImageTextModel(f"local-dir:{folders / 'plain'}", bank=str(folders / "plain-bank"))
    assert torch.equal(by_folder.confusion(texts=TEXTS), expected)
    assert by_folder.calibration == models["plain-bank"].calibration is not None
    shutil.copy(folders / "plain-bank" / CALIBRATION_FILE, tmp_path)
    by_file = ImageTextModel(f"local-dir:{folders / 'plain'}", bank=tmp_path / "other.safetensors")
    assert by_file.calibration is not None


def test_another_bank_goes_before_the_one_beside_the_weights(folders, models, tmp_path):
    other = random_bank(models["plain-bank"].model, size=5, seed=1)
    save_bank(other, tmp_path / BANK_FILE, load_model(f"local-dir:{folders / 'plain-bank'}").bank_fingerprint)
    model = ImageTextModel(f"local-dir:{folders / 'plain-bank'}", bank=tmp_path)
    assert len(model.bank) == 5 and model.calibration is None  # the calibration was fitted to the other bank


def test_a_bank_that_is_refused(folders, tmp_path):
    other = export_model(make_model("PCMEpp-tiny", seed=1), tmp_path / "other", "PCMEpp-tiny")

    def refused(bank, words, name=f"local-dir:{other}"):
        with pytest.raises(ValueError, match=words) as error:
            ImageTextModel(name, bank=bank)
        assert "\n" not in str(error.value)

    refused(folders / "pcmepp-bank", "was made for a different model: run `pcmepp bank`")
    refused(tmp_path / "nowhere.safetensors", "is not a bank: No such file or directory")
    refused(folders / "pcmepp/open_clip_model.safetensors", "is not a bank")
    refused(tmp_path, "is not a bank")
    shutil.copytree(folders / "pcmepp-bank", tmp_path / "damaged")
    content = (folders / "pcmepp-bank" / BANK_FILE).read_bytes()
    (tmp_path / "damaged" / BANK_FILE).write_bytes(content[:-10])
    refused(None, "is not a bank", f"local-dir:{tmp_path / 'damaged'}")
    (tmp_path / "damaged" / BANK_FILE).write_bytes(content)
    (tmp_path / "damaged" / CALIBRATION_FILE).write_text("{}")
    refused(None, "is not a calibration", f"local-dir:{tmp_path / 'damaged'}")


CONFIGS = {  # which leave every tensor as it is
    "activation": {"model_cfg": {"quick_gelu": True}},
    "heads": {"model_cfg": {"vision_cfg": {"head_width": 16}}},
    "eps": {"model_cfg": {"text_cfg": {"norm_kwargs": {"eps": 0.1}}}},
    "mask": {"model_cfg": {"text_cfg": {"no_causal_mask": True}}},
    "pool": {"model_cfg": {"vision_cfg": {"pool_type": "avg"}}},
    "cleaning": {"model_cfg": {"text_cfg": {"tokenizer_kwargs": {"clean": "canonicalize"}}}},
    "preprocessing": {"preprocess_cfg": {"mean": [0.5, 0.5, 0.5]}},
}


def merged(config, changes):
    return {
        **config,
        **{key: merged(config[key], x) if isinstance(x, dict) and key in config else x for key, x in changes.items()},
    }


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=list(CONFIGS))
def test_a_bank_and_a_calibration_are_refused_with_another_config(folders, tmp_path, changes):
    for name in ("plain-bank", "pcmepp-variance"):
        folder = shutil.copytree(folders / name, tmp_path / name)
        path = folder / "open_clip_config.json"
        path.write_text(json.dumps(merged(json.loads(path.read_text()), changes)))
        with pytest.raises(ValueError, match="was made for a different model"):
            ImageTextModel(f"local-dir:{folder}")
    (folder / BANK_FILE).unlink()
    with pytest.raises(ValueError, match="was fitted with another model: run `pcmepp calibrate` again"):
        ImageTextModel(f"local-dir:{folder}").match_probability(IMAGES, TEXTS)


def test_a_calibration_by_the_variance_is_refused_with_other_log_variances(folders, tmp_path):
    folder = shutil.copytree(folders / "pcmepp-variance", tmp_path / "model")
    weights = load_file(folder / "open_clip_model.safetensors")
    weights["visual.uncertainty_bias"] += 1
    save_file(weights, folder / "open_clip_model.safetensors", {"format": "pt"})
    model = ImageTextModel(f"local-dir:{folder}")
    assert len(model.bank) == 12  # which depends on the means alone
    with pytest.raises(ValueError, match="was fitted with another model: run `pcmepp calibrate` again"):
        model.match_probability(IMAGES, TEXTS)


def test_the_fingerprint_is_that_of_the_means(tmp_path):
    model = make_model("PCMEpp-tiny")
    tokenizer = open_clip.get_tokenizer("PCMEpp-tiny")
    name = bank_fingerprint(model, tokenizer)
    assert bank_fingerprint(plain_twin(model, "PCMEpp-tiny"), tokenizer) == name
    with torch.no_grad():
        model.visual.uncertainty_proj.add_(1)
        model.shift.add_(1)
    assert bank_fingerprint(model, tokenizer) == name
    for probabilistic in (True, False):
        folder = export_tiny(tmp_path / f"exported{probabilistic}", probabilistic)
        assert load_model(f"local-dir:{folder}").bank_fingerprint == name
    half = copy.deepcopy(model).half()
    in_half = bank_fingerprint(half, tokenizer)
    assert bank_fingerprint(half.float(), tokenizer) == in_half != name
    for key in ("visual.proj", "token_embedding.weight", "logit_scale"):
        changed = copy.deepcopy(model)
        changed.state_dict()[key].view(-1)[-1] += 1e-3
        assert bank_fingerprint(changed, tokenizer) != name, key


# --- The import --------------------------------------------------------------------------------------------


def test_the_class_is_imported_when_it_is_asked_for():
    code = "import sys, pcmepp_openclip as p; before = 'pcmepp_openclip.encode.encode' in sys.modules\n"
    code += "from pcmepp_openclip import ImageTextModel; print(before, ImageTextModel is p.ImageTextModel)"
    assert run_code(code).split() == ["False", "True"]
    assert "ImageTextModel" in pcmepp_openclip.__all__
    with pytest.raises(AttributeError, match="has no attribute 'ImageTextModels'"):
        pcmepp_openclip.ImageTextModels  # noqa: B018


def test_a_calibration_is_refused_with_another_bank(models):
    model = models["pcmepp-bank"]
    own = model.bank
    try:
        assert model.match_probability(IMAGES, TEXTS).shape == (5, 8)
        model.bank = Bank(own.images_BD[:-1], own.texts_BD[:-1], own.scale)
        with pytest.raises(ValueError, match="was fitted with another bank: run `pcmepp calibrate` again"):
            model.match_probability(IMAGES, TEXTS)
    finally:
        model.bank = own
