"""The bank and the calibration of pairs against loops over queries and references, in fp64."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pcmepp_openclip import DISTANCES, Gaussian
from pcmepp_openclip.ambiguity import Bank, BankEntailment, Calibration, HubnessCorrected, bank, calibration, store

SCALE = 12.0


def embeddings(samples, seed, dims=8):
    return F.normalize(torch.randn(samples, dims, generator=torch.Generator().manual_seed(seed)), dim=-1)


def paired(samples=40, seed=0, noise=0.4, dims=8):
    images = embeddings(samples, seed, dims)
    return images, F.normalize(images + noise * embeddings(samples, seed + 100, dims), dim=-1)


def slow_entropy(query, references, others, order, own_pairs):
    """Of one query: softmax over references of s cos - hubness, one exponential at a time."""
    logits = []
    for j, reference in enumerate(references):
        terms = [
            math.exp(SCALE * float(reference @ other)) for i, other in enumerate(others) if not (own_pairs and i == j)
        ]
        logits.append(SCALE * float(query @ reference) - math.log(sum(terms) / len(terms)))
    weights = [math.exp(x) for x in logits]
    p = [w / sum(weights) for w in weights]
    if order == 1:
        return -sum(x * math.log(x) for x in p)
    return math.log(sum(x**order for x in p)) / (1 - order)


@pytest.mark.parametrize("of", ["images", "texts"])
@pytest.mark.parametrize("order", [0.5, 1, 2])
@pytest.mark.parametrize("chunk", [None, 100])
def test_confusion_against_loops(of, order, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(bank, "CHUNK", chunk)
    images, texts = paired()
    found = Bank(images, texts, SCALE)
    own, other = (images, texts) if of == "images" else (texts, images)
    query = embeddings(9, 5)
    expected = [slow_entropy(q, other.double(), own.double(), order, True) for q in query.double()]
    got = found.confusion(query, of, order=order)
    torch.testing.assert_close(got, torch.tensor(expected).exp(), rtol=1e-3, atol=1e-4)
    assert torch.equal(found.confusion(query, of), got) == (order == 2)
    gallery = embeddings(17, 6)
    expected = [slow_entropy(q, gallery.double(), own.double(), order, False) for q in query.double()]
    got = found.confusion(query, of, gallery, order)
    torch.testing.assert_close(got, torch.tensor(expected).exp(), rtol=1e-3, atol=1e-4)


def slow_crowding(query, of, captions):
    nearest = sorted(captions, key=lambda caption: -float(query @ caption))[:3]
    if of == "texts":
        return sum(float(query @ caption) for caption in nearest) / len(nearest)
    return float((sum(nearest) / len(nearest)).norm())


@pytest.mark.parametrize("of", ["images", "texts"])
@pytest.mark.parametrize("items", [None, 33])
@pytest.mark.parametrize("chunk", [None, 100])
def test_multiplicity_against_loops(of, items, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(bank, "CHUNK", chunk)
    images, texts = (x.double() for x in paired())
    own, other = (images, texts) if of == "images" else (texts, images)
    query, gallery = embeddings(9, 5).double(), other if items is None else embeddings(items, 6).double()
    captions = texts if of == "texts" else gallery
    cosines = images @ texts.T
    shift = -100.0  # by steps, until the mean probabilities of pairs and of other pairs add up to 1
    for step in (10.0, 1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6):
        while True:
            p = 1 / (1 + (-(SCALE * cosines + shift + step)).exp())
            pairs = float(p.diagonal().mean())
            if pairs + float((p.sum() - p.diagonal().sum()) / (40 * 39)) > 1:
                break
            shift += step
    x, y = [], []
    for i, reference in enumerate(own):
        leave = [j for j in range(len(gallery)) if items is not None or j != i]
        odds = [math.exp(SCALE * float(reference @ gallery[j]) + shift) * 0.01 / 0.99 for j in leave]
        y.append(math.log(sum(odd / (1 + odd) for odd in odds)))
        others = [c for j, c in enumerate(captions) if j != i or (of == "images" and items is not None)]
        x.append(slow_crowding(reference, of, others))
    crowding = [slow_crowding(q, of, captions) for q in query]
    expected = [math.exp(np.mean(y) + np.std(y) * (z - np.mean(x)) / np.std(x)) for z in crowding]
    expected = [min(len(gallery), number) for number in expected]
    found = Bank(images.float(), texts.float(), SCALE)
    got = found.multiplicity(query.float(), of, None if items is None else gallery.float(), prior=0.01)
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.double), rtol=1e-3, atol=1e-4)
    fewer = found.multiplicity(query.float(), of, None if items is None else gallery.float(), prior=1e-4)
    assert (fewer < got).all()


def test_multiplicity_of_one_item_and_of_equal_captions():
    images, texts = paired()
    alone = Bank(images, texts, SCALE).multiplicity(texts, "texts", images[:1])
    assert alone.isfinite().all() and (alone <= 1).all()
    equal = Bank(images, texts[:1].expand_as(texts), 1e4).multiplicity(images, "images")
    assert equal.isfinite().all()


def test_the_crowding_takes_half_a_percent_of_the_captions():
    captions, query = embeddings(1400, 0), embeddings(5, 1)
    cosine = query.double() @ captions.double().T
    nearest = cosine.sort(dim=1, descending=True)
    expected = nearest.values[:, :7].mean(dim=1), captions.double()[nearest.indices[:, :7]].mean(dim=1).norm(dim=1)
    for of, values in zip(("texts", "images"), expected, strict=True):
        torch.testing.assert_close(bank._crowding(query, of, captions).double(), values, rtol=1e-5, atol=1e-6)


def test_what_is_often_described_fits_more():
    """Captions of a kind that 900 of 1,000 pairs belong to, and of one with 100."""
    kinds = torch.eye(8)[[0] * 900 + [1] * 100]
    images, texts = (F.normalize(kinds + 0.8 * embeddings(1000, seed), dim=1) for seed in (1, 2))
    found = Bank(images, texts, SCALE)
    for of in ("images", "texts"):
        many, few = found.multiplicity(torch.eye(8)[:2], of).tolist()
        assert many > 1.3 * few


def test_crowded_captions_fit_more_where_their_matches_have_small_cosines():
    """Vague captions are alike and far from all images, as those of a model that is trained to the end."""
    vague, images = F.normalize(torch.ones(1, 32), dim=1).expand(300, 32), torch.eye(32).repeat(19, 1)[:600]
    texts = F.normalize(torch.cat([vague, images[300:]]) + 0.3 * embeddings(600, 2, 32), dim=1)
    found = Bank(images, texts, SCALE)
    assert (found.hubness(texts[300:], "texts").mean() > found.hubness(texts[:300], "texts").mean()).all()
    many, few = found.multiplicity(torch.stack([vague[0], torch.eye(32)[0]]), "texts").tolist()
    assert many > few


def test_the_confusion_is_the_number_of_references_that_fit():
    """Eight orthogonal kinds of images and a caption of each kind, and captions that fit two and four kinds alike."""
    kinds = torch.eye(8)
    found = Bank(kinds.repeat(25, 1), kinds.repeat(25, 1), 60.0)
    captions = torch.stack([kinds[0], F.normalize(kinds[:2].sum(0), dim=0), F.normalize(kinds[:4].sum(0), dim=0)])
    torch.testing.assert_close(found.confusion(captions, "texts"), torch.tensor([25.0, 50.0, 100.0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_autocast(dtype):
    found, query = Bank(*paired(), SCALE), embeddings(5, 3).to(dtype)
    questions = [found.confusion, found.multiplicity, found.hubness]
    expected = [question(query.float(), "texts") for question in questions]
    with torch.autocast("cpu", torch.bfloat16):
        got = [question(query, "texts") for question in questions]
        got += [question(query, "texts", query) for question in questions[:2]]
    assert all(x.dtype == torch.float32 for x in got)
    torch.testing.assert_close(got[:3], expected)
    assert all(question(query[:0], "images").shape == (0,) for question in questions)


def test_the_distances_of_a_bank_against_loops():
    found = Bank(*paired(), SCALE)
    images, texts = (Gaussian(x, torch.full_like(x, -torch.inf)) for x in (embeddings(6, 7), embeddings(11, 8)))
    for by_bank in (HubnessCorrected(found, weight=0.7), BankEntailment(found)):
        for distance, query, gallery in ((by_bank, images, texts), (by_bank.transposed, texts, images)):
            matrix = distance.matrix(query, gallery)
            for i in range(len(query.mean)):
                for j in range(len(gallery.mean)):
                    expected = 1 - float(query.mean[i] @ gallery.mean[j])
                    of = ("texts", "images")[query is texts]
                    if distance is by_bank or isinstance(by_bank, HubnessCorrected):
                        item, kind = gallery.mean[j : j + 1], of
                    else:
                        item, kind = query.mean[i : i + 1], "texts"
                    if isinstance(by_bank, HubnessCorrected):
                        expected += 0.7 / SCALE * float(found.hubness(item, kind))
                    else:
                        expected += (
                            float(found.hubness(item, kind) - (found.confusion(item, kind, order=1) / 40).log()) / SCALE
                        )
                    assert float(matrix[i, j]) == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(BankEntailment(found).matrix(images, texts), by_bank.transposed.matrix(texts, images).T)


def test_the_correction_finds_what_a_hub_hides():
    """Images share a direction. A caption of that direction alone is the closest to every image, until corrected."""
    common = torch.zeros(8)
    common[0] = 2.0
    own = embeddings(60, 0)
    images, texts = F.normalize(own + common, dim=-1), own
    hub = F.normalize(common, dim=0)
    query, gallery = (
        Gaussian(x, torch.full_like(x, -torch.inf)) for x in (images[:30], torch.cat([texts[:30], hub[None]]))
    )
    found = Bank(images[30:], texts[30:], SCALE)
    first = [
        DISTANCES["cosine"].matrix(query, gallery).argmin(dim=1),
        HubnessCorrected(found, weight=1.0).matrix(query, gallery).argmin(dim=1),
    ]
    assert (first[0] == 30).float().mean() > 0.5 and (first[1] == 30).float().mean() < 0.2
    assert (first[1] == torch.arange(30)).float().mean() > (first[0] == torch.arange(30)).float().mean()


def test_bad_banks():
    images, texts = paired()
    for wrong in ((images, texts[:5]), (images[:1], texts[:1]), (images[0], texts[0])):
        with pytest.raises(ValueError, match="needs at least two pairs"):
            Bank(*wrong, SCALE)
    for scale in (math.nan, 1e39, 0):
        with pytest.raises(ValueError, match=r"needs a scale between .* not"):
            Bank(images, texts, scale)


@pytest.mark.parametrize("order", [1 + 1e-10, 1 - 1e-10, 1 + 1e-6, 0.999, 1.05, 0.91, 1.11, 0.01, 100])
def test_orders_near_one_and_far_from_it(order):
    logits = torch.cat([20 * torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 30)])
    logits[0, 3] = -torch.inf
    logits[1] = torch.linspace(-20000, 0, 30)
    log_p = logits.double().log_softmax(dim=1)
    shannon = torch.special.entr(log_p.exp()).sum(dim=1)
    expected = shannon if abs(order - 1) < 1e-8 else (order * log_p).logsumexp(dim=1) / (1 - order)
    torch.testing.assert_close(bank.renyi_entropy(logits, order).double(), expected, rtol=1e-4, atol=1e-5)


# --- Files -------------------------------------------------------------------------------------------------


def write_bank(path, images=None, texts=None, **about):
    """A file with a good digest, whatever it holds."""
    images, texts = (x.half() for x in (paired(3) if images is None else (images, texts)))
    about = {"format": store.FORMAT, "fingerprint": "a", "scale": "12.0", **about}
    tensors = {"images": images, "texts": texts}
    save_file(tensors, path, {**about, "sha256": store.fingerprint_of(tensors, about)})
    return path


def test_no_flipped_bit_of_a_bank_is_overlooked(tmp_path):
    path = tmp_path / "bank.safetensors"
    store.save_bank(Bank(*paired(2, dims=4), SCALE), path, "a")
    good, overlooked = path.read_bytes(), []
    assert len(store.load_bank(path, "a", SCALE, 4)) == 2
    for place in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            store.load_bank(path)
            overlooked.append(place)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
    assert overlooked == []


BAD_FILES = {
    "empty": ({"images": torch.zeros(0, 8), "texts": torch.zeros(0, 8)}, "needs at least two pairs"),
    "no width": ({"images": torch.zeros(3, 0), "texts": torch.zeros(3, 0)}, "not vectors of length 1"),
    "one row": ({"images": torch.ones(1), "texts": torch.ones(1)}, "not vectors of length 1"),
    "scale": ({"scale": "1e39"}, "needs a scale between"),
    "no number": ({"scale": "one"}, "could not convert"),
    "width": ({"images": paired(3, dims=6)[0], "texts": paired(3, dims=6)[1]}, "for a different model"),
    "the model's scale": ({"scale": "13.0"}, "for a different model"),
    "weights": ({"fingerprint": "b"}, "for a different model"),
    "older": ({"format": "pcmepp-bank-1"}, "is older than this version of the package. Run `pcmepp bank`"),
}


@pytest.mark.parametrize("changes, words", BAD_FILES.values(), ids=list(BAD_FILES))
def test_files_that_are_no_bank_of_the_model(tmp_path, changes, words):
    path = write_bank(tmp_path / "bank.safetensors", **changes)
    with pytest.raises(ValueError, match=words) as error:
        store.load_bank(path, "a", SCALE, 8)
    assert str(error.value).startswith(f"{path} ") and "pcmepp bank" in str(error.value)


@pytest.mark.parametrize("number", ["9" * 400, "1e300", "-1e10", "NaN", "true"])
def test_a_calibration_with_a_number_beyond_all_bounds(tmp_path, number):
    block = json.dumps(Calibration("bank", 1, 1, 1, 0.5, 10, 0.1).as_json())
    (tmp_path / "calibration.json").write_text(block.replace("0.5", number))
    with pytest.raises(ValueError, match=r"calibration\.json is not a calibration: .*numbers must be finite"):
        store.load_calibration(tmp_path)


def pairs_of(samples, seed):
    images, texts = paired(samples, seed, noise=1.5)
    found = Bank(*paired(60, seed + 1, noise=1.5), SCALE)
    own = torch.arange(samples)
    return SCALE * images @ texts.T, found.hubness(images, "images"), found.hubness(texts, "texts"), own


def test_the_calibration_is_that_of_a_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    logits, x_v, x_t, own = pairs_of(50, 0)
    fitted = calibration.fit(logits, x_v, x_t, own)
    features = torch.stack([logits, -x_v[:, None].expand(50, 50), -x_t.expand(50, 50)], dim=-1).reshape(-1, 3)
    truth = torch.eye(50).flatten()
    weight = torch.where(truth > 0, 0.5 / 50, 0.5 / (50 * 49))
    model = LogisticRegression(C=1e9, tol=1e-10, max_iter=10_000).fit(features, truth, 1e4 * weight)
    expected = [*model.coef_[0], model.intercept_[0]]
    got = [fitted.scale, fitted.image_weight, fitted.text_weight, fitted.shift]
    assert got == pytest.approx(expected, rel=2e-2, abs=2e-2)
    assert 0 <= fitted.error < 0.2 and fitted.pairs == 50


def test_a_prior_shifts_the_odds():
    logits, x_v, x_t, own = pairs_of(50, 0)
    fitted = calibration.fit(logits, x_v, x_t, own)
    even, rare = (fitted.probability(logits, x_v, x_t, prior) for prior in (0.5, 0.01))
    torch.testing.assert_close(rare / (1 - rare) * 99, even / (1 - even), rtol=1e-3, atol=1e-5)
    for wrong in (0.0, 1.0, -1.0):
        with pytest.raises(ValueError, match="prior must be strictly between 0 and 1"):
            fitted.probability(logits, x_v, x_t, wrong)


def test_a_calibrated_probability_is_reliable_on_other_pairs():
    fitted = calibration.fit(*pairs_of(200, 0))
    logits, x_v, x_t, _ = pairs_of(200, 1)
    truth = torch.eye(200, dtype=torch.bool)
    right = calibration.reliability(fitted.probability(logits, x_v, x_t), truth)[1]
    wrong = calibration.reliability(logits.sigmoid(), truth)[1]
    assert right < 0.1 < wrong


def test_reliability_against_a_loop():
    p = torch.rand(6, 7, generator=torch.Generator().manual_seed(0))
    truth = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.3
    prior, error = 0.2, 0.0
    bins = [[] for _ in range(10)]
    for x, y in zip(p.flatten().tolist(), truth.flatten().tolist(), strict=True):
        weight = prior / int(truth.sum()) if y else (1 - prior) / int((~truth).sum())
        bins[int(x * 10)].append((x, y, weight))
    for inside in bins:
        total = sum(w for _, _, w in inside)
        if inside:
            error += abs(sum(w * x for x, _, w in inside) - sum(w * y for _, y, w in inside))
            assert total > 0
    assert calibration.reliability(p, truth, prior)[1] == pytest.approx(error)


def test_a_calibration_as_json_and_bad_ones():
    fitted = calibration.fit(*pairs_of(20, 0))
    assert Calibration.parse(fitted.as_json()) == fitted
    for change in ({"scale": math.inf}, {"estimator": "oracle"}, {"shift": "1"}, {"pairs": True}):
        with pytest.raises(ValueError, match="calibration"):
            Calibration.parse({**fitted.as_json(), **change})
    for block in ({}, [], {**fitted.as_json(), "more": 1}):
        with pytest.raises(ValueError, match="must have the keys"):
            Calibration.parse(block)
    with pytest.raises(ValueError, match="at least four images"):
        calibration.fit(torch.zeros(2, 2), torch.zeros(2), torch.zeros(2), torch.arange(2))
