"""Noisy correspondence: scores of pairs against loops and scikit-learn, the same noise as in training, the command."""

import csv
import gzip
import io
import json
import math

import open_clip
import pytest
import torch
import torch.nn.functional as F
from drawn_shards import SCENES, caption
from eval_data import png
from helpers import make_model, slow_csd
from PIL import Image
from shard_maker import arguments, load, read_back, write_tar
from sklearn.metrics import roc_auc_score

from pcmepp_openclip import DISTANCES, Gaussian, cli
from pcmepp_openclip.data.noise import exchange
from pcmepp_openclip.encode.load import LoadedModel, other_noise
from pcmepp_openclip.evaluation import correspondence
from pcmepp_openclip.evaluation.columns import EvaluatedModel
from pcmepp_openclip.evaluation.datasets import read_noisy_pairs
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.tasks import _matching
from pcmepp_openclip.reports import report

COUNT = 30


def pairs(n=37, noise=0.6, seed=0):
    """Images, and texts near their images, some of them exchanged."""
    g = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(n, 8, generator=g), dim=-1)
    text = F.normalize(image + noise * torch.randn(n, 8, generator=g) / 8**0.5, dim=-1)
    wrong = exchange(n, 0.3, seed)
    text = text[[wrong.get(i, i) for i in range(n)]]
    images, texts = (Gaussian(mean, torch.randn(n, 8, generator=g) - 3) for mean in (image, text))
    return images, texts, torch.tensor([i in wrong for i in range(n)])


@pytest.mark.parametrize("batch", [1, 10, 100])
@pytest.mark.parametrize("distance", ["csd", "wasserstein"])
def test_losses_of_pairs_against_loops(batch, distance):
    images, texts, _ = pairs()
    got = correspondence.in_batches(images, texts, 5.0, (DISTANCES[distance], 2.0, 1.5), batch)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    sizes = []
    for part in order.tensor_split(math.ceil(37 / batch)):
        sizes.append(len(part))
        for i in part.tolist():
            cosine = {(a, b): 5 * float(images.mean[a] @ texts.mean[b]) for a in part.tolist() for b in part.tolist()}
            over_texts = math.log(sum(math.exp(cosine[i, j]) for j in part.tolist())) - cosine[i, i]
            over_images = math.log(sum(math.exp(cosine[j, i]) for j in part.tolist())) - cosine[i, i]
            assert got["info_nce"][i].item() == pytest.approx((over_texts + over_images) / 2, abs=1e-5)
            losses = []
            for j in part.tolist():
                for a, b in {(i, j), (j, i)}:
                    one, other = (
                        Gaussian(x.mean[k : k + 1], x.logvar[k : k + 1]) for x, k in ((images, a), (texts, b))
                    )
                    d = slow_csd(one, other) if distance == "csd" else DISTANCES[distance].paired(one, other)
                    p = 1 / (1 + math.exp(2 * float(d) - 1.5))
                    losses.append(-math.log(p if a == b else 1 - p))
            assert len(losses) == 2 * len(part) - 1
            assert got["matching"][i].item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert max(sizes) <= batch and max(sizes) - min(sizes) <= 1


def test_auroc_against_scikit_learn():
    images, texts, wrong = pairs()
    scores = {"csd": DISTANCES["csd"].paired(images, texts), "length": torch.arange(37) % 4}
    got = as_dict(correspondence.correspondence(scores, wrong))
    for name, score in scores.items():
        expected = roc_auc_score(wrong.numpy(), score.numpy())
        assert got[f"pairs/{name}/wrong_pair_AUROC"] == pytest.approx(expected)
    assert got["pairs/csd/wrong_pair_AUROC"] > 0.9, "the captions of other images are far away"
    assert math.isnan(as_dict(correspondence.correspondence(scores, wrong & False))["pairs/csd/wrong_pair_AUROC"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Counted shards of drawn scenes, the second one with a sample that is not usable, and a model."""
    folder = tmp_path_factory.mktemp("noisy")
    samples = [{f"s{i:02d}.png": png(s), f"s{i:02d}.txt": caption(*s).encode()} for i, s in enumerate(SCENES[:COUNT])]
    write_tar(folder / "d/0.tar", samples[:12])
    write_tar(folder / "d/1.tar", [{"bad.txt": b"x"}, *samples[12:]])
    assert cli.main(["data", "count", f"{folder}/d/*.tar", "--workers", "1"]) == 0
    torch.save(make_model("PCMEpp-tiny").state_dict(), folder / "model.pt")
    return folder


def test_the_noise_is_that_of_training(place):
    """Pixels and captions of the pairs, as a loader of training delivers them."""
    name, data = read_noisy_pairs(f"{place}/d/*.tar", 0.4, 3)
    assert name == "d" and sum(data.wrong) == 12 and len(data.images) == COUNT
    flags = ("--noise-ratio", "0.4", "--noise-seed", "3")
    trained = load(arguments(f"{place}/d/*.tar", *flags, batch_size=1), mean_colour)
    seen = {tuple(images[0].flatten().tolist()): read_back(texts)[0] for images, texts in trained.dataloader}
    for image, text, wrong, scene in zip(data.images, data.captions, data.wrong, SCENES[:COUNT], strict=True):
        assert image.read() == png(scene) and wrong == (text != caption(*scene))
        assert seen[tuple(mean_colour(Image.open(io.BytesIO(image.read()))).flatten().tolist())] == text[:38]


def mean_colour(image) -> torch.Tensor:
    """Enough of an image to tell it from the others."""
    return torch.tensor(list(image.convert("RGB").resize((16, 16)).tobytes())).float().reshape(3, 16, 16)


def evaluate(place, out, *flags, model=("PCMEpp-tiny", "--pretrained")):
    argv = ["eval", "--model", model[0], *([model[1], str(place / "model.pt")] if len(model) > 1 else [])]
    argv += ["--workers", "0", "--out", str(out), *flags]
    return cli.main(argv)


def test_the_command(place, tmp_path, capsys):
    flags = ["--noisy-pairs", f"{place}/d/*.tar", "--noise-ratio", "0.4", "--noise-seed", "3"]
    assert evaluate(place, tmp_path, *flags) == 0
    got = json.loads((tmp_path / "results.json").read_text())["correspondence"]["d"]
    assert (got["images"], got["wrong_pairs"]) == (COUNT, 12)
    names = {"csd", "cosine", "uncertainty", "info_nce", "matching", "caption_length"}
    assert set(got["metrics"]) >= {f"pairs/{name}/wrong_pair_AUROC" for name in names}
    _, data = read_noisy_pairs(f"{place}/d/*.tar", 0.4, 3)
    words = [len(text.split()) for text in data.captions]
    assert got["metrics"]["pairs/caption_length/wrong_pair_AUROC"] == pytest.approx(roc_auc_score(data.wrong, words))
    assert all(0 <= value <= 1 for value in got["metrics"].values())
    with open(tmp_path / "metrics.csv") as file:
        rows = {(row["task"], row["score"]) for row in csv.DictReader(file)}
    assert ("correspondence", "uncertainty") in rows
    page, printed = (tmp_path / "index.html").read_text(), capsys.readouterr().out
    assert "Noisy correspondence: d" in page and "30 pairs, 12 of them wrong" in page
    assert "Noisy correspondence: d" in printed and "wrong_pair_AUROC" in printed


@pytest.mark.parametrize(
    "recorded, ratio, seed, said",
    [
        ({"noise_ratio": 0.4, "noise_seed": 3}, 0.4, 3, None),
        ({"noise_ratio": 0.4}, 0.4, 0, None),  # 0 is the default of the seed, which a run does not record
        (
            {"noise_ratio": 0.2, "noise_seed": 3},
            0.4,
            3,
            "trained with --noise-ratio 0.2 --noise-seed 3, not with --noise",
        ),
        (
            {"noise_ratio": 0.4, "noise_seed": 2},
            0.4,
            3,
            "--noise-seed 2, not with --noise-ratio 0.4 --noise-seed 3: the",
        ),
        (
            {"noise_ratio": 0.4, "noise_seed": 2},
            0.4,
            0,
            "--noise-seed 2, not with --noise-ratio 0.4 --noise-seed 0: the",
        ),
        ({"lr": 0.1}, 0.4, 0, "was trained with no --noise-ratio, not with --noise-ratio 0.4"),
        ({"noise_ratio": "much", "noise_seed": [1]}, 0.4, 0, "was trained with no --noise-ratio"),
        (None, 0.4, 0, None),  # weights alone
    ],
)
def test_other_noise_than_in_training_is_noted(tmp_path, recorded, ratio, seed, said):
    torch.save({"about": {"hyperparameters": recorded}} if recorded else {}, tmp_path / "epoch_1.pt")
    found = other_noise(str(tmp_path / "epoch_1.pt"), ratio, seed)
    assert found is None if said is None else said in found
    assert other_noise(None, ratio, seed) is None


def test_the_note_is_in_the_results(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")
    weights = torch.load(place / "model.pt", weights_only=True)
    about = {"hyperparameters": {"noise_ratio": 0.4, "noise_seed": 1}}
    torch.save({"state_dict": weights, "epoch": 1, "name": "run", "about": about}, tmp_path / "model.pt")
    flags = ["--noisy-pairs", f"{place}/d/*.tar", "--noise-ratio", "0.4"]
    for seed, notes in (("0", 1), ("1", 0)):
        assert evaluate(tmp_path, tmp_path / seed, *flags, "--noise-seed", seed) == 0
        assert len(json.loads((tmp_path / seed / "results.json").read_text())["notes"]) == notes
        assert capsys.readouterr().err.count("note: The checkpoint was trained with --noise-ratio 0.4") == notes


@pytest.mark.parametrize(
    "weights, expected",
    [
        ({}, ("csd", True)),
        ({"match_weight": 0.0}, ("cosine", False)),
        ({"match_weight": 0.0, "pcme_weight": 1.0}, ("match_probability", False)),
    ],
)
def test_the_matching_logit_is_that_of_the_training(weights, expected, tmp_path):
    """The match probability of PCME has a and b inside, and InfoNCE trains neither of them."""
    cfg = {"head_layers": 1, "init_logvar_bias": -5.0, "init_match_scale": 3.0, **weights}
    model = open_clip.create_model("PCMEpp-tiny", pcmepp_cfg=cfg)
    encoder = EvaluatedModel(LoadedModel("PCMEpp-tiny", None, model, None, None, True, "cpu"), tmp_path)
    kind, scaled = expected
    matching = _matching(encoder)
    assert encoder.distance == kind
    if kind == "cosine":
        assert matching is None
    else:
        assert type(matching[0]) is type(encoder.distances[kind]) and matching[1:] == (
            (3.0, 1.0) if scaled else (1.0, 0.0)
        )


def test_a_plain_model_has_no_uncertainty(place, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")
    flags = ["--noisy-pairs", f"{place}/d/*.tar", "--noise-ratio", "0.4"]
    assert evaluate(place, tmp_path, *flags, model=("PCMEpp-tiny",)) == 0  # its branch is untrained
    got = json.loads((tmp_path / "results.json").read_text())["correspondence"]["d"]["metrics"]
    assert set(got) == {f"pairs/{name}/wrong_pair_AUROC" for name in ("cosine", "info_nce", "caption_length")}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--noisy-pairs", "{}/d/*.tar"], "--noisy-pairs needs --noise-ratio"),
        (["--noise-ratio", "0.2", "--coco", "x", "--coco-images", "y"], "needs --noisy-pairs"),
        (["--noise-seed", "1", "--coco", "x", "--coco-images", "y"], "needs --noisy-pairs"),
        (["--noisy-pairs", "{}/d/*.tar", "--noise-ratio", "0"], "--noise-ratio 0 leaves all captions of --noisy-pairs"),
        (["--noisy-pairs", "{}/x/*.tar", "--noise-ratio", "0.2"], "--noisy-pairs: no shard matches"),
        (["--noisy-pairs", "{}/packed/0.tar", "--noise-ratio", "1"], "0.tar is compressed: unpack it first"),
        (
            ["--noisy-pairs", "{}/new/0.tar", "--noise-ratio", "0.2"],
            "--noisy-pairs needs counts, which source 'new' lacks",
        ),
        (["--noisy-pairs", "https://127.0.0.1/0.tar", "--noise-ratio", "0.2"], "copy source 'source1' to a local disk"),
    ],
)
def test_mistakes(place, tmp_path, flags, message, capsys):
    for name in ("packed", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.tar").write_bytes(gzip.compress((place / "d/0.tar").read_bytes()))
    (tmp_path / "packed/sizes.json").write_text('{"0.tar": 12}')
    (tmp_path / "d").symlink_to(place / "d")
    assert evaluate(place, tmp_path / "o", *(flag.format(tmp_path) for flag in flags)) != 0
    assert message in capsys.readouterr().err
