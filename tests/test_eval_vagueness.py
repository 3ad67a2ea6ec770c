"""Chains of captions: Kendall's tau, HierarCaps' traversal and HiMo@K against scipy and loops; the files' layouts."""

import csv
import json
import math

import pytest
import torch
import torch.nn.functional as F
from drawn_shards import SCENES
from eval_data import png
from helpers import make_model
from scipy import stats
from slow import SLOW

from pcmepp_openclip import Gaussian, cli
from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.evaluation import datasets, vagueness
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.reports import report


def chain(scene):
    colour, shape, place = scene
    return ["a thing", f"a {shape}", f"a {colour} {shape}", f"a {colour} {shape} at the {place}"]


def case(n=12, images=8, seed=0):
    """Chains of four, some of them of one image and with the same first caption; Gaussians that depend on the text."""
    g = torch.Generator().manual_seed(seed)
    chains = [[f"thing {i % 3}", *(f"caption {i} {depth}" for depth in range(1, 4))] for i in range(n)]
    unique = list(dict.fromkeys(text for each in chains for text in each))
    mean, logvar = (
        F.normalize(torch.randn(len(unique), 6, generator=g), dim=-1),
        torch.randn(len(unique), 6, generator=g),
    )
    rows = [unique.index(text) for each in chains for text in each]
    pictures = Gaussian(F.normalize(torch.randn(images, 6, generator=g), dim=-1), torch.randn(images, 6, generator=g))
    root = F.normalize(torch.randn(6, generator=g), dim=0)
    return chains, Gaussian(mean[rows], logvar[rows]), pictures, [i % images for i in range(n)], root


def test_kendall_tau_against_scipy():
    chains, texts, _, _, root = case()
    got = as_dict(vagueness.order(chains, vagueness.specificities(chains, texts, root)))
    uncertainty, radius = texts.logvar.exp().sum(dim=1), (texts.mean - root).norm(dim=1)
    for key, values in (("captions/kendall_tau", -uncertainty), ("captions/radius/kendall_tau", radius)):
        expected = [stats.kendalltau(values[4 * i : 4 * i + 4].tolist(), [1, 2, 3, 4]).statistic for i in range(12)]
        assert got[key] == pytest.approx(sum(expected) / 12)
    assert got["captions/caption_length/kendall_tau"] == 0.5  # 3 of 6 pairs are in order, the others are equal
    plain = vagueness.specificities(chains, texts, root, probabilistic=False)
    assert list(plain) == ["radius", "caption_length"]


def test_kendall_tau_of_a_bank_against_scipy():
    chains, texts, images, image_of_chain, root = case()
    bank = Bank(images.mean, F.normalize(images.mean + 0.3 * texts.mean[: len(images.mean)], dim=-1), 7.0)
    specificity = vagueness.specificities(chains, texts, root, probabilistic=False, bank=bank)
    assert list(specificity) == ["bank", "radius", "caption_length"]
    values = [-float(bank.confusion(text[None], "texts")) for text in texts.mean]
    expected = [stats.kendalltau(values[4 * i : 4 * i + 4], [1, 2, 3, 4]).statistic for i in range(12)]
    assert as_dict(vagueness.order(chains, specificity))["captions/bank/kendall_tau"] == pytest.approx(
        sum(expected) / 12
    )
    got = as_dict(vagueness.traversal(chains, texts, images, image_of_chain, specificity))
    found = got["captions/bank/traversal_precision"], got["captions/bank/traversal_recall"]
    assert found == pytest.approx(slow_traversal(chains, texts, images, image_of_chain, specificity["bank"]))
    assert len(got) == 4


def test_kendall_tau_of_ties_and_of_the_ends():
    assert vagueness.kendall_tau(torch.tensor([1.0, 2, 3, 4])) == 1
    assert vagueness.kendall_tau(torch.tensor([4.0, 3, 2, 1])) == -1
    assert vagueness.kendall_tau(torch.ones(4)) == 0
    assert vagueness.kendall_tau(torch.tensor([1.0, 1, 2, 3])) == pytest.approx(5 / 6)
    assert math.isnan(vagueness.kendall_tau(torch.ones(1)))


def slow_traversal(chains, texts, images, image_of_chain, radius, steps=50):
    """As HierarCaps' code does it, a bound and an image at a time."""
    captions = [text for each in chains for text in each]
    radii = radius.tolist()
    low, high = min(radii), max(radii)
    precision, recall = [], []
    for image in range(len(images.mean)):
        found = []
        for step in range(steps):
            bound = low + (high - low) * step / (steps - 1) if step < steps - 1 else high
            inside = [i for i in range(len(captions)) if radii[i] <= bound]
            best = max(inside, key=lambda i: float(images.mean[image] @ texts.mean[i]))
            found.append(captions[best])
        own = [each for each, place in zip(chains, image_of_chain, strict=True) if place == image]
        right = {text for each in own for text in each}
        precision.append(len(set(found) & right) / len(set(found)))
        recall.append(sum(any(each[depth] in found for each in own) for depth in range(4)) / 4)
    return sum(precision) / len(precision), sum(recall) / len(recall)


@pytest.mark.parametrize("seed", range(3))
def test_the_traversal_against_a_loop(seed):
    chains, texts, images, image_of_chain, root = case(seed=seed)
    specificity = vagueness.specificities(chains, texts, root)
    got = as_dict(vagueness.traversal(chains, texts, images, image_of_chain, specificity))
    for score, prefix in (("", "captions/"), ("radius", "captions/radius/")):
        expected = slow_traversal(chains, texts, images, image_of_chain, specificity[score])
        found = got[f"{prefix}traversal_precision"], got[f"{prefix}traversal_recall"]
        assert found == pytest.approx(expected)
    assert len(got) == 4 and 0 < got["captions/radius/traversal_recall"] < 1


def test_equal_uncertainties_find_the_best_caption_alone():
    chains, texts, images, _, root = case()
    equal = Gaussian(texts.mean, torch.zeros_like(texts.logvar))
    specificity = vagueness.specificities(chains, equal, root)
    found = vagueness.found_captions(images.mean @ texts.mean.T, specificity[""])
    best = (images.mean @ texts.mean.T).amax(dim=1, keepdim=True)
    assert torch.equal((images.mean @ texts.mean.T).gather(1, found), best.expand(-1, 50))
    got = as_dict(vagueness.order(chains, specificity))
    assert got["captions/kendall_tau"] == 0


def test_himo_against_a_loop():
    chains, texts, images, image_of_chain, _ = case()
    chains[0], kept = chains[0][:1], [0, *range(4, 48)]  # one caption has no correlation: 0
    chains[1] = chains[1][:3]
    kept.remove(7)
    texts = Gaussian(texts.mean[kept], texts.logvar[kept])
    got = as_dict(vagueness.himo(chains, texts, images, image_of_chain, ["cosine", "csd"]))
    for name, key in (("cosine", "HiMo@K"), ("csd", "csd/HiMo@K")):
        start, found = 0, []
        for each, image in zip(chains, image_of_chain, strict=True):
            rows, one = slice(start, start + len(each)), slice(image, image + 1)
            start += len(each)
            if name == "cosine":
                closeness = (texts.mean[rows] @ images.mean[image]).tolist()
            else:
                both = images.mean[one], texts.mean[rows], images.logvar[one], texts.logvar[rows]
                closeness = (-SLOW["csd"](*both))[0].tolist()
            found.append(stats.pearsonr(range(len(each)), closeness).statistic if len(each) > 1 else 0.0)
        assert got[key] == pytest.approx(sum(found) / len(found), abs=1e-5)


@pytest.fixture
def files(tmp_path):
    """Stand-ins in the published layouts: two chains are of one image."""
    folder = tmp_path / "coco/val2014"
    folder.mkdir(parents=True)
    names = [f"COCO_val2014_{i:012d}.jpg" for i in (7, 9, 7)]
    for name, scene in zip(names[:2], SCENES[:2], strict=True):
        (folder / name).write_bytes(png(scene))
    with open(tmp_path / "hierarcaps_test.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "captions", "image_url"])
        for i, (name, scene) in enumerate(zip(names, SCENES[:3], strict=True)):
            url = f"http://images.cocodataset.org/val2014/{name}"
            writer.writerow([i, " => ".join(chain(scene)).replace("a thing", "a thing, somewhere"), url])
    lines = [{"img_path": f"x/{name}", "caption": chain(SCENES[i])[1:]} for i, name in enumerate(names)]
    (tmp_path / "himo.json").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def test_the_published_layouts(files):
    data = datasets.read_hierarcaps(str(files / "hierarcaps_test.csv"), None)
    assert data.images == [] and data.image_of_chain == [0, 1, 0]
    assert data.chains[0] == ["a thing, somewhere", *chain(SCENES[0])[1:]]
    for where in ("coco", "coco/val2014"):
        data = datasets.read_hierarcaps(str(files / "hierarcaps_test.csv"), str(files / where))
        assert [image.read() for image in data.images] == [png(scene) for scene in SCENES[:2]]
    data = datasets.read_himo(str(files / "himo.json"), str(files / "coco/val2014"))
    assert data.chains == [chain(scene)[1:] for scene in SCENES[:3]] and len(data.images) == 2


def test_the_command(files, monkeypatch, capsys):
    torch.save(make_model("PCMEpp-tiny").state_dict(), files / "model.pt")
    argv = [
        "--model",
        "PCMEpp-tiny",
        "--pretrained",
        str(files / "model.pt"),
        "--workers",
        "0",
        "--out",
        str(files / "o"),
    ]
    flags = ["--hierarcaps", str(files / "hierarcaps_test.csv"), "--himo", str(files / "himo.json")]
    flags += ["--hierarcaps-images", str(files / "coco"), "--himo-images", str(files / "coco/val2014")]
    assert cli.main(["eval", *argv, *flags]) == 0
    got = json.loads((files / "o/results.json").read_text())["vagueness"]
    assert (got["hierarcaps"]["chains"], got["hierarcaps"]["images"]) == (3, 2)
    assert got["hierarcaps"]["metrics"]["captions/caption_length/kendall_tau"] == 0.5  # of 3, 2, 3 and 6 words
    assert 0 <= got["hierarcaps"]["metrics"]["captions/traversal_recall"] <= 1
    assert set(got["himo"]["metrics"]) >= {"HiMo@K", "csd/HiMo@K", "wasserstein/HiMo@K", "captions/kendall_tau"}
    page = (files / "o/index.html").read_text()
    assert "Vagueness: hierarcaps" in page and "Vagueness: himo" in page
    assert "Vagueness: hierarcaps" in capsys.readouterr().out
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")
    assert cli.main(["eval", *argv, *flags[:4]]) == 0  # texts alone
    alone = json.loads((files / "o/results.json").read_text())["vagueness"]
    expected = {key: value for key, value in got["hierarcaps"]["metrics"].items() if "kendall" in key}
    assert alone["hierarcaps"] == {"images": 0, "chains": 3, "metrics": expected}


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("hierarcaps", "id,captions,image_url\n0,a => b => c,x/y_1.jpg\n", "has not 4 captions with => between"),
        ("hierarcaps", "id,captions,image_url\n0,a => => c => d,x/y_1.jpg\n", "a caption is empty"),
        ("hierarcaps", "id,texts\n0,a\n", "it is not HierarCaps' hierarcaps_test.csv (KeyError: 'captions')"),
        ("hierarcaps", "id,captions,image_url\n", "there are no captions in it"),
        ("hierarcaps", "id,captions,image_url\n0\n", "it is not HierarCaps'"),
        ("himo", '{"img_path": "a.jpg", "caption": "a"}', "a caption is not a list of texts"),
        ("himo", '{"img_path": "a.jpg"}', "it is not HiMo-CLIP's himo_docci_data.json (KeyError: 'caption')"),
        ("himo", "[1, 2", "it is not HiMo-CLIP's"),
        ("himo", "[" * 100_000, "it is not HiMo-CLIP's"),
        ("himo", '{"img_path": "a.jpg", "caption": []}', "a caption is empty"),
        ("himo", "", "there are no captions in it"),
    ],
)
def test_mistakes_in_one_sentence(tmp_path, name, text, words):
    (tmp_path / "file").write_text(text)
    read = {"hierarcaps": datasets.read_hierarcaps, "himo": datasets.read_himo}[name]
    with pytest.raises(ValueError, match=f"^--{name} ") as error:
        read(str(tmp_path / "file"), None)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_missing_files_and_images(files, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"^--himo .*nowhere cannot be read"):
        datasets.read_himo(str(tmp_path / "nowhere"), None)
    with pytest.raises(ValueError, match=r"^--hierarcaps-images .*: COCO_val2014_000000000007.jpg is not in it\.$"):
        datasets.read_hierarcaps(str(files / "hierarcaps_test.csv"), str(tmp_path / "nowhere"))
    for flag in ("hierarcaps", "himo", "coco"):
        flags = ["--model", "x", "--out", str(tmp_path / "o"), "--retrieval", "x", f"--{flag}-images", "x"]
        assert cli.main(["eval", *flags]) == 2
        assert f"--{flag}-images needs --{flag}" in capsys.readouterr().err
