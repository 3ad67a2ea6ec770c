"""A bank and a calibration on the Hub: pushed with the weights, loaded in one line, refused where they are wrong."""

import dataclasses
import os

import open_clip
import pytest
import torch
from drawn_shards import SCENES, draw
from exported import add_bank, add_calibration, export_tiny, random_bank
from huggingface_hub import constants

from pcmepp_openclip import ImageTextModel, cli
from pcmepp_openclip.ambiguity import Calibration
from pcmepp_openclip.ambiguity.store import (
    BANK_FILE,
    CALIBRATION_FILE,
    find_bank,
    load_calibration,
    save_bank,
    save_calibration,
    source_of,
)
from pcmepp_openclip.encode.load import load_model
from pcmepp_openclip.hub.card import Facts, write_card
from pcmepp_openclip.models.export import export_model

TEXTS = ["a dog", "a small black dog on a red sofa"]


@pytest.fixture
def push(guarded, capsys):
    def push(*words, code=0):
        assert cli.main(["push", *map(str, words)]) == code
        said = capsys.readouterr()
        if code:
            assert said.err.count("\n") == 1 and "pcmepp-push-" not in said.err
        return said.out if code == 0 else said.err

    return push


@pytest.mark.parametrize("probabilistic", [True, False])
def test_a_folder_with_its_bank_is_loaded_in_one_line(guarded, push, tmp_path, probabilistic):
    folder, repo = export_tiny(tmp_path / "model", probabilistic), f"me/banked{probabilistic}"
    push(folder, repo)
    bare = ImageTextModel(f"hf-hub:{repo}")
    assert bare.bank is None and bare.calibration is None
    bank = add_bank(folder, "bank")
    push(folder, repo, "--tag", "v1")
    for name in (f"hf-hub:{repo}", f"hf-hub:{repo}@v1"):
        model = ImageTextModel(name)
        assert torch.equal(model.bank.images_BD, bank.images_BD)
        local = ImageTextModel(f"local-dir:{folder}")
        assert torch.equal(model.confusion(texts=TEXTS), local.confusion(texts=TEXTS))
        images = [draw(*SCENES[0])]
        assert torch.equal(model.match_probability(images, TEXTS), local.match_probability(images, TEXTS))


def test_offline_from_the_cache(guarded, push, tmp_path, monkeypatch):
    folder = export_tiny(tmp_path / "model")
    push(folder, "me/bare-offline")
    add_bank(folder, "bank")
    push(folder, "me/offline")
    for repo in ("me/offline", "me/bare-offline"):
        ImageTextModel(f"hf-hub:{repo}")
    guarded.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert len(ImageTextModel("hf-hub:me/offline").bank) == 12
    assert ImageTextModel("hf-hub:me/offline").calibration is not None
    bare = ImageTextModel("hf-hub:me/bare-offline")
    assert bare.bank is None and bare.calibration is None and guarded.requests == []


def test_a_bank_that_the_hub_does_not_give_is_no_silent_change(guarded, push, tmp_path):
    folder = export_tiny(tmp_path / "model")
    add_bank(folder, "bank")
    push(folder, "me/withheld")
    guarded.fail(f"/resolve/.*{BANK_FILE}", status=403, message="not for you")
    with pytest.raises(ValueError, match=r"bank.safetensors of hf-hub:me/withheld cannot be fetched: .*not for you"):
        ImageTextModel("hf-hub:me/withheld")


def test_a_run_with_a_bank_and_a_calibration(guarded, push, trained, tmp_path):
    loaded = load_model("PCMEpp-tiny", str(trained / "checkpoints/epoch_2.pt"))
    save_bank(random_bank(loaded.model), tmp_path / "mine.safetensors", loaded.bank_fingerprint)
    source = source_of(loaded, find_bank(loaded, tmp_path / "mine.safetensors"))
    save_calibration(Calibration("bank", 1.25, 0.5, 0.75, -2.5, 1234, 0.0217, source), tmp_path / "mine.json")
    flags = ("--bank", tmp_path / "mine.safetensors", "--calibration", tmp_path / "mine.json")
    push(trained, "me/run-bank", *flags)
    assert {BANK_FILE, CALIBRATION_FILE} <= set(guarded.files("me/run-bank"))
    assert len(ImageTextModel("hf-hub:me/run-bank").bank) == 12
    card = guarded.files("me/run-bank")["README.md"].decode()
    for part in (
        *("## Uncertainty", 'ImageTextModel("hf-hub:me/run-bank")', "| estimator | bank |", "model.match_probability("),
        *("| reference pairs in the bank | 12 |", "scale 1.25, image weight 0.5, text weight 0.75, shift -2.5"),
        *("1,234 held-out captions", "| 0.0217, at a prior of 1/2 |", "## Architecture"),
    ):
        assert part in card, part
    assert "`pcmepp bank --model" not in card
    push(trained, "me/run-bare")
    bare = guarded.files("me/run-bare")["README.md"].decode()
    assert "## Uncertainty" not in bare and bare.count("`pcmepp bank --model hf-hub:me/run-bare`") == 1
    assert set(guarded.files("me/run-bare")).isdisjoint({BANK_FILE, CALIBRATION_FILE})
    start, end = card.index("## Uncertainty"), card.index("## Architecture")
    section = bare[bare.index("`pcmepp bank --model") : bare.index("## Architecture")]
    assert (card[:start] + card[end:]).replace("run-bank", "run-bare") == bare.replace(section, "")


def test_the_code_on_the_card_runs(guarded, push, tmp_path, monkeypatch, capsys):
    folder = export_tiny(tmp_path / "model")
    add_bank(folder, "bank")
    push(folder, "me/example")
    card = guarded.files("me/example")["README.md"].decode()
    code = card.split("## Uncertainty")[1].split("```python\n")[1].split("```")[0]
    draw(*SCENES[0]).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.count("tensor(") == 2


def test_a_calibration_by_the_variance_needs_no_bank(guarded, push, tmp_path):
    folder = export_tiny(tmp_path / "model")
    add_calibration(folder, Calibration("variance", 1, 1, 1, 0, 100, 0.1))
    push(folder, "me/variance")
    assert "| estimator | variance |" in guarded.files("me/variance")["README.md"].decode()
    assert ImageTextModel("hf-hub:me/variance").match_probability([draw(*SCENES[0])], TEXTS).shape == (1, 2)


def test_what_is_not_pushed(guarded, push, tmp_path):
    folder = export_tiny(tmp_path / "model")
    bank = add_bank(folder, "bank")
    good = (folder / BANK_FILE).read_bytes()
    (folder / BANK_FILE).write_bytes(good[:-100])
    assert f"{folder / BANK_FILE} is not a bank" in push(folder, "me/bad", code=2)
    save_bank(bank, tmp_path / "other.safetensors", load_model("PCMEpp-tiny").bank_fingerprint)
    words = push(folder, "me/bad", "--bank", tmp_path / "other.safetensors", code=2)
    assert f"{tmp_path / 'other.safetensors'} was made for a different model" in words
    (folder / BANK_FILE).unlink()
    assert "was fitted with a bank: push that too, by --bank FILE" in push(folder, "me/bad", code=2)
    (folder / BANK_FILE).write_bytes(good)
    fitted = load_calibration(folder)
    stale = dataclasses.replace(fitted, source=fitted.source[:-64] + 64 * "0")
    save_calibration(stale, folder / CALIBRATION_FILE)
    words = push(folder, "me/bad", code=2)
    assert f"{folder / CALIBRATION_FILE} was fitted with another bank: run `pcmepp calibrate` again" in words
    (folder / BANK_FILE).write_bytes(good)
    (folder / CALIBRATION_FILE).write_text('{"scale": 1}')
    assert f"{folder / CALIBRATION_FILE} is not a calibration" in push(folder, "me/bad", code=2)
    (folder / CALIBRATION_FILE).unlink()
    assert "cannot be copied: No such file" in push(folder, "me/bad", "--bank", tmp_path / "nowhere", code=2)
    (folder / BANK_FILE).unlink()
    os.symlink(tmp_path / "other.safetensors", folder / BANK_FILE)
    assert "is a symbolic link" in push(folder, "me/bad", code=2)
    assert guarded.requests == []


def test_the_card_of_a_plain_model_with_a_bank(tmp_path):
    config = {"model_cfg": {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {}}}
    card = write_card(tmp_path, "me/plain", Facts(config, 1, bank_size=4096))
    assert "| reference pairs in the bank | 4,096 |" in card and "match_probability" not in card


def test_a_branch_that_is_trained_later_keeps_the_bank(push, guarded, tmp_path):
    folder = export_tiny(tmp_path / "plain", probabilistic=False)
    add_bank(folder)
    model = open_clip.create_model("PCMEpp-tiny", pretrained=str(folder / "open_clip_model.safetensors"))
    later = export_model(model, tmp_path / "later", "PCMEpp-tiny")
    push(later, "me/later", "--bank", folder / BANK_FILE)
    assert ImageTextModel("hf-hub:me/later").bank is not None
