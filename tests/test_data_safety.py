"""Privacy and safety: nothing secret is shown, nothing from elsewhere is run."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from open_clip_train.data import get_data as stock_get_data
from shard_maker import Words, arguments, captions, flat, load, pair, serve, specify, to_tensor, write_shards, write_tar

from pcmepp_openclip import cli
from pcmepp_openclip.data import DataFlags, resolve
from pcmepp_openclip.data.build import get_data
from pcmepp_openclip.system.redact import redact, redact_args, redact_logs

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text, kept",
    [
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
    ],
)
def test_redact(text, kept):
    assert SECRET in text and SECRET not in redact(text) and kept in redact(text)


@pytest.mark.parametrize(
    "text", ["/data/cc3m/{00000..00331}.tar", "hf://datasets/o/n@main/0.tar", "epoch 3: 5 samples"]
)
def test_what_holds_no_secret_is_left_as_it_is(text):
    assert redact(text) == text


def test_arguments_show_no_secret_and_training_still_reads(tmp_path):
    write_shards(tmp_path / "d", [8])
    (tmp_path / "d/sizes.json").write_text(json.dumps({"00000.tar": 8}))
    with serve(tmp_path, login="Basic dTpzM2NyM3Q=") as server:
        url = server.url.replace("http://", f"http://u:{SECRET}@") + "/d/00000.tar"
        args = arguments(url)
        original = redact_args(args)
        assert SECRET not in str(vars(args)) and SECRET not in json.dumps(vars(args))
        assert original == {"train_data": url}
        spec = resolve(DataFlags.from_args(args, original), check=True)
        assert SECRET not in f"{spec!r} {spec} {spec.flags!r} {spec.sources!r}"
        data = get_data(stock_get_data, spec, args, (to_tensor, to_tensor), tokenizer=Words())["train"]
        assert len(flat(data)) == 8


def test_two_secrets_for_one_place_are_not_mixed_up():
    one, two = arguments("https://a@h/x.tar"), arguments("https://b@h/x.tar")
    assert redact_args(one)["train_data"] == "https://a@h/x.tar"
    assert redact_args(two)["train_data"] == "https://b@h/x.tar"
    assert one.train_data == two.train_data == "https://***@h/x.tar"


def test_params_txt_and_the_log_of_open_clip_hold_no_secret(tmp_path):
    """Stock open_clip's main, up to where it has written its parameters; the data come from a server with a login."""
    write_tar(tmp_path / "d/0.tar", [pair(f"{i}") for i in range(8)])
    (tmp_path / "d/sizes.json").write_text('{"0.tar": 8}')
    script = """
import argparse, functools, sys
import pcmepp_openclip
from open_clip_train import main as host
from pcmepp_openclip import data
from pcmepp_openclip.data.build import get_data
from pcmepp_openclip.system.redact import redact_args
def parse(argv, stock=host.parse_args):
    own = argparse.ArgumentParser(allow_abbrev=False)
    data.add_arguments(own)
    ours, rest = own.parse_known_args(argv)
    args = argparse.Namespace(**vars(stock(rest)), **vars(ours))
    spec = data.resolve(data.DataFlags.from_args(args, redact_args(args)))
    host.get_data = functools.partial(get_data, host.get_data, spec)
    return args
host.parse_args = parse
host.train_one_epoch = lambda model, data, *a, **k: print(sum(len(t) for _, t in data["train"].dataloader), "seen")
host.main(sys.argv[1:])
"""
    with serve(tmp_path, login="Basic dTpzM2NyM3Q=") as server:
        url = server.url.replace("http://", f"http://u:{SECRET}@") + "/d/{0..0}.tar?token=" + SECRET
        flags = ["--dataset-type", "webdataset", "--model", "PCMEpp-tiny", "--workers", "1", "--batch-size", "4"]
        flags += ["--epochs", "1", "--name", "run", "--logs", str(tmp_path / "logs"), "--train-data-retries", "1"]
        done = subprocess.run(
            [sys.executable, "-c", script, "--train-data", url, *flags],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 seen" in done.stdout
    written = [path for path in (tmp_path / "logs").rglob("*") if path.suffix in (".txt", ".log")]
    assert {path.name for path in written} == {"params.txt", "out.log"}
    for text in [*(path.read_text() for path in written), done.stdout, done.stderr]:
        assert SECRET not in text
    assert "train_data: http://***@127.0.0.1" in (tmp_path / "logs/run/params.txt").read_text()


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


def test_messages_of_others_are_redacted_where_asked(capsys):
    logger, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    try:
        redact_logs()
        logging.warning("Handling webdataset error (%r)", f"https://u:{SECRET}@h/0.tar")
    finally:
        logger.removeHandler(handler)
    out = capsys.readouterr().out
    assert "h/0.tar" in out and SECRET not in out


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
