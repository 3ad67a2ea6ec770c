"""Where shards may be: every kind of place gives the same samples, and patterns mean what open_clip's mean."""

import collections
import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import run_python, split
from open_clip_train.data import expand_urls
from shard_maker import arguments, flat, load, serve, within, write_shards

from pcmepp_openclip.data import pace
from pcmepp_openclip.data.resuming import LostShard, MissingShard
from pcmepp_openclip.data.sources import parse_sources, shard_key, sibling
from pcmepp_openclip.data.streams import open_shard


def test_patterns_expand_as_open_clip_expands_them():
    pattern = "/a/{00000..00011}.tar::/b/{x,y}/{0..2}.tar::pipe:cat /c/{0..1}.tar"
    ours = [shard for source in parse_sources(pattern) for shard in source.shards]
    assert ours == expand_urls(pattern, "1::1::1")[0]
    assert len(ours) == 12 + 6 + 2


def test_names_are_given_or_taken_from_the_folder():
    sources = parse_sources("cc3m=/a/{0..1}.tar::/data/redcaps/0.tar::https://h/x.tar?sig=1::pipe:A=b cat x.tar")
    assert [source.name for source in sources] == ["cc3m", "redcaps", "source3", "source4"]
    assert sources[2].shards == ("https://h/x.tar?sig=1",)
    assert sources[3].shards == ("pipe:A=b cat x.tar",)


def test_patterns_that_cannot_be_understood():
    for pattern, words in {
        "a=/x/0.tar::a=/y/0.tar": "two sources named 'a'",
        "ftp://host/0.tar": "pipe:ssh host cat",
        "/x/{0..1.tar": "braces",
        "/nowhere/*.tar": "no shard matches",
        "::": "is empty",
        "/x/{0,0}.tar": "twice",
        "hf://models/x/0.tar": "an unknown kind",
        "/x/{0..99999999999}.tar": "more than 1,000,000 shards",
        "/x/{1..2000}{1..2000}.tar": "more than 1,000,000 shards",
        "/x/" + "{a,b}" * 40: "more than 1,000,000 shards",
        "/x/\x1b[31m{": "braces",
    }.items():
        with pytest.raises(ValueError, match=r"--train-data.*") as error:
            parse_sources(pattern)
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_star_finds_local_shards_in_order(tmp_path):
    write_shards(tmp_path, [1, 1, 1])
    assert [shard_key(shard) for shard in parse_sources(f"{tmp_path}/*.tar")[0].shards] == [
        "00000.tar",
        "00001.tar",
        "00002.tar",
    ]


def test_keys_and_neighbours_of_shards():
    assert shard_key("pipe:curl -s https://h/d/00001.tar?x=1 | cat") == "00001.tar"
    assert shard_key("https://h/d/00001.tar?sig=a/b") == "00001.tar"
    assert sibling("https://h/d/00001.tar?sig=a/b", "sizes.json") == "https://h/d/sizes.json?sig=a/b"
    assert sibling("hf://datasets/o/n@r/d/0.tar", "sizes.json") == "hf://datasets/o/n@r/d/sizes.json"
    assert sibling("pipe:cat 0.tar", "sizes.json") is None


@pytest.fixture
def shards(tmp_path):
    """Two shards with their sizes, and the captions in them."""
    write_shards(tmp_path / "d", [9, 7])
    (tmp_path / "d" / "sizes.json").write_text(json.dumps({"00000.tar": 9, "00001.tar": 7}))
    expected = sorted(flat(load(arguments(f"{tmp_path}/d/{{00000..00001}}.tar"))))
    assert len(set(expected)) == 16
    return tmp_path, expected


def test_http_reads_the_same_and_its_sizes(shards):
    root, expected = shards
    with serve(root, login="Basic dXNlcjpzM2NyM3Q=") as server:  # user:s3cr3t
        url = server.url.replace("http://", "http://user:s3cr3t@") + "/d/{00000..00001}.tar"
        assert sorted(flat(load(arguments(url, workers=2)))) == expected


def test_pipes_and_local_files_mix(shards, tmp_path):
    root, expected = shards
    sizes = tmp_path / "given.json"
    sizes.write_text(json.dumps({"00001.tar": 7}))
    data = load(
        arguments(f"{root}/d/00000.tar::b=pipe:cat {root}/d/00001.tar", "--train-data-sizes", f"b={sizes}", workers=1)
    )
    assert sorted(flat(data)) == expected


@pytest.fixture
def hub(shards, monkeypatch):
    """The addresses of a dataset repo on the Hugging Face Hub, as files of a server."""
    root, expected = shards
    (root / "datasets/org/pairs/resolve").mkdir(parents=True)
    (root / "datasets/org/pairs/resolve/main").symlink_to(root / "d")
    listing = root / "api/datasets/org/pairs/tree/main"
    listing.parent.mkdir(parents=True)
    names = ["00000.tar", "00001.tar", "README.md", "sizes.json"]
    listing.write_text(json.dumps([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]))
    with serve(root) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server, expected


@pytest.mark.parametrize("pattern", ["{00000..00001}.tar", "*.tar"])
def test_hugging_face_repos(hub, pattern):
    server, expected = hub
    data = load(arguments(f"hf://datasets/org/pairs/{pattern}"))
    assert sorted(flat(data)) == expected
    tar = next(headers for _, path, headers in server.log if path.endswith("00001.tar"))
    assert tar["Authorization"] == "Bearer hf_secret"


def test_a_run_lists_a_repo_and_reads_its_sizes_once_per_rank(hub, tmp_path):
    """From the check of its flags to the last epoch, on two ranks."""
    server, _ = hub
    flags = split("--model PCMEpp-tiny --train-data hf://datasets/org/pairs/*.tar --dataset-type webdataset")
    flags += split("--workers 1 --batch-size 4 --epochs 2 --precision fp32 --warmup 1")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "pcmepp_openclip.train"]
    env = {"HF_ENDPOINT": server.url, "OMP_NUM_THREADS": "1"}
    done = run_python("-m", *torchrun, *flags, "--logs", str(tmp_path / "logs"), env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    asked = collections.Counter(path.partition("?")[0].rpartition("/")[2] for _, path, _ in server.log)
    assert asked["main"] == 2, "listings"
    assert asked["sizes.json"] == asked["sizes.report.json"] == 2
    assert asked["00000.tar"] >= 2 and asked["00001.tar"] >= 2, "each epoch reads both"


def test_places_without_anything(tmp_path):
    with serve(tmp_path) as server, pytest.raises(MissingShard, match="404"):
        open_shard(f"{server.url}/x.tar?token=s3cr3t", 5).read()
    with pytest.raises(LostShard, match="tries"):
        open_shard("http://127.0.0.1:9/x.tar", 1)
    with pytest.raises(MissingShard):
        open_shard(str(tmp_path / "x.tar"))


def test_a_command_that_fails_at_its_end_is_run_again_and_then_given_up(tmp_path):
    with pytest.raises(LostShard, match="exit status 3"):
        open_shard(f"pipe:echo run >> {tmp_path}/log; exit 3", 1).read()
    assert (tmp_path / "log").read_text().split() == ["run", "run"]


def test_what_a_command_started_ends_when_its_reader_does(tmp_path):
    file = open_shard(f"pipe:echo $$ > {tmp_path}/pid; yes")
    file.read(10)
    pid = int((tmp_path / "pid").read_text())
    file.close()
    with pytest.raises(ProcessLookupError):
        for _ in range(300):  # killed, but whoever collects orphans may need a moment
            os.killpg(pid, 0)
            time.sleep(0.1)


@contextlib.contextmanager
def dripping(head: bytes, body: bytes, pause: float, per_connection: int = 10**9):
    """A server of one file that sends its answer byte by byte."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        with contextlib.suppress(OSError), connection:
            asked = connection.recv(1 << 16)
            at = int(re.search(rb"bytes=(\d+)-|$", asked)[1] or 0)
            part = b"HTTP/1.1 206 OK\r\nContent-Range: bytes %d-%d/%d\r\n" % (at, len(body) - 1, len(body))
            start = part if at else b"HTTP/1.1 200 OK\r\n"
            connection.sendall(start + b'ETag: "x"\r\nContent-Length: %d\r\n' % (len(body) - at))
            for byte in head + b"\r\n" + body[at : at + per_connection]:
                connection.sendall(bytes([byte]))
                time.sleep(pause)

    def run():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x.tar"
    finally:
        listener.close()


class Said(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def patiently(place):
    """What reading a place comes to when patience is short, and what is said meanwhile."""
    pace.SLOW_NOTICE_S, pace.PATIENCE_S, pace.COMMAND_PATIENCE_S = 0.3, 0.9, 0.9
    said = Said()
    logging.getLogger().addHandler(said)
    try:
        return len(open_shard(place, 1).read()), said.lines
    except LostShard as error:
        return str(error), said.lines


DRIPS = {
    "one byte at a time": (b"", b"x" * 10**6, 0.05),
    "its header one byte at a time": (b"X: " + b"x" * 10**5, b"", 0.05),
    "nothing": (b"", b"x" * 10**6, 60.0),
    "one byte per connection": (b"", b"x" * 10**6, 0.0, 1),
    "a command": "pipe:while :; do printf x; sleep 0.05; done",
    "a silent command": "pipe:sleep 1000",
}


def test_what_drips_is_given_up_after_a_notice():
    """Servers and commands, all at the same time: each is a process that waits. With one byte per connection the number
    of tries ends it, and nothing is said."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(DRIPS)) as pool:
        places = [x if isinstance(x, str) else stack.enter_context(dripping(*x)) for x in DRIPS.values()]
        answers = list(pool.map(lambda place: within(15, patiently, place), places))
    for name, place, (ended, lines) in zip(DRIPS, places, answers, strict=True):
        assert "(2 tries)" in str(ended), name
        if name != "one byte per connection":
            assert lines and re.search(rf"waited .* bytes per second for {place[:4]}", lines[0]), name


def test_a_server_that_is_only_slow_is_read_to_the_end(tmp_path):
    with dripping(b"", b"x" * 6000, 0.0002) as url:
        found, _ = within(30, patiently, url)
    assert found == 6000


def test_a_reader_that_takes_its_time_is_not_taken_for_a_slow_server(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SLOW_NOTICE_S", 0.1)
    monkeypatch.setattr(pace, "PATIENCE_S", 0.2)
    (tmp_path / "x.tar").write_bytes(os.urandom(3_000_000))
    with serve(tmp_path) as server, open_shard(f"{server.url}/x.tar", 0) as file:
        for _ in range(3):
            assert len(file.read(1_000_000)) == 1_000_000
            time.sleep(0.5)


@pytest.mark.parametrize("tells, ranges", [((), True), (("date",), True), (("tag",), True), ((), False)])
def test_a_file_that_changes_while_it_is_read_is_not_spliced_together(tmp_path, tells, ranges):
    path = tmp_path / "x.tar"
    path.write_bytes(b"a" * 3_000_000)
    with serve(tmp_path, ranges=ranges, tells=tells) as server:
        server.drops["/x.tar"] = 1
        file = open_shard(f"{server.url}/x.tar", 2)
        assert file.read(10) == b"a" * 10
        path.write_bytes(b"b" * 3_000_000)
        os.utime(path, (0, 0))
        with pytest.raises(MissingShard, match="changed while it was read"):
            file.read()
        server.drops["/x.tar"] = 2  # one that stays is read whatever the server tells
        with open_shard(f"{server.url}/x.tar", 2) as file:
            assert file.read() == b"b" * 3_000_000


def test_a_command_whose_output_changes_is_not_spliced_together(tmp_path):
    count = f"echo >> {tmp_path}/log; n=$(wc -l < {tmp_path}/log)"
    with pytest.raises(MissingShard, match="changed while it was read"):
        open_shard(f"pipe:{count}; yes $n | head -c 3000000; exit 1", 3).read()
