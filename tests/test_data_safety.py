"""Privacy and safety: nothing secret is shown, nothing from elsewhere is run."""

import json
import logging
from pathlib import Path

import pytest
from shard_maker import arguments, captions, flat, load, pair, serve, specify, write_shards, write_tar

from pcmepp_openclip import cli
from pcmepp_openclip.system.redact import redact

SECRET = "s3cr3t"


KEPT = [
    (f"https://user:{SECRET}@host/cc3m/{{00000..00331}}.tar", "host/cc3m/{00000..00331}.tar"),
    (f"https://{SECRET}@host/x.tar", "host/x.tar"),
    (f"https://host/x.tar?X-Amz-Signature={SECRET}&X-Amz-Date=2", "https://host/x.tar?X-Amz-Signature=***"),
    (f"https://host/x.tar?{SECRET}", "https://host/x.tar?***"),
    (f"https://host/x.tar#{SECRET}", "https://host/x.tar"),
    (f"s3://key:{SECRET}@bucket/x.tar", "bucket/x.tar"),
    (f"pipe:curl -H 'Authorization: Bearer {SECRET}' https://h/{{0..9}}.tar", "pipe:curl *** {0..9}.tar"),
    (f"pipe:AWS_SECRET_ACCESS_KEY={SECRET} aws s3 cp s3://b/0.tar -", "pipe:aws *** 0.tar"),
    (f"pipe:curl https://u:{SECRET}@h/0.tar?sig={SECRET}", "pipe:curl *** 0.tar"),
    (f"pipe:'{SECRET}'", "pipe:***"),
    (
        f"a=/x/0.tar::b=pipe:x --key {SECRET} 1.tar::https://{SECRET}@h/2.tar",
        "a=/x/0.tar::b=pipe:x *** 1.tar::https://",
    ),
    (f"https://user:{SECRET}/with/slash@host/x.tar", "https://***"),
    (f"cannot read 'https://u:{SECRET}@h/x.tar': 404", ": 404"),
]


def test_redact():
    for text, kept in KEPT:
        assert SECRET in text and SECRET not in redact(text) and kept in redact(text), text


def test_what_holds_no_secret_is_left_as_it_is():
    for text in ("/data/cc3m/{00000..00331}.tar", "hf://datasets/o/n@main/0.tar", "epoch 3: 5 samples"):
        assert redact(text) == text


def test_errors_and_summaries_hold_no_secret(tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    write_shards(tmp_path / "d", [8, 8])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 8, "00001.tar": 8}))
    with serve(tmp_path) as server:
        url = server.url.replace("http://", f"http://u:{SECRET}@") + "/d/{00000..00001}.tar?sig=" + SECRET
        (tmp_path / "d/00001.tar").write_bytes(b"<html>")
        captions(load(arguments(url)))
        assert "not a tar" in caplog.text
        gone = url.replace("/d/", "/gone/")
        for pattern in (
            gone,
            f"pipe:curl -sf -u u:{SECRET} {gone}",
            f"ftp://{SECRET}@b/0.tar",
            f"https://{SECRET}@h/{{0.tar",
        ):
            with pytest.raises(ValueError) as error:
                specify(arguments(pattern, "--train-data-retries", "0", train_num_samples=1), check=True)
            assert SECRET not in str(error.value)
            assert cli.main(["data", "count", pattern, "--retries", "0", "--output", str(tmp_path / "o.json")]) in (
                1,
                2,
            )
        with pytest.raises(ValueError) as error:
            (tmp_path / "d/sizes.json").unlink()
            specify(arguments(url), check=True)
        assert SECRET not in str(error.value)
    shown = capsys.readouterr()
    assert SECRET not in caplog.text + shown.out + shown.err
    assert SECRET not in (tmp_path / "o.json").read_text() + (tmp_path / "o.report.json").read_text()


def test_names_from_elsewhere_run_nothing(tmp_path):
    """A manifest, a listing and members whose names are commands; a URL with a quote, which stock hands to a shell."""
    trap = tmp_path / "trap"
    command = f"pipe:touch {trap}"
    write_tar(tmp_path / "d/00000.tar", [pair("a"), {f"{command}.jpg": b"x", f"{command}.txt": b"x"}, pair("b")])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 3, command: 5, "__shards__": "1"}))
    report = {
        "shards": {command: {"usable": 5, "unusable": {command: [0]}}, "00000.tar": {"usable": 3, "unusable": command}}
    }
    (tmp_path / "d/sizes.report.json").write_text(json.dumps(report))
    assert "caption a" in flat(load(arguments(f"{tmp_path}/d/00000.tar")))
    with serve(tmp_path) as server:
        quoted = f"{server.url}/d/00000.tar?'; touch {trap}; '".replace(" ", "${IFS}")
        assert "caption a" in flat(load(arguments(quoted, train_num_samples=4)))
    assert not trap.exists()


def test_a_star_finds_no_commands(tmp_path, monkeypatch):
    """A file that is called like a command is a file."""
    monkeypatch.chdir(tmp_path)
    write_tar(Path("d/pipe:touch trap.tar"), [pair("a")])
    assert flat(load(arguments("d/*.tar", train_num_samples=4))) == ["caption a"] * 4
    monkeypatch.chdir("d")
    assert flat(load(arguments("*.tar", train_num_samples=4))) == ["caption a"] * 4
    assert not Path("trap").exists() and not Path("trap.tar").exists()
