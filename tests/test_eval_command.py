"""`pcmepp eval` as a user runs it: its numbers against the model itself, stops, ranks, plain models, mistakes."""

import io
import itertools
import json
import shutil
import sys
import tarfile
from pathlib import Path

import open_clip
import pytest
import torch
from drawn_shards import SCENES as ALL_SCENES
from eval_data import (
    CLASSES,
    TEMPLATES,
    captions,
    png,
    read_embeddings,
    true_matches,
    write_retrieval,
    write_tar,
    write_zeroshot,
)
from helpers import make_model, mini_config, plain_config, plain_twin
from hostile_tars import HARMLESS, HOSTILE
from PIL import Image
from shard_maker import within

from pcmepp_openclip import cli
from pcmepp_openclip.data import captioned
from pcmepp_openclip.distances import Entailment, by_name
from pcmepp_openclip.encode import encode
from pcmepp_openclip.evaluation import datasets, neighbours, retrieval, zeroshot
from pcmepp_openclip.evaluation.metric import Metric, as_dict
from pcmepp_openclip.gaussian import Gaussian
from pcmepp_openclip.reports import report

SCENES = ALL_SCENES[:48]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint of random weights, and two folders."""
    folder = tmp_path_factory.mktemp("eval")
    write_retrieval(folder / "scenes", SCENES, matches=True)
    write_zeroshot(folder / "shapes")
    torch.save(make_model("PCMEpp-tiny").state_dict(), folder / "model.pt")
    return folder


@pytest.fixture
def no_report(monkeypatch):
    """The figures take longer than all the rest."""
    monkeypatch.setattr(report, "write_report", lambda folder, *args: folder / "index.html")


def arguments(place, out, *more, model=("PCMEpp-tiny", "model.pt")):
    argv = ["--model", model[0], "--pretrained", str(place / model[1]), "--out", str(out), "--workers", "0"]
    return [*argv, *map(str, more)]


def evaluate(place, out, *more, **kwargs):
    more = more or ("--retrieval", place / "scenes", "--zeroshot", place / "shapes")
    assert cli.main(["eval", *arguments(place, out, *more, **kwargs)]) == 0
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def results(place):
    return evaluate(place, place / "out")


def gaussians(model, scenes, texts):
    _, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny")
    pixels = torch.stack([preprocess(Image.open(io.BytesIO(png(scene)))) for scene in scenes])
    with torch.inference_mode():
        tokens = open_clip.get_tokenizer("PCMEpp-tiny")(texts)
        return model.eval().encode_image_gaussian(pixels), model.encode_text_gaussian(tokens)


def test_retrieval_numbers_are_those_of_the_model(results):
    images, texts = gaussians(make_model("PCMEpp-tiny"), SCENES, [text for scene in SCENES for text in captions(scene)])
    pairs = [i for i in range(len(SCENES)) for _ in range(3)]
    model = make_model("PCMEpp-tiny")
    k = 2 * model.match_scale.item() / model.logit_scale.exp().item()
    distances = {**by_name(), "entailment": Entailment(k / (2 * (1 - k)))}
    found = retrieval.rankings(images, texts, pairs, true_matches(SCENES), distances)
    expected = as_dict(retrieval.retrieval_metrics(found))
    got = results["retrieval"]["scenes"]
    assert (got["images"], got["captions"]) == (48, 144)
    assert {name: got["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-6)
    for name in ("images/condition=round/AUROC", "captions/spearman_matches", "captions/csd_any_match_R@1/miss_AUROC"):
        assert 0 <= abs(got["metrics"][name]) <= 1
    assert sum(number for *_, number in got["bins"]["captions/csd_R@1"]) == 144
    for distance, what in itertools.product(("cosine", "csd"), ("R@1", "any_match_R@1")):  # one rule, one number
        for samples, direction in (("images", "image_to_text"), ("captions", "text_to_image")):
            one = Metric(what, 0.0, distance, direction).key
            other = f"{samples}/{distance}_{what}/hits_of_all"
            assert got["metrics"][one] == pytest.approx(got["metrics"][other]), one


def test_zeroshot_numbers_are_those_of_the_model(results):
    prompts = [template.format(c=c) for c in CLASSES for template in TEMPLATES]
    model = make_model("PCMEpp-tiny")
    (images, texts), (known, _) = gaussians(model, ALL_SCENES[::2], prompts), gaussians(model, ALL_SCENES[1::2], ["x"])
    labels = [[CLASSES.index(f"{scene[0]} {scene[1]}") for scene in ALL_SCENES[i::2]] for i in (0, 1)]
    shape = len(CLASSES), len(TEMPLATES), -1
    cube = Gaussian(texts.mean.reshape(shape), texts.logvar.reshape(shape))
    expected = as_dict(zeroshot.zeroshot(images, labels[0], cube, 0, (known, labels[1])))
    del expected["entailment/all_prompts"]  # its weight is the model's, see above
    got = results["zeroshot"]["shapes"]
    assert (got["images"], got["classes"]) == (64, 32)
    assert {name: got["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_crops_are_encoded_if_they_are_asked_for(place, tmp_path, results, no_report):
    got = evaluate(place, tmp_path, "--retrieval", place / "scenes", "--zeroshot", place / "shapes", "--crops")
    key, model = "images/cropped_has_bigger_uncertainty", make_model("PCMEpp-tiny").eval()
    _, _, preprocess = open_clip.create_model_and_transforms("PCMEpp-tiny")
    for task, name, scenes in (("retrieval", "scenes", SCENES), ("zeroshot", "shapes", ALL_SCENES[::2])):
        assert key not in results[task][name]["metrics"]
        more = 0
        for scene, ratio in zip(scenes, neighbours.crop_ratios(len(scenes)), strict=True):
            pixels = preprocess(Image.open(io.BytesIO(png(scene))))
            side, (height, width) = round(min(pixels.shape[1:]) * ratio), pixels.shape[1:]
            top, left = round((height - side) / 2), round((width - side) / 2)
            part = pixels[None, :, top : top + side, left : left + side]
            part = torch.nn.functional.interpolate(part, (height, width), mode="bilinear", antialias=True)
            with torch.inference_mode():
                whole, cropped = model.encode_image_gaussian(torch.cat([pixels[None], part])).uncertainty
            more += int(cropped > whole)
        assert got[task][name]["metrics"][key] == pytest.approx(more / len(scenes), abs=1e-6)
        metrics = {other: value for other, value in got[task][name]["metrics"].items() if other != key}
        assert metrics == results[task][name]["metrics"]


def test_what_it_leaves_behind(place, results, no_report, capsys):
    assert results["model"] == "PCMEpp-tiny" and results["notes"] == [] and len(results["weights"]) == 64
    page = (place / "out/index.html").read_text()
    for question in ("1. Retrieval", "2. Failure", "3. Representation", "4. Vagueness"):
        assert f">{question}: " in page
    assert "Retrieval: scenes" in page and "Zero-shot: shapes" in page and page.count("<img") == 2 * 5 * (1 + 4 + 1)
    assert len(list((place / "out").glob("*.png"))) == page.count("<svg ") == 13
    again = evaluate(place, place / "out")
    assert again == results
    lines = capsys.readouterr().out.splitlines()
    value = results["retrieval"]["scenes"]["metrics"]["csd/text_to_image_mAP@R"]
    assert any(line.split()[:1] == ["text_to_image_mAP@R"] and line.split()[2] == f"{value:.4f}" for line in lines)


def test_a_stopped_evaluation_goes_on(place, tmp_path, results, monkeypatch, no_report):
    monkeypatch.setattr(encode, "CHUNK", 16)
    encoded, stock = [], encode.Encoder._gaussian

    def counted(self, batch, kind):
        if len(encoded) == 5:
            raise KeyboardInterrupt
        encoded.append(len(batch))
        return stock(self, batch, kind)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encode.Encoder, "_gaussian", counted)
        evaluate(place, tmp_path, "--retrieval", place / "scenes")
    assert not (tmp_path / "results.json").exists()
    before = len(encoded)
    monkeypatch.setattr(encode.Encoder, "_gaussian", lambda *a: encoded.append(0) or stock(*a))
    got = evaluate(place, tmp_path, "--retrieval", place / "scenes")
    assert before == 5 and len(encoded) == 3 + 7  # chunks of 48 images and 112 different captions
    for name, value in results["retrieval"]["scenes"]["metrics"].items():
        assert got["retrieval"]["scenes"]["metrics"][name] == pytest.approx(value, abs=1e-5), name
    evaluate(place, tmp_path, "--retrieval", place / "scenes")
    assert len(encoded) == 10  # nothing is encoded twice


def test_other_weights_or_other_data_are_encoded_anew(place, tmp_path, monkeypatch, no_report):
    encoded, stock = [], encode.Encoder._gaussian
    monkeypatch.setattr(
        encode.Encoder, "_gaussian", lambda self, batch, kind: encoded.append(kind) or stock(self, batch, kind)
    )
    shutil.copytree(place / "scenes", tmp_path / "scenes")
    torch.save(make_model("PCMEpp-tiny", seed=1).state_dict(), tmp_path / "model.pt")
    run = "--retrieval", tmp_path / "scenes", "--batch-size", 512
    first = evaluate(place, tmp_path / "out", *run)
    other = evaluate(tmp_path, tmp_path / "out", *run)
    assert encoded == ["image", "text"] * 2 and first["weights"] != other["weights"]
    write_tar(
        tmp_path / "scenes/test/1.tar", [{"png": png(s), "txt": "\n".join(captions(s))} for s in SCENES[24:][::-1]]
    )
    (tmp_path / "scenes/test/matches.json").unlink()
    evaluate(tmp_path, tmp_path / "out", *run)
    assert encoded[4:] == ["image", "text"]


def test_any_number_of_ranks_gives_the_same_files(ranks, place, tmp_path):
    """Also where some chunks are there already, and others are missing or half written."""

    def evaluated(world, out):
        argv = arguments(place, tmp_path / out, "--retrieval", place / "scenes", "--zeroshot", place / "shapes")
        assert ranks.run(world, argv, module="eval_rank") == [0] * world, ranks.log.read_text()[-3000:]
        written = [tmp_path / out / "results.json", *(tmp_path / out / "embeddings").rglob("*.safetensors")]
        return {path.relative_to(tmp_path / out): path.read_bytes() for path in written}

    alone = evaluated(1, "alone")
    assert len(alone) > 20 and evaluated(3, "together") == alone
    chunks = sorted((tmp_path / "together/embeddings").rglob("*.safetensors"))
    for path in chunks[::3]:
        path.unlink()
    for path in chunks[1::3]:
        path.write_bytes(path.read_bytes()[:-100])
    assert evaluated(2, "together") == alone


def test_a_plain_clip_is_evaluated_by_the_mean(place, tmp_path, results, capsys):
    (tmp_path / "plain-tiny.json").write_text(json.dumps(plain_config("PCMEpp-tiny")))
    open_clip.add_model_config(tmp_path / "plain-tiny.json")
    torch.save(plain_twin(make_model("PCMEpp-tiny"), "PCMEpp-tiny").state_dict(), tmp_path / "plain.pt")
    folders = "--retrieval", place / "scenes", "--zeroshot", place / "shapes"
    note = "has no log-variance branch: it is evaluated by its means alone."
    for model, words in (("plain-tiny", note), ("PCMEpp-tiny", "The log-variance branch is untrained")):
        got = evaluate(tmp_path, tmp_path / model, *folders, model=(model, "plain.pt"))
        assert words in capsys.readouterr().err and words in " ".join(got["notes"])
        for task, name in (("retrieval", "scenes"), ("zeroshot", "shapes")):
            metrics, whole = got[task][name]["metrics"], results[task][name]["metrics"]
            assert metrics == pytest.approx({key: whole[key] for key in metrics}, abs=1e-5)
            assert "bins" not in got[task][name] and not any("csd" in key or "certain" in key for key in metrics)
        assert words in (tmp_path / model / "index.html").read_text()


def test_results_are_there_only_when_all_else_is(place, tmp_path, monkeypatch, capsys):
    """Log-variances of NaN are refused before anything is measured; results.json is the last file."""
    state = make_model("PCMEpp-tiny").state_dict()
    state["uncertainty_text_bias"].fill_(torch.nan)
    torch.save(state, tmp_path / "nan.pt")
    flags = ["--pretrained", str(tmp_path / "nan.pt"), "--retrieval", str(place / "scenes"), "--workers", "0"]
    assert cli.main(["eval", "--model", "PCMEpp-tiny", "--out", str(tmp_path / "nan"), *flags]) == 2
    assert "output is not finite" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "nan").iterdir()) == ["embeddings"]

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_report", full_disk)
    assert cli.main(["eval", *arguments(place, tmp_path / "full", "--retrieval", place / "scenes")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "full/metrics.csv").exists() and not (tmp_path / "full/results.json").exists()


def test_an_image_folder_of_classes(place, tmp_path, results, no_report):
    for split, start in (("test", 0), ("val", 1)):
        for i, scene in enumerate(ALL_SCENES[start::2]):
            path = tmp_path / "images" / split / f"{CLASSES.index(f'{scene[0]} {scene[1]}'):02d}" / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(scene))
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        shutil.copy(place / "shapes" / name, tmp_path / "images")
    got = evaluate(place, tmp_path / "out", "--zeroshot", f"shapes={tmp_path / 'images'}")
    assert got["zeroshot"]["shapes"]["metrics"] == pytest.approx(results["zeroshot"]["shapes"]["metrics"], abs=1e-5)
    (tmp_path / "images/classnames.txt").unlink()
    assert datasets.read_labelled(str(tmp_path / "images")).classes[:2] == ["00", "01"]


def test_shards_with_captions_in_json(place, tmp_path, results, no_report):
    samples = [{"json": json.dumps({"captions": captions(s), "who": "me"}), "jpg": png(s)} for s in SCENES]
    write_tar(tmp_path / "x/x-0.tar", samples[:20])
    write_tar(tmp_path / "x/x-1.tar", samples[20:])
    data = captioned.read_captioned(f"{tmp_path}/x/x-{{0..1}}.tar")
    assert data.facts[0] == {"key": "s0000", "who": "me"} and data.image_of_caption[60:64] == [20, 20, 20, 21]
    got = evaluate(place, tmp_path / "out", "--retrieval", f"{tmp_path}/x/x-*.tar")["retrieval"]["x"]["metrics"]
    whole = results["retrieval"]["scenes"]["metrics"]
    assert got["csd/text_to_image_R@5"] == pytest.approx(whole["csd/text_to_image_R@5"])
    assert "csd/text_to_image_any_match_R@1" not in got


def test_control_characters_of_the_data_are_escaped_wherever_they_are_shown(place, tmp_path, capsys):
    """Facts and captions that clear a terminal, set its title, or turn the direction of a text."""
    kinds = ["red\x1b[2J", "blue\x1b]0;owned\x07\u202e"]
    samples = [
        {
            "png": png(scene),
            "txt": f"{captions(scene)[0]}\x1b[1A\x9b2K",
            "json": json.dumps({"c\x1b[31m": kinds[i % 2]}),
        }
        for i, scene in enumerate(SCENES[:8])
    ]
    write_tar(tmp_path / "x/0.tar", samples)
    evaluate(place, tmp_path / "out", "--retrieval", tmp_path / "x/0.tar", "--examples", 1)
    page, shown = (tmp_path / "out/index.html").read_text(encoding="utf-8"), capsys.readouterr()
    for text in (page, shown.out, (tmp_path / "out/metrics.csv").read_text(encoding="utf-8")):
        assert "red\\x1b[2J" in text
        assert not [c for c in "\x1b\x07\x9b\u202e" if c in text]
    assert "\\x9b2K" in page


def test_the_prompts_of_the_paper_where_a_folder_has_none(place, tmp_path, no_report):
    scenes = ALL_SCENES[:16]
    write_zeroshot(tmp_path / "shapes", scenes, splits=["test"])
    (tmp_path / "shapes/zeroshot_classification_templates.txt").unlink()
    (tmp_path / "shapes/classnames.txt").write_text("\n".join(CLASSES[:4]))
    got = evaluate(place, tmp_path / "out", "--zeroshot", tmp_path / "shapes")["zeroshot"]["shapes"]["metrics"]
    assert "top_40_certain" in got and "best_K_per_class" not in got and len(open_clip.OPENAI_IMAGENET_TEMPLATES) == 80
    images, texts = gaussians(make_model("PCMEpp-tiny"), scenes, [f"a photo of a {c}." for c in CLASSES[:4]])
    labels = torch.tensor([CLASSES.index(f"{scene[0]} {scene[1]}") for scene in scenes])
    right = (images.mean @ texts.mean.T).argmax(dim=1) == labels
    assert got["one_prompt"] == pytest.approx(right.double().mean().item())


def test_karpathy_s_split(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "val2014").mkdir()
    entries = []
    for i, scene in enumerate(SCENES[:3]):
        (tmp_path / f"val2014/{i}.jpg").write_bytes(png(scene))
        sentences = [{"raw": f" {text}\n", "sentid": 10 * i + j} for j, text in enumerate(captions(scene))]
        entry = {"filepath": "val2014", "filename": f"{i}.jpg", "cocoid": 100 + i, "sentences": sentences}
        entries.append({**entry, "split": "train" if i == 1 else "test"})
    (tmp_path / "coco.json").write_text(json.dumps({"images": entries}))
    data = datasets.read_karpathy(str(tmp_path / "coco.json"), str(tmp_path))
    assert data.coco_images == [100, 102] and data.coco_captions == [0, 1, 2, 20, 21, 22]
    assert data.captions[:3] == captions(SCENES[0]) and data.image_of_caption == [0, 0, 0, 1, 1, 1]
    assert data.images[1].read() == png(SCENES[2])
    assert len(datasets.read_karpathy(str(tmp_path / "coco.json"), str(tmp_path / "val2014")).images) == 2
    flags = "--coco", tmp_path / "coco.json", "--coco-images", tmp_path
    for words in (
        "--coco lacks 5000 images and 25000 captions of Karpathy's test split",
        "pip install 'pcmepp-openclip[coco]'",
    ):
        assert cli.main(["eval", *arguments(place, tmp_path / "out", *flags)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error
        monkeypatch.setitem(sys.modules, "eccv_caption", None)
    with pytest.raises(ValueError, match=r"--coco-images .*nowhere: 0.jpg is not in it\."):
        datasets.read_karpathy(str(tmp_path / "coco.json"), str(tmp_path / "nowhere"))
    (tmp_path / "coco.json").write_text('{"annotations": []}')
    with pytest.raises(ValueError, match=r"coco.json: it is not Karpathy's dataset_coco.json \(KeyError: 'images'\)\."):
        datasets.read_karpathy(str(tmp_path / "coco.json"), str(tmp_path))


class Folders:
    """Copies of the folders to make a mistake in."""

    def __init__(self, folder: Path):
        self.folder, self.scenes, self.shapes = folder, folder / "scenes", folder / "shapes"
        self.retrieval, self.zeroshot = ["--retrieval", str(self.scenes)], ["--zeroshot", str(self.shapes)]

    def in_scenes(self, name, samples):
        write_tar(self.scenes / "test" / name, samples)
        return self.retrieval

    def in_shapes(self, sample):
        write_tar(self.shapes / "test/0.tar", [sample])
        return self.zeroshot

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return self.retrieval if name.startswith("scenes") else self.zeroshot

    def without(self, name):
        (self.folder / name).unlink()
        return self.retrieval if name.startswith("scenes") else self.zeroshot

    def no_images(self):
        self.in_scenes("0.tar", [])
        return self.in_scenes("1.tar", [])

    def broken_image(self):
        self.without("scenes/test/matches.json")
        return self.in_scenes("1.tar", [{"png": png(SCENES[0])[:-40], "txt": "a"}])


IMAGE = {"png": png(SCENES[0])}
MISTAKES = [  # what, how it is made: the flags to run into it, what is said
    ("nothing to do", lambda f: [], "give --retrieval, --zeroshot, --coco, --hierarcaps, --himo or --noisy-pairs."),
    ("no such folder", lambda f: ["--retrieval", f"{f.folder}/nowhere"], "--retrieval: there is no file or folder"),
    ("no zero-shot folder", lambda f: ["--zeroshot", f"{f.folder}/nowhere"], "nowhere: there is no such folder."),
    (
        "no nshards",
        lambda f: f.without("scenes/test/nshards.txt"),
        "it has no test/nshards.txt; give a folder in clip_benchmark's layout or",
    ),
    (
        "no captions",
        lambda f: f.in_scenes("1.tar", [IMAGE]),
        "the image s0000 has no caption; each needs a .txt with one caption per line.",
    ),
    ("empty captions", lambda f: f.in_scenes("1.tar", [{**IMAGE, "txt": "\n \n"}]), "the image s0000 has no caption"),
    ("no images", lambda f: f.no_images(), "there are no images in it."),
    (
        "not a tar",
        lambda f: f.write("scenes/test/0.tar", "x" * 2000),
        "0.tar cannot be read (truncated shard: invalid header).",
    ),
    (
        "bad matches",
        lambda f: f.write("scenes/test/matches.json", '{"images_of_caption": [[0]]}'),
        "matches.json must hold, for each of the 144 captions in order, the indices of the images",
    ),
    ("broken image", lambda f: f.broken_image(), "1.tar (at byte 512) cannot be read: broken image"),
    (
        "remote",
        lambda f: ["--retrieval", "https://127.0.0.1/{0..1}.tar"],
        "evaluation reads local shards only; copy them to a disk first.",
    ),
    (
        "two of one name",
        lambda f: [*f.retrieval, *f.retrieval],
        "two are called 'scenes'; give them names, as in first=",
    ),
    ("coco without images", lambda f: ["--coco", "x.json"], "--coco needs --coco-images"),
    ("batch size", lambda f: [*f.retrieval, "--batch-size", "0"], "--batch-size must be at least 1"),
    (
        "no classes",
        lambda f: f.without("shapes/classnames.txt"),
        "it has no classes; put their names into classnames.txt, one per line.",
    ),
    (
        "no classes at all",
        lambda f: ["--zeroshot", str(f.scenes / "test")],
        "it has no classes; it needs test/nshards.txt and classnames.txt, or a subfolder",
    ),
    (
        "no label",
        lambda f: f.in_shapes(IMAGE),
        "the image s0000 is of no class (its .cls is ''); it must be an index from 0 to 31.",
    ),
    (
        "label out of range",
        lambda f: f.in_shapes({**IMAGE, "cls": "32"}),
        "the image s0000 is of no class (its .cls is '32')",
    ),
    (
        "template",
        lambda f: f.write("shapes/zeroshot_classification_templates.txt", "a photo of a {}."),
        "the template 'a photo of a {}.' may have {c} for the class, no other braces.",
    ),
]


@pytest.mark.parametrize("make, words", [rest for _, *rest in MISTAKES], ids=[what for what, *_ in MISTAKES])
def test_mistakes_in_one_sentence(place, tmp_path, make, words, capsys):
    for name in ("scenes", "shapes"):
        shutil.copytree(place / name, tmp_path / name)
    assert cli.main(["eval", *arguments(place, tmp_path / "out", *make(Folders(tmp_path)))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pcmepp eval: ") and error.count("\n") == 1 and words in error


def test_a_broken_image_in_a_worker_process_is_one_sentence_too(place, tmp_path, capsys):
    shutil.copytree(place / "scenes", tmp_path / "scenes")
    flags = Folders(tmp_path).broken_image()
    assert cli.main(["eval", *arguments(place, tmp_path / "out", *flags, "--workers", "1")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be read: broken image" in error


@pytest.mark.parametrize(
    "model, pretrained, words",
    [
        ("PCMEpp-tiny", "mini.pt", "it is of another architecture"),
        ("plain-tiny", "mini.pt", "does not fit plain-tiny: it is of another architecture."),
        ("PCMEpp-tiny", "nowhere.pt", "is not a known tag or valid file path"),
        ("PCMEpp-tony", "mini.pt", "did you mean 'PCMEpp-tiny'?"),
        ("local-dir:/nowhere", None, "/nowhere"),
        ("hf-hub:nobody/nothing", None, "nobody/nothing"),
    ],
)
def test_models_that_cannot_be(place, tmp_path, model, pretrained, words, capsys, hub):
    (tmp_path / "mini.json").write_text(json.dumps(mini_config()))
    (tmp_path / "plain-tiny.json").write_text(json.dumps(plain_config("PCMEpp-tiny")))
    open_clip.add_model_config(tmp_path)
    torch.save(open_clip.create_model("mini").state_dict(), tmp_path / "mini.pt")
    argv = ["eval", "--model", model, "--out", str(tmp_path / "out"), "--retrieval", str(place / "scenes")]
    assert cli.main([*argv, *(["--pretrained", str(tmp_path / pretrained)] if pretrained else [])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pcmepp eval: ") and error.count("\n") == 1 and words in error


def with_sample(folder, sample, where="test/0.tar"):
    """The folder of scenes with one more sample in a shard."""
    path = folder / where
    with tarfile.open(path, "a") as tar:
        for name, content in sample:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return folder


def gif():
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "GIF")
    return file.getvalue()


@pytest.mark.parametrize(
    "sample, said",
    [
        ([("x.gif", gif()), ("x.txt", b"text")], r"the sample x of .*0.tar has no image of a kind .* only x.gif, x.t"),
        ([("x.tiff", b"x")], "only x.tiff"),
        ([("x.heic", b"x"), ("x.json", b"{}")], "only x.heic"),
        ([("x.txt", b"text")], "only x.txt"),
        ([("s0003.png", png(SCENES[0])), ("s0003.txt", b"text")], "has the key s0003 twice"),
        ([("x.png", png(SCENES[0])), ("x.txt", b"a"), ("x.png", png(SCENES[1])), ("x.txt", b"b")], "the key x twice"),
        ([("x.png", png(SCENES[0])), ("x.txt", b"a" * (2 << 20))], "x.txt of .* has more than 1 MB"),
        *(
            ([("x.png", png(SCENES[0])), ("x.json", json.dumps({"captions": wrong}).encode())], "must be a list of t")
            for wrong in ("a dog", 5, [1, 2], ["a", None], {"a": 1}, [["a"]], True)
        ),
        ([("x.png", png(SCENES[0])), ("x.json", b'{"captions": null}')], "the image x has no caption"),
        ([("x.png", png(SCENES[0])), ("x.json", b"[" * 100_000)], "is not JSON"),
    ],
)
def test_nothing_is_left_out_without_a_word(tmp_path, sample, said):
    folder = with_sample(write_retrieval(tmp_path / "d", SCENES[:8]), sample)
    with pytest.raises(ValueError, match=said) as error:
        captioned.read_captioned(str(folder))
    assert "\n" not in str(error.value)


def test_captions_of_the_json_count_and_null_leaves_the_txt(tmp_path):
    image = png(SCENES[0])
    two, none = '{"captions": ["a", "b"]}', '{"captions": null}'
    write_tar(tmp_path / "0.tar", [{"png": image, "json": two}, {"png": image, "txt": "c", "json": none}])
    assert captioned.read_captioned(str(tmp_path / "0.tar")).captions == ["a", "b", "c"]


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_shards_are_one_sentence(tmp_path, attack):
    (tmp_path / "0.tar").write_bytes(HOSTILE[attack])

    def read():
        try:
            return len(captioned.read_captioned(str(tmp_path / "0.tar")).images)
        except ValueError as error:
            return str(error)

    found = within(10, read)
    assert found == 3 if attack in HARMLESS else "0.tar cannot be read" in found


@pytest.mark.parametrize(
    "template", ["a {d}", "a {}", "a {c.__class__}", "a {c!r}", "a {c:>9}", "a {c", "a {c} {0}", "a {c} {d}", "none"]
)
def test_templates_that_cannot_be_filled_are_one_sentence(tmp_path, template):
    folder = write_zeroshot(tmp_path / "d", splits=("test",))
    (folder / "zeroshot_classification_templates.txt").write_text(f"a {{c}}\n{template}\n")
    with pytest.raises(ValueError, match=r"the template '.*' (may have|has no) {c} for the class"):
        datasets.read_labelled(str(folder))


def test_an_image_folder_leaves_out_no_image_without_a_word(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "test" / name).mkdir(parents=True)
        (tmp_path / "test" / name / "0.png").write_bytes(png(SCENES[0]))
    (tmp_path / "test/dog/notes.txt").write_text("not an image")
    assert len(datasets.read_labelled(str(tmp_path)).images) == 2
    (tmp_path / "test/dog/1.bmp").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"dog/1.bmp is not of a kind that is read"):
        datasets.read_labelled(str(tmp_path))


def class_folders(folder, names, classes):
    """A folder with an image in each of its folders of classes; the class of each folder by its name, as it is read."""
    for name in names:
        (folder / "test" / name).mkdir(parents=True)
        (folder / "test" / name / "0.png").write_bytes(png(SCENES[0]))
    (folder / "classnames.txt").write_bytes("\r\n".join(classes).encode())
    found = datasets.read_labelled(str(folder))
    return {Path(image.file).parent.name: found.classes[i] for image, i in zip(found.images, found.labels, strict=True)}


def test_folders_pair_with_classes_by_name_or_by_number(tmp_path):
    """They were paired in the order of text, where "10" comes before "2" and classnames.txt may have any order."""
    words = [f"class {i}" for i in range(12)]
    paired = class_folders(tmp_path / "names", ["cat", "hot_dog", "ant"], ["hot dog", "cat", "ant"])
    assert paired == {"cat": "cat", "hot_dog": "hot dog", "ant": "ant"}
    for first in (0, 1):
        paired = class_folders(tmp_path / f"from{first}", [str(first + i) for i in range(12)], words)
        assert paired == {str(first + i): word for i, word in enumerate(words)}
    digits = [str(i) for i in range(11, -1, -1)]  # the names of classes go before numbers
    assert class_folders(tmp_path / "digits", digits, digits) == dict(zip(digits, digits, strict=True))
    refused = [
        (["cat", "dog"], ["cat", "hound"]),
        (["n01440764", "n01443537"], ["tench", "goldfish"]),
        (["1", "3"], ["cat", "dog"]),
        (["2", "3"], ["cat", "dog"]),
        (["0", "00"], ["cat", "dog"]),
        (["cat", "c at"], ["cat", "cat"]),
        (["a_b", "a b"], ["a b", "a b"]),
        (["0", "1"], ["cat", "dog", "ant"]),
    ]
    for number, (names, classes) in enumerate(refused):
        with pytest.raises(ValueError, match=r"refused\d/test do not pair with .*refused\d/classnames.txt: name each"):
            class_folders(tmp_path / f"refused{number}", names, classes)


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    odd = "a\u2028b\x85c\x0cd\re\x1cf"
    write_tar(tmp_path / "0.tar", [{"png": png(SCENES[0]), "txt": f"{odd}\r\n\nsecond\n"}])
    assert captioned.read_captioned(str(tmp_path / "0.tar")).captions == [odd, "second"]
    folder = write_zeroshot(tmp_path / "d", splits=("test",))
    (folder / "classnames.txt").write_bytes("\r\n".join([odd, *CLASSES[1:]]).encode())
    (folder / "zeroshot_classification_templates.txt").write_bytes(f"{odd} {{c}}\n".encode())
    found = datasets.read_labelled(str(folder))
    assert found.classes == [odd, *CLASSES[1:]] and found.templates == [f"{odd} {{c}}"]


def test_a_blank_line_is_no_class(tmp_path):
    folder = write_zeroshot(tmp_path / "d", splits=("test",))
    names = folder / "classnames.txt"
    names.write_text("\n".join(CLASSES) + "\n\n \n")
    assert datasets.read_labelled(str(folder)).classes == CLASSES
    names.write_text("\n".join([*CLASSES[:3], " ", *CLASSES[3:]]))
    with pytest.raises(ValueError, match=r"classnames.txt: line 4 is blank"):
        datasets.read_labelled(str(folder))


@pytest.mark.parametrize("number", ["1000000000000", "-1", "0", "x"])
def test_numbers_of_shards_that_cannot_be(tmp_path, number):
    folder = write_retrieval(tmp_path / "d", SCENES[:8])
    (folder / "test/nshards.txt").write_text(number)
    with pytest.raises(ValueError, match=r"nshards.txt must hold"):
        captioned.read_captioned(str(folder))


def test_damaged_embeddings_are_noticed_and_encoded_again(place, tmp_path, no_report, capsys):
    """Bits of every byte of the header and of some of the rest; a truncated file; one that belongs elsewhere."""
    flags = "--retrieval", place / "scenes"
    whole = evaluate(place, tmp_path, *flags)
    images, texts = sorted((tmp_path / "embeddings").rglob("*.safetensors"), reverse=True)
    data = images.read_bytes()
    for damaged in (data[: len(data) // 2], b"", texts.read_bytes()):
        images.write_bytes(damaged)
        capsys.readouterr()
        assert evaluate(place, tmp_path, *flags) == whole
        assert "is damaged" in capsys.readouterr().err and images.read_bytes() == data
    damaged = bytearray(data)
    damaged[-1000] ^= 0x40
    images.write_bytes(damaged)
    assert evaluate(place, tmp_path, *flags) == whole
    header = 8 + int.from_bytes(data[:8], "little")
    assert read_embeddings(images) is not None
    for bit in [*range(0, 8 * header, 3), *range(8 * header, 8 * len(data), 4093)]:  # some bits of every byte
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        images.write_bytes(damaged)
        found = read_embeddings(images)
        assert found is None or found.mean.numpy().tobytes() in data, bit


def test_images_are_turned_by_their_exif_data_only_if_that_is_asked_for(place, tmp_path, no_report):
    def lying(scene):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = 6  # to be turned by 90 degrees
        upright = Image.open(io.BytesIO(png(scene)))
        upright.transpose(Image.Transpose.ROTATE_90).save(file, "PNG", exif=exif)
        return file.getvalue()

    folder = tmp_path / "scenes"
    write_tar(folder / "test/0.tar", [{"png": lying(scene), "txt": "\n".join(captions(scene))} for scene in SCENES[:8]])
    (folder / "test/nshards.txt").write_text("1")
    straight = write_retrieval(tmp_path / "straight", SCENES[:8])
    wanted, stored, turned = (
        evaluate(place, tmp_path / f"out{i}", "--retrieval", f"d={where}", *flags)
        for i, (where, flags) in enumerate([(straight, ()), (folder, ()), (folder, ("--exif-orientation",))])
    )
    assert turned["exif_orientation"] and "exif_orientation" not in stored and turned["weights"] != stored["weights"]
    embeddings = [read_embeddings(next((tmp_path / f"out{i}").rglob("d-images*/*.safetensors"))).mean for i in range(3)]
    assert torch.equal(embeddings[0], embeddings[2]) and not torch.equal(embeddings[0], embeddings[1])
    assert wanted["weights"] == stored["weights"]
