"""`pcmepp eval` with a bank of reference pairs and a calibration: any CLIP, wrong files, files beside the weights."""

import dataclasses
import json
import shutil

import open_clip
import pytest
import torch
import torch.nn.functional as F
from drawn_shards import SCENES as ALL_SCENES
from eval_data import CLASSES, TEMPLATES, captions, png, read_embeddings, true_matches, write_retrieval, write_zeroshot
from helpers import make_model, plain_config, plain_twin
from sklearn.metrics import roc_auc_score

from pcmepp_openclip import DISTANCES, Gaussian, cli
from pcmepp_openclip.ambiguity import Bank, BankEntailment, Calibration, HubnessCorrected
from pcmepp_openclip.ambiguity.store import (
    BANK_FILE,
    CALIBRATION_FILE,
    find_bank,
    load_bank,
    load_calibration,
    save_bank,
    save_calibration,
    source_of,
)
from pcmepp_openclip.distances import Entailment, by_name
from pcmepp_openclip.encode.load import load_model
from pcmepp_openclip.evaluation import coco, pairs, retrieval, uncertainty
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.models.export import export_model
from pcmepp_openclip.reports import report

SCENES = ALL_SCENES[:48]
FITTED = Calibration("bank", 0.9, 0.4, 0.6, -1.0, 50, 0.01)


@pytest.fixture
def no_report(monkeypatch):
    """The figures take longer than all the rest."""
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A probabilistic model and its plain twin, a bank of other pairs that fits both, a calibration and data."""
    folder = tmp_path_factory.mktemp("bank")
    write_retrieval(folder / "scenes", SCENES, matches=True)
    write_zeroshot(folder / "shapes")
    model = make_model("PCMEpp-tiny")
    (folder / "plain-tiny.json").write_text(json.dumps(plain_config("PCMEpp-tiny")))
    open_clip.add_model_config(folder / "plain-tiny.json")
    torch.save(model.state_dict(), folder / "PCMEpp-tiny.pt")
    torch.save(plain_twin(model, "PCMEpp-tiny").state_dict(), folder / "plain-tiny.pt")
    g = torch.Generator().manual_seed(0)
    images, texts = (F.normalize(torch.randn(60, model.embed_dim, generator=g), dim=-1) for _ in range(2))
    scale = model.logit_scale.exp().item()
    loaded = load_model("PCMEpp-tiny", str(folder / "PCMEpp-tiny.pt"))
    save_bank(Bank(images, F.normalize(images + texts, dim=-1), scale), folder / BANK_FILE, loaded.bank_fingerprint)
    source = source_of(loaded, find_bank(loaded, folder))
    save_calibration(dataclasses.replace(FITTED, source=source), folder / CALIBRATION_FILE)
    return folder


def arguments(place, out, *more, model="PCMEpp-tiny"):
    argv = ["--model", model, "--pretrained", place / f"{model}.pt", "--out", out, "--workers", "0", *more]
    return ["eval", *map(str, argv)]


def evaluate(place, out, *more, **kwargs):
    assert cli.main(arguments(place, out, *more, **kwargs)) == 0
    return json.loads((out / "results.json").read_text())


def embeddings(out, name, count):
    """What was encoded under that name, from the cache."""
    encoded = read_embeddings(next((out / "embeddings").glob(f"{name}-*/*.safetensors")))
    assert len(encoded.mean) == count
    return encoded


@pytest.fixture(scope="module", params=["PCMEpp-tiny", "plain-tiny"])
def found(request, place):
    """(model, folder, results) with everything on."""
    folders = "--retrieval", place / "scenes", "--zeroshot", place / "shapes", "--crops"
    files = "--bank", place / BANK_FILE, "--calibration", place / CALIBRATION_FILE
    out = place / f"out-{request.param}"
    return request.param, out, evaluate(place, out, *folders, *files, model=request.param)


def both_sides(out):
    texts = list(dict.fromkeys(text for scene in SCENES for text in captions(scene)))
    unique = embeddings(out, "scenes-captions", len(texts))
    rows = [texts.index(text) for scene in SCENES for text in captions(scene)]
    return embeddings(out, "scenes-images", 48), Gaussian(unique.mean[rows], unique.logvar[rows])


def test_retrieval_with_a_bank(place, found):
    name, out, results = found
    bank, got = load_bank(place / BANK_FILE), results["retrieval"]["scenes"]["metrics"]
    images, texts = both_sides(out)
    own, matches = [i for i in range(48) for _ in range(3)], true_matches(SCENES)
    distances = {"cosine": DISTANCES["cosine"], "bank": HubnessCorrected(bank), "bank_entailment": BankEntailment(bank)}
    if name == "PCMEpp-tiny":
        model = make_model(name)
        scales = model.match_scale.item(), model.logit_scale.exp().item()
        distances = {**by_name(), **distances, "entailment": Entailment.of_scales(*scales)}
    ranked = retrieval.rankings(images, texts, own, matches, distances)
    expected = as_dict(retrieval.retrieval_metrics(ranked))
    assert {key: got[key] for key in expected} == pytest.approx(expected)
    assert ("csd/image_to_text_R@1" in got) == (name == "PCMEpp-tiny")

    hits = {r.samples: r.hits for r in ranked if r.distance == "cosine"}
    for samples, of, query, gallery in (("images", "images", images, texts), ("captions", "texts", texts, images)):
        for label, hit in hits[samples].items():
            for score, among in (("bank", None), ("bank_gallery", gallery.mean)):
                confusion = torch.cat([bank.confusion(one[None], of, among) for one in query.mean])
                key = f"{samples}/{label}/{score}"
                if hit.min() == hit.max():  # nothing to tell apart
                    assert got[f"{key}/miss_AUROC"] is None
                    continue
                assert got[f"{key}/miss_AUROC"] == pytest.approx(roc_auc_score(hit, -confusion), abs=1e-3)
                correlation = uncertainty.bin_correlation(confusion, hit)
                assert got[f"{key}/bin_correlation"] == pytest.approx(correlation, abs=0.05)
                assert got[f"{key}/R2_10_levels"] == pytest.approx(got[f"{key}/bin_correlation"] ** 2)
                assert got[f"{key}/-SR2_5_levels_low"] <= got[f"{key}/-SR2_5_levels_high"]
                if label == "cosine_R@1":
                    assert f"{key}/conformal_level_list_size" in got

    confusion = bank.confusion(images.mean, "images")
    round_ = torch.tensor([scene[1] == "circle" for scene in SCENES])
    assert got["images/condition=round/bank/AUROC"] == pytest.approx(roc_auc_score(round_, confusion), abs=1e-3)
    cropped = bank.confusion(embeddings(out, "scenes-crops", 48).mean, "images")
    share = (cropped > confusion).double().mean().item()
    assert got["images/bank/cropped_has_bigger_uncertainty"] == pytest.approx(share)
    assert ("images/cropped_has_bigger_uncertainty" in got) == (name == "PCMEpp-tiny")

    texts_of = [text for scene in SCENES for text in captions(scene)]
    first = [texts_of.index(text) for text in dict.fromkeys(texts_of)]
    words, fits = ([f(i) for i in first] for f in (lambda i: len(texts_of[i].split()), lambda i: len(matches[i])))
    confusion = bank.confusion(texts.mean, "texts")[first]
    for key, a, b in (
        ("bank/spearman_matches", confusion, fits),
        ("bank/spearman_caption_length", confusion, words),
        ("caption_length/spearman_matches", -torch.tensor(words).double(), fits),
    ):
        assert got[f"captions/{key}"] == pytest.approx(uncertainty.spearman(a, torch.tensor(b)), abs=1e-3)
    bins = results["retrieval"]["scenes"]["bins"]
    assert sum(number for *_, number in bins["captions/cosine_R@1/bank"]) == 144


def test_zeroshot_with_a_bank(place, found):
    name, out, results = found
    bank, got = load_bank(place / BANK_FILE), results["zeroshot"]["shapes"]["metrics"]
    images = embeddings(out, "shapes-images", 64)
    prompts = embeddings(out, "shapes-prompts", len(CLASSES) * len(TEMPLATES)).mean
    classifier = F.normalize(prompts.unflatten(0, (len(CLASSES), len(TEMPLATES))).sum(dim=1), dim=-1)
    labels = torch.tensor([CLASSES.index(f"{scene[0]} {scene[1]}") for scene in ALL_SCENES[::2]])
    right = (images.mean @ classifier.T).argmax(dim=1) == labels
    for score, among in (("bank", None), ("bank_gallery", classifier)):
        expected = roc_auc_score(right, -bank.confusion(images.mean, "images", among))
        assert got[f"images/accuracy/{score}/miss_AUROC"] == pytest.approx(expected, abs=1e-3)
    cosine = (images.mean @ images.mean.T).fill_diagonal_(-1)
    same = labels[cosine.argmax(dim=1)] == labels
    expected = roc_auc_score(same, -bank.confusion(images.mean, "images"))
    assert got["images/neighbour_R@1/bank/R-AUROC"] == pytest.approx(expected, abs=1e-3)
    assert {"bank/all_prompts", "bank_entailment/all_prompts", "images/bank/cropped_has_bigger_uncertainty"} <= set(got)
    assert ("csd/all_prompts" in got) == (name == "PCMEpp-tiny")


def test_the_probability_of_a_pair(place, found):
    _, out, results = found
    bank, got = load_bank(place / BANK_FILE), results["retrieval"]["scenes"]
    images, texts = both_sides(out)
    own = [i for i in range(48) for _ in range(3)]
    calibration = load_calibration(place)
    expected = pairs.reliabilities(calibration, images, texts, own, bank.scale, bank)
    for score, (curve, error) in expected.items():
        assert got["metrics"][f"pairs/{score}/match_ECE"] == pytest.approx(error, abs=1e-6)
        assert [tuple(point) for point in got["pairs"][score]] == [pytest.approx(point) for point in curve]
    assert results["calibration"] == calibration.as_json() and results["bank"] == {"pairs": 60}


def test_the_report_shows_it(found):
    name, out, results = found
    page = (out / "index.html").read_text()
    for words in (
        "bank over the gallery",
        "scenes: probability of a pair",
        "the images and their confusion by the bank",
    ):
        assert words in page
    assert ("the images and their uncertainty" in page) == (name == "PCMEpp-tiny")
    assert "uncertain images by the bank" in page and (out / "retrieval-scenes-pairs.png").is_file()
    note = "has no log-variance branch: it is evaluated by its means and its bank alone."
    assert (note in " ".join(results["notes"])) == (name == "plain-tiny")


def test_vagueness_with_a_bank(place, tmp_path, no_report):
    chains = [["a thing", f"a {s[1]}", f"a {s[0]} {s[1]}", f"a {s[0]} {s[1]} at the {s[2]}"] for s in SCENES[:4]]
    lines = ["captions,image_url", *(f"{'=>'.join(chain)},http://x/{i}.jpg" for i, chain in enumerate(chains))]
    (tmp_path / "h.csv").write_text("\n".join(lines))
    rows = [{"caption": chain, "img_path": f"{i}.png"} for i, chain in enumerate(chains)]
    (tmp_path / "himo.json").write_text("\n".join(map(json.dumps, rows)))
    for i, scene in enumerate(SCENES[:4]):
        (tmp_path / f"{i}.png").write_bytes(png(scene))
    flags = "--hierarcaps", tmp_path / "h.csv", "--himo", tmp_path / "himo.json", "--himo-images", tmp_path
    bank = "--bank", place / BANK_FILE
    got = evaluate(place, tmp_path / "out", *flags, *bank, model="plain-tiny")["vagueness"]
    scores = {"captions/bank/kendall_tau", "captions/radius/kendall_tau", "captions/caption_length/kendall_tau"}
    assert set(got["hierarcaps"]["metrics"]) == scores
    assert set(got["himo"]["metrics"]) == scores | {"HiMo@K", "bank/HiMo@K", "bank_entailment/HiMo@K"}


def test_what_lies_beside_the_weights_is_used(place, tmp_path, no_report):
    model = make_model("PCMEpp-tiny")
    model.fresh_logvar = False
    export_model(model, tmp_path / "model", "PCMEpp-tiny")
    shutil.copy(place / BANK_FILE, tmp_path / "model")
    argv = ["eval", "--model", f"local-dir:{tmp_path / 'model'}", "--retrieval", place / "scenes", "--workers", "0"]
    with_calibration = []
    for i in range(2):
        assert cli.main([*map(str, argv), "--out", str(tmp_path / f"out{i}")]) == 0
        results = json.loads((tmp_path / f"out{i}/results.json").read_text())
        assert results["bank"]["pairs"] == 60 and "bank/image_to_text_R@1" in results["retrieval"]["scenes"]["metrics"]
        with_calibration.append("pairs/calibrated_bank/match_ECE" in results["retrieval"]["scenes"]["metrics"])
        shutil.copy(place / CALIBRATION_FILE, tmp_path / "model")
    assert with_calibration == [False, True]


def test_files_that_do_not_fit_are_one_sentence(place, tmp_path, capsys, no_report):
    save_bank(load_bank(place / BANK_FILE), tmp_path / "other.safetensors", 64 * "0")
    (tmp_path / "text.json").write_text("{}")
    shutil.copy(place / CALIBRATION_FILE, tmp_path / "bank.json")
    save_calibration(Calibration("variance", 1.0, 1.0, 1.0, 0.0, 9, 0.1), tmp_path / "variance.json")
    cases = [
        (("--bank", tmp_path / "other.safetensors"), "was made for a different model"),
        (("--bank", tmp_path / "none"), "none is not a bank: "),
        (("--bank", tmp_path / "text.json"), "text.json is not a bank: "),
        (("--calibration", tmp_path / "text.json"), "text.json is not a calibration: "),
        (
            ("--calibration", tmp_path / "bank.json"),
            "was fitted with a bank, and there is none: give it by --bank",
        ),
        (("--calibration", tmp_path / "variance.json"), "was fitted with variances, which the model does not have"),
        (("--calibration", tmp_path / "variance.json"), "variance.json was fitted with another model", "PCMEpp-tiny"),
    ]
    for flags, words, *model in cases:
        argv = arguments(
            place, tmp_path / "out", "--retrieval", place / "scenes", *flags, model=(*model, "plain-tiny")[0]
        )
        assert cli.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("pcmepp eval: ") and error.count("\n") == 1 and words in error


def test_coco_by_the_distances_of_a_bank(place):
    """Within folds, by the bank's own matrix."""
    g = torch.Generator().manual_seed(1)
    bank = load_bank(place / BANK_FILE)
    images, texts = (F.normalize(torch.randn(n, bank.images_BD.shape[1], generator=g), dim=-1) for n in (6, 12))
    images, texts = (Gaussian(x, torch.full_like(x, -torch.inf)) for x in (images, texts))
    own, distance = [i // 2 for i in range(12)], HubnessCorrected(bank)
    (_, _, rank), _ = coco.ranks_by_fold(images, texts, own, [list(range(12))], distance)
    nearest = distance.matrix(images, texts).argmin(dim=1)
    right = sum(own[int(j)] == i for i, j in enumerate(nearest))
    assert (rank < 1).double().mean().item() == pytest.approx(right / 6)
