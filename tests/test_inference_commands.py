"""`pcmepp bank` and `pcmepp calibrate` on drawn shards: against the model's own embeddings, and mistakes."""

import io
import json
import math
import re
import shutil
import tarfile
from unittest import mock

import open_clip
import pytest
import torch
import torch.nn.functional as F
from drawn_shards import SCENES, write_shards
from eval_data import captions, png, write_retrieval, write_tar
from exported import add_bank, add_calibration, export_tiny
from PIL import Image

from pcmepp_openclip import ImageTextModel, cli
from pcmepp_openclip.ambiguity import Calibration, calibration
from pcmepp_openclip.ambiguity.store import BANK_FILE, CALIBRATION_FILE, load_bank, load_calibration

SIZE = 48


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Scenes with three captions each, and exported models."""
    folder = tmp_path_factory.mktemp("inference")
    write_retrieval(folder / "scenes", SCENES[:SIZE])
    for name, probabilistic in (("pcmepp", True), ("plain", False)):
        export_tiny(folder / name, probabilistic)
    return folder


@pytest.fixture
def run(place, capsys):
    def run(command, model, *more, data="scenes", code=0):
        flags = ["--model", f"local-dir:{model}", "--workers", "0", *map(str, more)]
        flags += [] if data is None else ["--data", str(place / data)]
        assert cli.main([command, *flags]) == code
        said = capsys.readouterr()
        if code:
            errors = [line for line in said.err.splitlines() if line.startswith(f"pcmepp {command}: ")]
            assert len(errors) == 1 and said.err.endswith(errors[0] + "\n") and "Traceback" not in said.err
        return said.err if code else said.out

    return run


def embeddings(folder):
    """Of all scenes and all captions in reading order, by open_clip alone."""
    name = f"local-dir:{folder}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    model.eval()
    pixels = torch.stack([preprocess(Image.open(io.BytesIO(png(scene)))) for scene in SCENES[:SIZE]])
    texts = [text for scene in SCENES[:SIZE] for text in captions(scene)]
    with torch.no_grad():
        image_ND = F.normalize(model.encode_image(pixels), dim=-1)
        text_MD = F.normalize(model.encode_text(open_clip.get_tokenizer(name)(texts)), dim=-1)
    return image_ND, text_MD, texts, math.exp(model.logit_scale.item())


def rows_of(drawn_BD, all_ND):
    """For each drawn embedding the one that it is, by the distance of fp16."""
    distance_BN = torch.cdist(drawn_BD, all_ND)
    assert distance_BN.min(dim=1).values.max() < 1e-3
    return distance_BN.argmin(dim=1).tolist()


# --- pcmepp bank -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pcmepp", "plain"])
def test_a_bank_is_pairs_drawn_without_replacement(place, run, tmp_path, kind):
    said = run("bank", place / kind, "--size", 20, "--out", tmp_path)
    bank = load_bank(tmp_path / BANK_FILE)
    image_ND, text_MD, _, scale = embeddings(place / kind)
    assert bank.images_BD.shape == (20, image_ND.shape[1]) and bank.scale == pytest.approx(scale)
    images, texts = rows_of(bank.images_BD, image_ND), rows_of(bank.texts_BD, text_MD)
    assert len(set(images)) == 20 and images != sorted(images)
    texts_of = [{captions(SCENES[i])[k] for k in range(3)} for i in images]
    all_captions = [text for scene in SCENES[:SIZE] for text in captions(scene)]
    assert all(all_captions[text] in known for text, known in zip(texts, texts_of, strict=True))
    assert len({text % 3 for text in texts}) == 3  # not always the first caption
    assert f"{tmp_path / BANK_FILE}: 20 pairs, 0.0 MB." in said


def test_the_seed_decides_and_every_image_is_there(place, run, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run("bank", place / "plain", "--size", SIZE, "--seed", seed, "--out", tmp_path / f"{name}.safetensors")
    a, b, c = (load_bank(tmp_path / f"{name}.safetensors") for name in "abc")
    assert torch.equal(a.images_BD, b.images_BD) and torch.equal(a.texts_BD, b.texts_BD)
    assert not torch.equal(a.images_BD, c.images_BD)
    assert sorted(rows_of(a.images_BD, embeddings(place / "plain")[0])) == list(range(SIZE))


def test_a_bank_beside_the_weights_is_found_and_its_report_is_true(place, run, tmp_path):
    folder = shutil.copytree(place / "plain", tmp_path / "model")
    said = run("bank", folder, "--size", 20, "--out", folder)
    model = ImageTextModel(f"local-dir:{folder}")
    lines = [line.split("  ") for line in said.splitlines() if line.startswith("  ")]
    numbers = [float(number) for *_, number, _ in lines]
    assert len(lines) == 5 and numbers == sorted(numbers, reverse=True) and "among how many of its 20 images" in said
    found = model.confusion(texts=[line[-1] for line in lines])
    torch.testing.assert_close(found, torch.tensor(numbers), rtol=0, atol=0.06)
    assert "calibration.json" not in said
    for estimator in ("bank", "variance"):
        add_calibration(folder, Calibration(estimator, 1, 1, 1, 0, 10, 0.1))
        said = run("bank", folder, "--size", 20, "--out", folder)
        assert "was made before this bank: run `pcmepp calibrate` again if it was fitted with a bank" in said


def test_shards_and_a_checkpoint_of_a_known_name(tmp_path, capsys):
    data = write_shards(tmp_path / "shards", 2, 8)
    torch.save(open_clip.create_model("PCMEpp-tiny").state_dict(), tmp_path / "model.pt")
    flags = ["--model", "PCMEpp-tiny", "--pretrained", str(tmp_path / "model.pt"), "--data", data, "--workers", "0"]
    assert cli.main(["bank", *flags, "--size", "16", "--out", str(tmp_path / "new" / "folder")]) == 0
    model = ImageTextModel("PCMEpp-tiny", str(tmp_path / "model.pt"), bank=tmp_path / "new" / "folder")
    assert len(model.bank) == 16


def test_mistakes_of_bank(place, run, tmp_path, capsys):
    out = ("--out", tmp_path / "x")
    assert "--size 49: there are only 48 images in --data; lower --size." in run(
        "bank", place / "plain", "--size", 49, *out, code=2
    )
    assert "--size must be at least 2, not 1" in run("bank", place / "plain", "--size", 1, *out, code=2)
    assert "--batch-size must be" in run("bank", place / "plain", "--batch-size", 0, *out, code=2)
    assert "--data: there is no file or folder" in run("bank", place / "plain", *out, data="nothing.tar", code=2)
    write_tar(place / "silent.tar", [{"png": png(SCENES[0])}, {"png": png(SCENES[1]), "txt": "a dog"}])
    assert "has no caption" in run("bank", place / "plain", *out, data="silent.tar", code=2)
    write_tar(place / "broken.tar", [{"png": b"no image", "txt": "a"}, {"png": png(SCENES[1]), "txt": "a dog"}])
    assert "cannot be read" in run("bank", place / "plain", "--size", 2, *out, data="broken.tar", code=2)
    (place / "empty.tar").unlink(missing_ok=True)
    tarfile.open(place / "empty.tar", "w").close()
    assert "there are no images" in run("bank", place / "plain", *out, data="empty.tar", code=2)
    assert "/nowhere" in run("bank", "/nowhere", "--size", 4, *out, code=2)
    random_weights = [
        "bank",
        "--model",
        "PCMEpp-tiny",
        "--data",
        str(place / "retrieval"),
        "--out",
        str(tmp_path / "x"),
    ]
    assert cli.main(random_weights) == 2 and "has random weights: give --pretrained" in capsys.readouterr().err
    (tmp_path / "a.file").write_text("x")
    assert "--out" in run("bank", place / "plain", "--size", 4, "--out", tmp_path / "a.file", code=2)
    assert not (tmp_path / "x" / BANK_FILE).exists()


# --- pcmepp calibrate --------------------------------------------------------------------------------------


def slow_hubness(mean_ND, references_BD, scale):
    return torch.stack(
        [
            torch.tensor([math.exp(scale * float(x @ r)) for r in references_BD.double()]).mean().log()
            for x in mean_ND.double()
        ]
    )


@pytest.mark.parametrize("kind", ["pcmepp", "plain"])
def test_a_calibration_by_the_bank(place, run, tmp_path, kind):
    folder = shutil.copytree(place / kind, tmp_path / "model")
    bank = add_bank(folder)
    said = run("calibrate", folder, "--out", folder)
    found = load_calibration(folder / CALIBRATION_FILE)
    assert load_calibration(folder) == found and len(found.source) == 64 + 1 + 64
    image_ND, text_MD, texts, scale = embeddings(folder)
    image_N, text_M = slow_hubness(image_ND, bank.texts_BD, scale), slow_hubness(text_MD, bank.images_BD, scale)
    image_of_text = torch.arange(len(texts)) // 3
    logit_NM = scale * image_ND @ text_MD.T
    expected = calibration.fit(logit_NM, image_N, text_M, image_of_text)
    assert found.estimator == "bank" and found.pairs == 3 * SIZE  # all images, so that only their order is random
    for name in ("scale", "image_weight", "text_weight", "shift"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.02, abs=0.02), name
        assert f"{getattr(found, name):.4f}" in said
    assert f"{found.error:.4f}  calibrated" in said and f"{3 * SIZE} captions with their images, by the bank" in said
    model = ImageTextModel(f"local-dir:{folder}")
    own = model.encode_images(torch.zeros(2, 3, 32, 32)), model.encode_texts(["a dog", "a cat"])
    assert model.match_probability(*own).shape == (2, 2)


def test_a_calibration_by_the_variance_and_a_draw_of_images(place, run, tmp_path):
    folder = shutil.copytree(place / "pcmepp", tmp_path / "model")
    add_bank(folder)
    run("calibrate", folder, "--estimator", "variance", "--out", tmp_path / "mine.json", "--size", 10)
    found = load_calibration(tmp_path / "mine.json")
    assert found.estimator == "variance" and found.pairs == 30
    before = (tmp_path / "mine.json").read_bytes()
    run("calibrate", folder, "--estimator", "variance", "--out", tmp_path / "mine.json", "--size", 10, "--seed", 1)
    assert (tmp_path / "mine.json").read_bytes() != before
    run("calibrate", place / "pcmepp", "--out", tmp_path / "without.json", "--size", 10)
    assert json.loads((tmp_path / "without.json").read_text()) == found.as_json()  # the default without a bank


def test_the_error_of_a_shift_against_a_search():
    draw = torch.Generator().manual_seed(0)
    image_of_text = torch.arange(24) // 2
    pair_NM = torch.arange(12)[:, None] == image_of_text
    logit_NM = 4 * torch.randn(12, 24, generator=draw) + 6 * pair_NM + 20
    even_N, even_M = torch.arange(12) % 2 == 0, image_of_text % 2 == 0

    def loss(shift):
        x, y = logit_NM[even_N][:, even_M].double() + shift, pair_NM[even_N][:, even_M]
        return (F.softplus(-x[y]).mean() + F.softplus(x[~y]).mean()).item()

    about = min(range(-400, 0), key=lambda k: loss(k / 10)) / 10
    best = min((about + k / 2000 for k in range(-400, 401)), key=loss)
    p = (logit_NM[~even_N][:, ~even_M].double() + best).sigmoid()
    expected = calibration.reliability(p, pair_NM[~even_N][:, ~even_M])[1]
    found = calibration.fit_shift(logit_NM, image_of_text)
    assert found.error == pytest.approx(expected, abs=1e-3) and expected > 0.02
    p = found.probability(
        logit_NM.double(), torch.zeros(12), torch.zeros(24)
    )  # the shift of all images, without offsets
    assert p[pair_NM].mean() + p[~pair_NM].mean() == pytest.approx(1, abs=1e-5) and found.pairs == 24


def test_a_calibration_that_does_not_transfer_is_the_shift_alone(place, run, tmp_path):
    folder = shutil.copytree(place / "pcmepp", tmp_path / "model")
    add_bank(folder)
    said = run("calibrate", folder, "--out", folder, "--other-data", place / "scenes")
    assert "the other data" in said
    numbers = [float(line.split()[0]) for line in said.splitlines() if re.match(r"    0\.\d{4}  ", line)]
    found = load_calibration(folder)
    assert len(numbers) == 4 and found.estimator == ("shift" if numbers[2] < numbers[3] else "bank")
    monkey = calibration.Calibration("bank", 5.0, 3.0, -3.0, 9.0, 10, 0.0)
    with mock.patch.object(calibration, "fit", return_value=monkey):
        said = run("calibrate", folder, "--out", folder, "--other-data", place / "scenes")
    found, model = load_calibration(folder), ImageTextModel(f"local-dir:{folder}")
    assert found.estimator == "shift" and "transfers better and is saved" in said
    images, texts = model.encode_images(torch.zeros(2, 3, 32, 32)), model.encode_texts(["a dog", "a cat"])
    expected = (model.scale * images.mean @ texts.mean.T + found.shift).sigmoid()
    torch.testing.assert_close(model.match_probability(images, texts), expected)


def test_pairs_of_the_bank_are_refused(place, run, tmp_path):
    folder = shutil.copytree(place / "plain", tmp_path / "model")
    run("bank", folder, "--size", SIZE, "--out", folder)
    words = run("calibrate", folder, "--out", folder, "--seed", 1, "--batch-size", 7, code=2)
    assert f"{SIZE} of its {SIZE} images are those of the bank" in words and not (folder / CALIBRATION_FILE).exists()
    held_out = [{"png": png(scene), "txt": captions(scene)[0]} for scene in (*SCENES[SIZE:60], SCENES[0])]
    write_tar(place / "held-out.tar", held_out)
    run("calibrate", folder, "--out", folder, data="held-out.tar")
    assert (folder / CALIBRATION_FILE).exists()


def test_a_model_that_does_not_exist(place, tmp_path, capsys):
    for command in ("bank", "calibrate", "eval"):
        for name, near in (("ViT-B-33", "ViT-B-32"), ("PCMEpp-ViT-B-33", "PCMEpp-ViT-B-32")):
            for pretrained in ([], ["--pretrained", "laion2b_s34b_b79k"]):
                flags = ["--model", name, *pretrained, "--out", str(tmp_path / "x")]
                flags += ["--retrieval" if command == "eval" else "--data", str(place / "scenes")]
                assert cli.main([command, *flags]) == 2
                error = capsys.readouterr().err
                assert f"no model '{name}'" in error and f"'{near}'" in error and error.count("\n") == 1
    with pytest.raises(ValueError, match=r"no model 'ViT-B-33'.*'ViT-B-32'"):
        ImageTextModel("ViT-B-33", "laion2b_s34b_b79k")


def test_mistakes_of_calibrate(place, run, tmp_path):
    out = ("--out", tmp_path / "x")
    banked = shutil.copytree(place / "pcmepp", tmp_path / "banked")
    add_bank(banked)
    words = run("calibrate", place / "plain", *out, code=2)
    assert "has no trained variances: make a bank by `pcmepp bank`, and give --bank FILE." in words
    words = run("calibrate", place / "pcmepp", "--estimator", "bank", *out, code=2)
    assert "has no bank beside its weights; give --bank FILE." in words
    words = run("calibrate", banked, "--estimator", "variance", "--bank", banked, *out, code=2)
    assert "--estimator variance needs no --bank" in words
    assert "--size must be at least 4" in run("calibrate", banked, "--size", 3, *out, code=2)
    other = export_tiny(tmp_path / "other")
    state = open_clip.create_model("PCMEpp-tiny").state_dict()
    from safetensors.torch import save_file

    save_file(state, other / "open_clip_model.safetensors")
    assert "was made for a different model" in run("calibrate", other, "--bank", banked, *out, code=2)
    (tmp_path / "damaged.safetensors").write_bytes((banked / BANK_FILE).read_bytes()[:1000])
    assert "is not a bank" in run("calibrate", banked, "--bank", tmp_path / "damaged.safetensors", *out, code=2)
    weights = banked / "open_clip_model.safetensors"
    assert "is not a bank" in run("calibrate", banked, "--bank", weights, *out, code=2)
    write_tar(place / "few.tar", [{"png": png(SCENES[i]), "txt": "a dog"} for i in range(3)])
    assert "needs at least four images" in run("calibrate", banked, *out, data="few.tar", code=2)
    assert not (tmp_path / "x" / CALIBRATION_FILE).exists()
