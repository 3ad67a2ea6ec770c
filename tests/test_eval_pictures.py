"""The pictures of `pcmepp eval`: uncertain samples with what they find, t-SNE, and the curves of a run."""

import io
import json
import re
import sys
from types import SimpleNamespace

import open_clip
import pytest
import torch
from drawn_shards import SCENES
from eval_data import captions, png, true_matches, write_retrieval
from helpers import make_model, plain_twin
from PIL import Image
from slow import slow_distances

from pcmepp_openclip import cli
from pcmepp_openclip.data.captioned import Captioned
from pcmepp_openclip.distances import CSD
from pcmepp_openclip.encode.load import recorded_history
from pcmepp_openclip.evaluation import pictures
from pcmepp_openclip.evaluation.pictures import extremes, retrieved_items
from pcmepp_openclip.evaluation.tasks import CaptionedGaussians
from pcmepp_openclip.gaussian import Gaussian
from pcmepp_openclip.reports import curves

PAIRS = SCENES[:12]
TEXTS = [text for scene in PAIRS for text in captions(scene)]


def gaussian(n, dim=5, seed=0):
    mean, logvar = torch.randn(2, n, dim, generator=torch.Generator().manual_seed(seed))
    return Gaussian(torch.nn.functional.normalize(mean, dim=1), logvar)


# --- Which samples are shown ------------------------------------------------------------------------------


def test_extremes_by_hand():
    uncertainty = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0])
    assert extremes(uncertainty, 2) == ([3, 4], [1, 2])
    assert extremes(uncertainty, 3) == ([3, 4, 0], [1, 2])  # none is shown twice
    assert extremes(uncertainty, 9) == ([3, 4, 0, 2, 1], [])
    assert extremes(uncertainty, 0) == ([], [])


def test_equal_captions_count_once():
    uncertainty = torch.tensor([2.0, 9.0, 2.0, 9.0, 5.0])
    assert extremes(uncertainty, 2, ["b", "a", "b", "a", "c"]) == ([1, 4], [0])


def test_what_examples_find_against_a_sort():
    query, gallery = gaussian(9), gaussian(30, seed=1)
    distance = slow_distances(query.mean, gallery.mean, query.logvar, gallery.logvar)
    expected = [sorted(range(30), key=lambda j: distance[i, j].item())[:4] for i in (7, 2)]
    assert retrieved_items([7, 2], query, gallery, CSD(), 4) == expected


def test_pairs_and_known_matches_fit():
    own, known = [0, 0, 1], [[0], [0, 1], [1]]
    pairs = {(i, j) for j, i in enumerate(own)}
    matches = {(i, j) for j, images in enumerate(known) for i in images}
    for images_of_caption, expected in ((None, pairs), (known, matches)):
        data = Captioned([], ["a", "b", "c"], own, images_of_caption=images_of_caption)
        encoded = CaptionedGaussians(None, data, gaussian(2), None, [], gaussian(3), [], {})
        assert {(i, j) for i in range(2) for j in range(3) if encoded.fits(i, j)} == expected


# --- t-SNE ------------------------------------------------------------------------------------------------


def test_the_plane_holds_the_chosen_images_and_all_their_captions(monkeypatch):
    monkeypatch.setattr(pictures, "BACKGROUND", 3)
    images, texts, own = gaussian(10).mean, gaussian(30, seed=1).mean, [i // 3 for i in range(30)]
    plane, again, other = (pictures.place(images, texts, own, 4, seed) for seed in (0, 0, 1))
    assert plane.shown == 4 and len(set(plane.images)) == 7
    assert plane.captions == [j for j in range(30) if own[j] in plane.images] and len(plane.captions) == 21
    assert plane.image_I2.shape == (7, 2) and plane.caption_J2.shape == (21, 2)
    assert torch.equal(plane.image_I2, again.image_I2) and plane.images == again.images != other.images


def test_neighbours_stay_together():
    """Captions that equal their images: each lies nearest to its own."""
    images = gaussian(12, dim=16).mean
    plane = pictures.place(images, images + 0.001, list(range(12)), 12)
    nearest = torch.cdist(plane.image_I2, plane.caption_J2).argmin(dim=1).tolist()
    assert sum(plane.captions[j] == i for i, j in zip(plane.images, nearest, strict=True)) >= 10


def test_the_plane_of_two_pairs():
    plane = pictures.place(gaussian(2).mean, gaussian(2, seed=1).mean, [0, 1], 50)
    assert plane.shown == 2 and plane.image_I2.isfinite().all()


def test_areas_are_linear_in_the_uncertainty():
    least, most = pictures.AREAS
    assert pictures.areas(torch.tensor([9.0, 1.0, 2.0, 3.0]), [1, 3, 2]) == pytest.approx(
        [least, most, (least + most) / 2]
    )
    assert pictures.areas(torch.ones(4), [0, 1]) == [least, least]
    assert len(set(pictures.areas(None, [0, 1, 2]))) == 1


def test_what_the_plane_draws():
    """Two images in colour with their captions, joined by lines, and the rest in grey."""
    own = [0, 0, 1, 1, 2, 2]
    plane = pictures.Plane([1, 0, 2], list(range(6)), 2, torch.arange(6.0).view(3, 2), torch.arange(12.0).view(6, 2))
    figure = pictures.draw_plane(plane, own, torch.tensor([1.0, 3.0, 9.0]), torch.arange(6.0))
    (axes,) = figure.axes
    assert len(axes.lines) == 4
    back_images, back_captions, *shown = axes.collections
    assert len(back_images.get_offsets()) == 1 and len(back_captions.get_offsets()) == 2
    captions_of_1, image_1, captions_of_0, image_0 = shown
    assert captions_of_1.get_offsets().tolist() == [[4, 5], [6, 7]] and image_1.get_offsets().tolist() == [[0, 1]]
    assert image_1.get_sizes() > image_0.get_sizes() and captions_of_1.get_sizes().max() == pictures.AREAS[1]
    assert captions_of_0.get_facecolor()[0].tolist() == image_0.get_facecolor()[0].tolist()
    assert captions_of_0.get_facecolor()[0].tolist() != image_1.get_facecolor()[0].tolist()
    words = ["image", "its captions", "others", "larger: more uncertain"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == words
    (axes,) = pictures.draw_plane(plane, own, None, None).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == words[:3]  # all areas are equal


def test_without_scikit_learn_the_extra_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    argv = ["eval", "--model", "PCMEpp-tiny", "--retrieval", str(tmp_path), "--out", str(tmp_path), "--tsne", "4"]
    assert cli.main(argv) == 2
    assert "--tsne needs scikit-learn: pip install 'pcmepp-openclip[plots]'" in capsys.readouterr().err


# --- The curves of a run ----------------------------------------------------------------------------------

HISTORY = [{"samples": 64 * i, "step": i, "match_loss": 1 / i, "pseudo_positives": 9.0 - i} for i in range(1, 6)]


def test_pseudo_positives_by_samples():
    (line,) = curves.pseudo_positives(HISTORY).axes[0].lines
    assert line.get_xdata().tolist() == [64, 128, 192, 256, 320] and line.get_ydata().tolist() == [8, 7, 6, 5, 4]
    assert curves.pseudo_positives(HISTORY[:1]) is None
    assert curves.pseudo_positives([{"samples": 1}, {"samples": 2}]) is None  # a plain CLIP has none


def test_the_history_up_to_a_checkpoint(tmp_path):
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in HISTORY))
    path = tmp_path / "epoch_1.pt"
    torch.save({"state_dict": {}, "training": {"samples_seen": 200, "step": 3}}, path)
    assert recorded_history(str(path)) == HISTORY[:3]
    torch.save({"state_dict": {}}, path)
    path.with_name("other.pt").write_bytes(b"no checkpoint")
    for name in (str(path), str(path.with_name("other.pt")), str(tmp_path / "gone.pt"), "openai", None):
        assert recorded_history(name) == []


# --- The command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint of random weights with the history of its run, a plain twin of it, and a folder of pairs."""
    folder = tmp_path_factory.mktemp("pictures")
    write_retrieval(folder / "scenes", PAIRS, matches=True)
    model = make_model("PCMEpp-tiny")
    torch.save({"state_dict": model.state_dict(), "training": {"samples_seen": 320}}, folder / "model.pt")
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in HISTORY))
    return folder


def evaluate(place, out, *flags, weights=None):
    argv = ["--model", "PCMEpp-tiny", "--pretrained", str(weights or place / "model.pt"), "--workers", "0"]
    argv += ["--retrieval", str(place / "scenes"), "--out", str(out), *flags]
    return cli.main(["eval", *argv])


def encoded(model):
    """The Gaussians of all images and captions, by the model itself."""
    _, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny")
    pixels = torch.stack([preprocess(Image.open(io.BytesIO(png(scene)))) for scene in PAIRS])
    with torch.inference_mode():
        tokens = open_clip.get_tokenizer("PCMEpp-tiny")(TEXTS)
        return model.eval().encode_image_gaussian(pixels), model.encode_text_gaussian(tokens)


def section(page, title):
    """The HTML of the section with that title."""
    return next(part for part in page.split("<section>") if f">{title}</h2>" in part)


def test_the_report_shows_what_uncertain_samples_find(place, tmp_path):
    assert evaluate(place, tmp_path, "--examples", "2", "--tsne", "3") == 0
    page = (tmp_path / "index.html").read_text()
    images, texts = encoded(make_model("PCMEpp-tiny"))
    distance, fits = CSD().matrix(images, texts), true_matches(PAIRS)
    found = section(page, "scenes: most uncertain images")
    rows = re.findall(r"<figcaption>([\d.]+)</figcaption>.*?<ol>(.*?)</ol>", found)
    assert len(rows) == 2
    for i, (shown, lines) in zip(images.uncertainty.argsort(descending=True).tolist(), rows, strict=False):
        assert shown == f"{images.uncertainty[i]:.4f}"
        nearest = distance[i].argsort()[: pictures.FOUND].tolist()
        right = [i in fits[j] for j in nearest]
        expected = [f"✓ {TEXTS[j]}" if tick else TEXTS[j] for j, tick in zip(nearest, right, strict=True)]
        assert re.findall(r"<li>(.*?)</li>", lines) == expected
    found = section(page, "scenes: least uncertain captions")
    j = min(range(len(TEXTS)), key=lambda j: texts.uncertainty[j].item())
    title, *others = re.findall(r"<h3>(.*?)</h3>", found)
    assert title == f"{texts.uncertainty[j]:.4f}: {TEXTS[j]}" and len(others) == 1
    assert found.count("<img") == 2 * pictures.FOUND
    ticks = re.findall(r"<figcaption>(.*?)</figcaption>", found)[: pictures.FOUND]
    nearest = distance[:, j].argsort()[: pictures.FOUND].tolist()
    assert ticks == [f"✓ {n}" if i in fits[j] else str(n) for n, i in enumerate(nearest, start=1)]
    assert "3 images, drawn at random, with their captions, and 9 others" in section(
        page, "scenes: images and captions in one plane"
    )
    names = {path.stem for path in tmp_path.glob("*.png")}  # every figure of the report is a file
    assert {"retrieval-scenes-tsne", "training-pseudo-positives", "training-loss"} <= names
    assert {"retrieval-scenes-images-bins", "retrieval-scenes-captions-bins"} <= names
    assert len(names) == page.count("<svg ")


def test_no_examples_are_none():
    assert list(pictures.picture_sections([SimpleNamespace(encoded=None, queries=[None])], 0)) == []


def test_a_model_without_variances_has_a_plane_and_no_examples(place, tmp_path, capsys):
    twin = plain_twin(make_model("PCMEpp-tiny"), "PCMEpp-tiny")
    torch.save(twin.state_dict(), tmp_path / "plain.pt")
    assert evaluate(place, tmp_path, "--tsne", "3", weights=tmp_path / "plain.pt") == 0
    assert "log-variance branch is untrained" in capsys.readouterr().err
    page = (tmp_path / "index.html").read_text()
    plane = section(page, "scenes: images and captions in one plane")
    assert "Areas grow" not in plane and "<svg " in plane
    assert "<img" not in page and ">Training</h2>" not in page


def test_bad_flags(place, tmp_path, capsys):
    for flags, words in (
        (["--examples", "-1"], "--examples must be at least 0, not -1"),
        (["--tsne", "-3"], "--tsne must be at least 0, not -3"),
        (["--tsne-seed", "3"], "--tsne-seed needs --tsne"),
    ):
        assert evaluate(place, tmp_path, *flags) == 2
        assert words in capsys.readouterr().err
    argv = ["--model", "PCMEpp-tiny", "--zeroshot", str(tmp_path), "--out", str(tmp_path), "--tsne", "4"]
    assert cli.main(["eval", *argv]) == 2
    assert "--tsne needs --retrieval or --coco: it shows images with captions" in capsys.readouterr().err
