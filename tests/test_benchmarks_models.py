"""`python -m benchmarks models`: the table says what was checked, and what is wrong is noticed."""

import json
import math
import os

import open_clip
import pytest
import torch
from helpers import REPO, run_python
from transformers import AutoConfig

from benchmarks import flops, hf_configs, models, twins
from benchmarks.flops import Count
from benchmarks.models import END, START, Checked
from pcmepp_openclip import PCMEppCLIP

SMALL = "ViT-S-32-alt"


def test_the_command_writes_a_table_and_counts(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    names = [SMALL, "PE-Core-T-16-384", "coca_ViT-B-32"]
    done = run_python("-m", "benchmarks", "models", *names, "--out", str(tmp_path), "--page", str(page), cwd=REPO)
    assert done.returncode == 1, done.stderr  # one of them fails, and all were named
    text = (tmp_path / "models.md").read_text().strip()
    assert done.stdout.strip() == text
    assert page.read_text() == f"before\n{START}\n\n{text}\n\n{END}\nafter\n"
    vit, timm, coca = json.loads((tmp_path / "models.json").read_text())
    assert (vit["name"], vit["branches"], vit["checked"], vit["reason"]) == (SMALL, "split, split", "run", "")
    assert (timm["branches"], timm["checked"], timm["reason"]) == ("top, split", "run", "")
    assert float(vit["deviation"]) < 1e-6 and float(timm["deviation"]) < 1e-6
    assert float(vit["training FLOPs"]) < 0.96 and float(timm["training FLOPs"]) < 1.02
    assert "CoCa" in coca["reason"] and coca["parameters"] == "254 M" and not coca["branches"]
    assert text.splitlines()[-1].startswith("2 of 3 models build and run forward and backward; 2 of them with numbers")


def test_a_mean_that_is_not_the_plain_model_s_is_noticed(monkeypatch):
    encode = PCMEppCLIP.encode_text
    monkeypatch.setattr(PCMEppCLIP, "encode_text", lambda *args, **kwargs: encode(*args, **kwargs) + 1e-4)
    found = models.check(SMALL)
    assert found.reason == "The mean is not the plain model's embedding."
    assert found.deviation == pytest.approx(1e-4, rel=0.01)


def test_a_parameter_without_gradient_is_noticed(monkeypatch):
    encode = PCMEppCLIP.encode_text_gaussian

    def constant(self, text):
        gaussian = encode(self, text)
        return type(gaussian)(gaussian.mean, gaussian.logvar.detach())

    monkeypatch.setattr(PCMEppCLIP, "encode_text_gaussian", constant)
    assert "parameters get no gradient, such as uncertainty_" in models.check(SMALL).reason
    with pytest.raises(ValueError, match=r"uncertainty_.* gets no gradient"):
        twins.deviation(SMALL)


def test_a_model_that_fails_has_one_line(monkeypatch):
    def fail(name):
        raise RuntimeError("two\nlines | and a bar")

    monkeypatch.setattr(models, "count", fail)
    assert models.check("RN50").cells()[-1] == "The plain model fails: RuntimeError: two lines / and a bar"


def die_or_not(name):
    if name == "RN50":
        os._exit(1)
    return Checked(name, "", "")


def test_a_process_that_dies_costs_one_model():
    lines = list(models.check_all(["before", "RN50", "after"], die_or_not))
    died = "The process died, most likely for lack of memory."
    assert [(each.name, each.reason) for each in lines] == [("before", ""), ("RN50", died), ("after", "")]


def line(name, plain, ours, branches, **more):
    counts = Count(plain, 100, frozenset(), ()), Count(ours, 107, frozenset(), branches)
    return Checked(name, "ViT, 12 layers", "12 layers", *counts, **more)


def test_cells_and_counts_are_those_of_the_lines():
    lines = [
        line("a", 100.0, 92.0, ("split", "split"), how="run", deviation=7e-8),
        line("b", 100.0, 97.0, ("split", "split"), how="meta"),
        line("c", 100.0, 101.0, ("top", "split"), how="run", deviation=3e-7),
        line("d", 100.0, 103.0, ("top", "top"), how="run", deviation=math.nan, reason="It is wrong."),
    ]
    assert lines[0].cells()[3:] == ["split, split", "0 M", "7.0 %", "0.920", "run", "7e-08", "ok"]
    assert [each.cells()[6] for each in lines[1:]] == ["0.970 > 0.96", "1.010", "1.030 > 1.02"]
    assert models.summary(lines) == (
        "3 of 4 models build and run forward and backward; 2 of them with numbers, with a deviation of at most 3e-07. "
        "Where both branches split off, 1 of 2 need at most 0.96 of the FLOPs. "
        "Where a branch is on top, 1 of 1 need at most 1.02 of the FLOPs."
    )


def test_every_hugging_face_tower_of_open_clip_has_a_config():
    configs = (open_clip.get_model_config(name) for name in open_clip.list_models())
    named = {config["text_cfg"].get("hf_model_name") for config in configs} - {None}
    assert named == set(hf_configs.PUBLISHED)


def test_configs_are_known_to_transformers_for_a_while():
    tiny = {"org/tiny": {**hf_configs.PUBLISHED["roberta-base"], "hidden_size": 8, "num_attention_heads": 2}}
    with hf_configs.known(tiny):
        assert AutoConfig.from_pretrained("org/tiny").hidden_size == 8
    with pytest.raises(OSError):
        AutoConfig.from_pretrained("org/tiny")


@pytest.mark.parametrize("name", ["mt5-xl-ViT-H-14", "ViT-H-14-worldwide", "EVA02-E-14", "convnext_xxlarge"])
def test_a_cut_model_is_the_same_but_for_layers_and_tokens(name):
    whole = flops.shape_only(name)
    with twins.trunks_cut():
        cut = flops.shape_only(name, **twins.cut(name))
    assert flops.parameters(cut) < 6e8 < flops.parameters(whole)
    shapes = {key: value.shape for key, value in whole.state_dict().items()}
    for key, value in cut.state_dict().items():
        expected = shapes[key] if value.shape == shapes[key] else (hf_configs.TOKENS, *shapes[key][1:])
        assert value.shape == expected, key


@pytest.mark.parametrize("name, end", [("ViT-S-32", 49407), ("ViT-H-14-worldwide", 2), ("roberta-ViT-B-32", 50264)])
def test_texts_end_where_the_tower_reads_them(name, end):
    model = flops.shape_only("ViT-S-32")  # for the image size
    image, text = twins.inputs(model, name, {})
    assert image.shape == (2, 3, 224, 224) and text.shape == (2, 77)
    assert text[0, 37] == text[1, 76] == end and len(text[0, 38:].unique()) == 1
    assert not torch.equal(text[0, :37], text[1, :37])
