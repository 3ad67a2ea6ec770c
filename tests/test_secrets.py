"""Passwords with hostile characters: in nothing that a run writes, shows or sends to its trackers."""

import argparse
import base64
import json
from urllib.parse import quote

import pytest
from drawn_shards import write_shards
from helpers import run_python, split
from shard_maker import serve

from pcmepp_openclip.system.redact import redact, redact_args
from pcmepp_openclip.training import command as train

WORDS = ["alpha7", "bravo7", "charlie7", "delta7", "echo7"]
PASSWORD = "alpha7;bravo7'charlie7|delta7 echo7"
HOSTILE = [
    PASSWORD,
    'alpha7"bravo7`charlie7$delta7\techo7',
    "alpha7@bravo7:charlie7<delta7>echo7",
    "alpha7/bravo7?charlie7#delta7@echo7",
    "alpha7?bravo7/charlie7=delta7&echo7",
    "alpha7,bravo7=charlie7:delta7\\echo7",
    "alpha7.tar bravo7%27charlie7 delta7=1,echo7",
    "alpha7 'bravo7' \"charlie7\" (delta7) [echo7]",
]


def leaks(text: str) -> list[str]:
    return [word for word in WORDS if word in text]


FORMS = [
    "https://user:{}@host/cc3m/{{00000..00331}}.tar",
    "cc3m=https://{}@host/x.tar",
    "https://host/x.tar?sig={}",
    "https://host/x.tar?sig=1&key={}",
    "https://host/x.tar;sig={}",
    "https://host/cc3m;v=1;sig={}/{{00000..00331}}.tar?x=1",
    "https://host/x.tar#{}",
    "/data/x.tar::b=s3://key:{}@bucket/x.tar::c=/data/y.tar",
    "<urlopen error: cannot read 'https://user:{}@host/x.tar': 404>",
]


def test_a_password_of_any_characters_is_hidden():
    for form in FORMS:
        for password in HOSTILE:
            shown = redact(form.format(password))
            assert leaks(shown) == [], shown


def test_a_pipe_shows_its_program_and_its_shard():
    for command in (
        "curl -u 'user:{}' https://host/0.tar",
        "KEY='{}' aws s3 cp s3://b/0.tar -",
        "KEY=alpha7\\ bravo7 aws s3 cp s3://b/0.tar -",
        "curl https://user:alpha7.tar@host/0.tar",
    ):
        shown = redact("pipe:" + command.format(PASSWORD.replace("'", "")))
        assert leaks(shown) == [] and shown.endswith("*** 0.tar") and shown[5:8] in ("cur", "aws"), shown


def test_sizes_are_protected_like_the_data():
    for password in HOSTILE:
        text = f"a=https://u:{password}@h/s.json,b=/data/b.json"
        args = argparse.Namespace(train_data_sizes=text)
        assert redact_args(args) == {"train_data_sizes": text} and leaks(args.train_data_sizes) == []
        args = argparse.Namespace(train_data_sizes=f"a=https://h/s.json?key={password}")
        redact_args(args)
        assert leaks(args.train_data_sizes) == []


def test_what_was_an_argument_is_hidden_wherever_it_turns_up():
    redact_args(argparse.Namespace(train_data=f"https://user:{quote(PASSWORD)}@host/x.tar?key=foxtrot7foxtrot7"))
    redact_args(argparse.Namespace(train_data="https://host/cc3m;sig=golf7golf7golf7/x.tar"))
    assert "golf7" not in redact("GET /cc3m;sig=golf7golf7golf7/x.tar") + redact("denied: golf7golf7golf7")
    assert redact("cannot read https://host/x.tar;sig=hotel7, 404") == "cannot read https://host/x.tar;sig=*** 404"
    header = base64.b64encode(f"user:{PASSWORD}".encode()).decode()
    for text in (f"denied: {PASSWORD}", f"denied: {quote(PASSWORD)}", f"Basic {header}", f"{[PASSWORD]}"):
        assert leaks(redact(text)) == [] and header not in redact(text), redact(text)
    assert "foxtrot7f" not in redact("foxtrot7foxtrot7")


@pytest.mark.parametrize("flag", ["--resume", "--cache-dir"])
def test_a_login_in_another_argument_is_refused(flag, capsys):
    flags = ["--model", "PCMEpp-tiny", "--dataset-type", "synthetic", "--train-num-samples", "8"]
    assert train.main([*flags, flag, f"sftp://user:{PASSWORD}@host/x.pt"]) == 2
    shown = capsys.readouterr().err
    assert f"{flag} holds a login or a key" in shown and leaks(shown) == []


def test_nothing_that_a_run_writes_holds_a_password(tmp_path):
    """A run with all of its trackers, whose data, sizes and validation data each need a secret, and whose data are
    partly broken; then every byte of every file."""
    write_shards(tmp_path / "d", 3, 16)
    shards = sorted((tmp_path / "d").glob("*.tar"))
    shards[1].write_bytes(b"<html>")
    sizes = {shard.name: 16 for shard in shards[:2]}
    (tmp_path / "s.json").write_text(json.dumps(sizes))
    login = base64.b64encode(f"user:{PASSWORD}".encode()).decode()
    with serve(tmp_path, login=f"Basic {login}") as server:
        url = server.url.replace("http://", f"http://user:{PASSWORD}@")
        names = ",".join(shard.stem for shard in shards[:2])
        command = ["-m", "pcmepp_openclip.train", f"--train-data=a={url}/d/{{{names}}}.tar?key=golf7;golf7"]
        command += ["--train-data-sizes", f"a={url}/s.json?key=golf7;golf7", "--wandb-notes", f"from {url}/d"]
        command += ["--val-data", f"pipe:cat {shards[2]}; : 'golf7;{PASSWORD.replace(chr(39), '')}'"]
        command += ["--logs", str(tmp_path / "logs"), "--name", "run", "--report-to", "tensorboard,wandb", "--debug"]
        command += split(
            "--model PCMEpp-tiny --workers 1 --warmup 1 --dataset-type webdataset --batch-size 8 --epochs 1"
        )
        command += split("--val-num-samples 16 --train-data-max-bad-fraction 1 --train-data-retries 0 --precision fp32")
        env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "logs")}
        done = run_python(*command, "--log-every-n-steps", "1", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not a tar" in done.stderr and "***@127.0.0.1" in done.stderr
    written = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file()}
    names = {path.name for path in written}
    assert {"params.txt", "out.log", "epoch_1.pt", "run-run.wandb", "results.jsonl"} <= names, names
    everything = {**written, "stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    for path, content in everything.items():
        for secret in [*WORDS, "golf7", login, base64.b64encode(PASSWORD.encode()).decode()]:
            assert secret.encode() not in content, f"{secret} in {path}"
