"""Files of others in commands: links, records that are no records, names that are commands to a terminal; and places
that cannot be written to."""

import json
import os
import re

import open_clip
import pytest
import torch
import yaml
from eval_data import write_retrieval
from helpers import split
from shard_maker import write_shards

from pcmepp_openclip import cli
from pcmepp_openclip.encode.store import Store
from pcmepp_openclip.models.export import export_model, model_config_of
from pcmepp_openclip.runs import record

ESC = "\x1b[2J\x1b]0;owned\x07\x9b31m"
EVIL = f"x`|<script>alert(1)</script>\n---\nlicense: evil\n# Owned\n[click](http://evil) {ESC}"


def test_a_link_is_not_pushed(guarded, exported, tmp_path, capsys):
    for name in ("README.md", "vocab.txt", "open_clip_config.json", "open_clip_model.safetensors"):
        path, secret = exported / name, tmp_path / "secret"
        content = path.read_bytes() if path.exists() else None
        secret.write_bytes(content or b"a secret")
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
        assert cli.main(["push", str(exported), "me/linked"]) == 2
        assert f"{name} is a symbolic link, which is not followed" in capsys.readouterr().err
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    assert not guarded.requests


def test_what_is_no_file_is_said_in_one_sentence(exported, capsys):
    os.mkfifo(exported / "spiece.model")
    assert cli.main(["push", str(exported), "me/x", "--dry-run"]) == 2
    assert "spiece.model is not a file" in capsys.readouterr().err


def test_a_folder_beside_the_tokenizer_is_no_part_of_it(hub, exported, capsys):
    (exported / "vocab.d").mkdir()
    (exported / "vocab.d/0").write_text("x")
    assert cli.main(["push", str(exported), "me/x", "--dry-run"]) == 0
    assert "vocab.d" not in capsys.readouterr().out
    config = json.loads((exported / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "own"
    (exported / "open_clip_config.json").write_text(json.dumps(config))
    for extra in ({}, {"a.model/0": b"x"}):
        files = {path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()}
        hub.add(f"me/folders{len(extra)}", {**files, "vocab.d/0": b"x", **extra})
        with pytest.raises(ValueError, match=r"holds no files|a\.model is not a file"):
            open_clip.get_tokenizer(f"hf-hub:me/folders{len(extra)}")
    with pytest.raises(ValueError, match="holds no files"):
        open_clip.get_tokenizer(f"local-dir:{exported}")


@pytest.fixture
def hostile(tiny_model, tmp_path):
    """A checkpoint that a push takes, with a record whose every word is hostile."""
    about = {
        "config": model_config_of(tiny_model, "PCMEpp-tiny"),
        "hyperparameters": {EVIL: 1, "lr": EVIL, "epochs": EVIL, "deep": {"a": [EVIL]}, 3: 4, "wd": 0.1, "n": [[[]]]},
        "data": [{"name": EVIL, "samples": EVIL, "share": EVIL}, {"name": "cc3m", "samples": -1, "share": EVIL}, EVIL],
        "changes": [
            *(EVIL, {"step": EVIL, "lr": [1, 2]}, {"step": 3, "lr": [EVIL, 1], EVIL: [1, 2], "beta1": EVIL}),
            {"step": 7, "wd": [0.2, 0.1]},
        ],
        "versions": {"torch": EVIL, EVIL: "1", "python": "3.11"},
        EVIL: EVIL,
    }
    training = {"step": EVIL, "samples_seen": 64}
    path = tmp_path / "run/checkpoints/epoch_1.pt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": tiny_model.state_dict(), "about": about, "training": training, "epoch": 1}, path)
    return path


LINES = [
    EVIL,
    "\0\0\0",
    "[" * 5000,
    "[]",
    "null",
    '{"epoch": "1"}',
    '{"epoch": NaN, "image_to_text_R@1": 0.1}',
    '{"epoch": {}, "samples": []}',
    json.dumps({"epoch": 1, EVIL: 0.5, "clip_val_loss": EVIL, "text_to_image_R@1": {}, "num_samples": EVIL}),
    '{"epoch": 1, "samples": 16, "loss": 1e999, "match_loss": "x", "x_loss": ' + "9" * 4000 + "}",
    '{"epoch": 1, "samples": 32, "loss": 2.5, "$bad_loss": 1}',
    '{"epoch": 1, "text_to_image": [[1, 2], [3]], "image_to_text": "x", "$": [[1], [2]], "a": [[1, 2], [1, null]]}',
    '{"epoch": 1, "image_to_text_R@1": 0.25, "samples": 64, "loss": 1.5',
]


def test_a_hostile_record_and_damaged_results_are_no_part_of_a_card(hostile, capsys):
    for name in (record.RESULTS, record.HISTORY, record.UNCERTAINTY):
        (hostile.parent / name).write_text("\n".join(LINES))
    good = '\n{"epoch": 1, "image_to_text_R@1": 0.25, "samples": 64, "loss": 1.5}'
    (hostile.parent / record.RESULTS).write_text("\n".join(LINES) + good)
    assert cli.main(["push", str(hostile.parent.parent), "me/x", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    card = shown[shown.index("---\n") :]
    for word in ("script", "evil", "Owned", "\x1b", "\x9b", "\\x1b"):
        assert word not in shown, word
    assert card.count("\n---\n") == 1
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "mit"
    assert "image_to_text_R@1 | 0.2500" in card and "cc3m" in card and "| wd | `0.1` |" in card and "3.11" in card
    assert "| 7 | wd | `0.2` | `0.1` |" in card and "lr" not in card and "beta1" not in card


RECORDS = [EVIL, [1], {"config": None}, {"config": EVIL}, {"config": {"model_cfg": EVIL}}, {"x": 1}]


def test_a_record_without_a_config_is_said_in_one_sentence(hostile, capsys):
    saved = torch.load(hostile)
    for record_ in RECORDS:
        torch.save({**saved, "about": record_}, hostile)
        assert cli.main(["push", str(hostile), "me/x", "--dry-run"]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("pcmepp push: ") and "\x1b" not in shown and shown.count("\n") == 1


def test_results_that_cannot_be_read_are_said_in_one_sentence(hostile, capsys):
    (hostile.parent / record.RESULTS).mkdir()
    assert cli.main(["push", str(hostile), "me/x", "--dry-run"]) == 2
    assert "results.jsonl cannot be read: Is a directory" in capsys.readouterr().err


def test_names_of_tensors_are_no_commands_to_a_terminal(tiny_model, tmp_path, capsys):
    torch.save({**tiny_model.state_dict(), f"uncertainty_{ESC}": torch.zeros(1)}, tmp_path / "evil.pt")
    assert cli.main(["convert", str(tmp_path / "evil.pt"), str(tmp_path / "clip.safetensors")]) == 0
    assert cli.main(["push", str(tmp_path / "evil.pt"), "me/x", "--model", "PCMEpp-tiny", "--dry-run"]) == 2
    (tmp_path / "x.json").write_text(json.dumps({"model_cfg": {"pcmepp_cfg": {}, ESC: 1}}))
    (tmp_path / "open_clip_config.json").write_text((tmp_path / "x.json").read_text())
    (tmp_path / "open_clip_model.safetensors").write_bytes((tmp_path / "clip.safetensors").read_bytes())
    assert cli.main(["push", str(tmp_path), "me/x", "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert r"\x1b[2J" in shown.out + shown.err and not re.search("[\x1b\x07\x9b]", shown.out + shown.err)


@pytest.mark.parametrize("mask, mode", [(0o077, 0o600), (0o002, 0o664)])
def test_files_follow_the_umask(mask, mode, tiny_model, tmp_path):
    write_shards(tmp_path / "d", [4])
    torch.save(tiny_model.state_dict(), tmp_path / "model.pt")
    before = os.umask(mask)
    try:
        assert cli.main(["data", "count", f"{tmp_path}/d/00000.tar"]) == 0
        export_model(tiny_model, tmp_path / "exported", "PCMEpp-tiny", card="a card")
        for name in ("clip.safetensors", "clip.pt"):
            assert cli.main(["convert", str(tmp_path / "model.pt"), str(tmp_path / name)]) == 0
        Store(tmp_path, "").write("clip.encoded", {"mean": torch.zeros(2, 3)})
    finally:
        os.umask(before)
    written = [*(tmp_path / "d").glob("sizes*"), *(tmp_path / "exported").iterdir(), *tmp_path.glob("clip.*")]
    assert len(written) == 8
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written} == {p.name: oct(mode) for p in written}


# Places that cannot be written to: below a file, in a file system without room for anyone, a folder in a file's place.


def test_an_out_that_cannot_be_written_to_is_said_before_the_work(tiny_model, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    torch.save(tiny_model.state_dict(), tmp_path / "model.pt")
    write_retrieval(tmp_path / "data")
    training = split("--model PCMEpp-tiny --dataset-type synthetic --train-num-samples 8 --batch-size 4 --epochs 1")
    for place in ("file/out", "/proc/out", "/dev/null"):
        out = str(tmp_path / place)
        for command in (
            ["eval", "--model", "PCMEpp-tiny", "--retrieval", str(tmp_path / "data"), "--out", out],
            ["demo", "--out", out],
            ["convert", str(tmp_path / "model.pt"), f"{out}/clip.pt"],
            ["train", *training, "--logs", out],
        ):
            assert cli.main(command) == 2, command
            shown = capsys.readouterr().err.strip().splitlines()[-1]
            assert shown.startswith(f"pcmepp {command[0]}: ") and out in shown, shown


def test_a_folder_in_the_place_of_a_file(tiny_model, tmp_path, capsys):
    torch.save(tiny_model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "clip.pt").mkdir()
    assert cli.main(["convert", str(tmp_path / "model.pt"), str(tmp_path / "clip.pt"), "--overwrite"]) == 2
    (tmp_path / "out/results.json").mkdir(parents=True)
    write_retrieval(tmp_path / "data")
    evaluation = ["--model", "PCMEpp-tiny", "--retrieval", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert cli.main(["eval", *evaluation]) == 2
    shown = capsys.readouterr().err
    assert "clip.pt is a folder" in shown and "results.json is a folder" in shown
