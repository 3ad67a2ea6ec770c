"""Shards on servers: a slice is read without what lies before it, object stores give the same samples, and nothing
depends on what the process that forked the workers had open."""

import http.server
import json
import logging
import os
import sys
import tarfile
import threading
import urllib.request

import boto3
import pytest
from moto.server import ThreadedMotoServer
from shard_maker import arguments, flat, load, pair, serve, write_shards, write_tar

from pcmepp_openclip import cli
from pcmepp_openclip.data.resuming import MissingShard
from pcmepp_openclip.data.shards import iter_samples
from pcmepp_openclip.data.sizes import OffsetRecorder, ShardSize, read_sizes
from pcmepp_openclip.data.sources import parse_sources
from pcmepp_openclip.data.streams import open_shard

SECRET, TOKEN = "sEcReT0sEcReT0sEcReT0", "tOkEn1tOkEn1tOkEn1"
SAMPLES, IMAGE_BYTES = 300, 100_000


def read(place: str, size: ShardSize = ShardSize(0), start: int = 0, stop: int | None = None):  # noqa: B008
    """Keys, captions and images, and what was noted."""
    noted = []
    samples = iter_samples(
        place, lambda cause, count, where: noted.append((cause, count)), size=size, start=start, stop=stop, retries=1
    )
    return [(sample.key, sample.caption, sample.image) for sample in samples if sample], noted


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A counted shard of 30 MB with an unusable sample in every tenth place and names of every length."""
    folder = tmp_path_factory.mktemp("large") / "d"
    samples = []
    for i in range(SAMPLES):
        sample = pair(f"{'x' * (i % 7 * 40)}{i:05d}", image=os.urandom(IMAGE_BYTES))
        samples.append(sample if i % 10 else [item for item in sample.items() if not item[0].endswith(".txt")])
    write_tar(folder / "0.tar", samples)
    # The images are noise: what counts here is only which groups have a caption.
    recorder = OffsetRecorder()
    with tarfile.open(folder / "0.tar") as tar:
        starts = [info.offset for info in tar if info.name.endswith(".jpg")]
    for index, offset in enumerate(starts):
        recorder.add(index, offset)
    report = {
        "usable": SAMPLES * 9 // 10,
        "unusable": {"no caption": list(range(0, SAMPLES, 10))},
        "stride": recorder.stride,
        "offsets": recorder.offsets,
    }
    (folder / "sizes.json").write_text(json.dumps({"0.tar": report["usable"]}))
    (folder / "sizes.report.json").write_text(json.dumps({"shards": {"0.tar": report}}))
    ((size,),) = [read_sizes(source) for source in parse_sources(f"{folder}/0.tar")]
    assert size.stride == 16 and len(size.offsets) == -(-SAMPLES // 16)
    return folder, size


def test_a_slice_is_the_same_with_and_without_offsets(large):
    folder, size = large
    without = ShardSize(size.samples, size.unusable)
    with serve(folder) as server, serve(folder, ranges=False) as plain:
        for start, stop in ((0, 5), (9, 11), (130, 140), (265, 270)):
            expected = read(f"{folder}/0.tar", without, start, stop)
            assert len(expected[0]) == stop - start and expected[1] == []
            assert read(f"{folder}/0.tar", size, start, stop) == expected
            for place in (f"{server.url}/0.tar", f"{plain.url}/0.tar"):
                assert read(place, size, start, stop) == read(place, without, start, stop) == expected


def test_a_slice_in_the_middle_is_read_without_what_lies_before_it(large):
    folder, size = large
    start, stop = 200, 210
    before = start / size.samples * (folder / "0.tar").stat().st_size
    with serve(folder) as server:
        samples, noted = read(f"{server.url}/0.tar", size, start, stop)
        assert len(samples) == stop - start and noted == []
        requests = [headers.get("Range") for _, path, headers in server.log]
        sent = server.sent["/0.tar"]
    assert len(requests) == 1 and requests[0] is not None
    # The samples, at most a stride before them, and what was on its way when the connection was closed.
    assert sent < before / 2, f"{sent} bytes were sent, {before:.0f} lie before the slice"


@pytest.mark.parametrize("offset", [512, 10**9])
def test_offsets_of_another_file_are_not_believed(large, offset):
    folder, size = large
    wrong = ShardSize(size.samples, size.unusable, size.stride, (0, *[offset] * (len(size.offsets) - 1)))
    expected = read(f"{folder}/0.tar", ShardSize(size.samples, size.unusable), 200, 203)
    assert read(f"{folder}/0.tar", wrong, 200, 203) == expected
    with serve(folder) as server:
        assert read(f"{server.url}/0.tar", wrong, 200, 203) == expected


def test_counting_records_offsets_where_a_shard_can_be_entered(tmp_path):
    write_tar(tmp_path / "0.tar", [pair(f"{i:03d}") for i in range(100)])
    with tarfile.open(tmp_path / "1.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "0.tar", "0.tar")
    with serve(tmp_path) as server:
        for place in (f"{tmp_path}/0.tar", f"{server.url}/0.tar"):
            assert cli.main(["data", "count", place, "--output", str(tmp_path / "s.json")]) == 0
            ((size,),) = [read_sizes(source, str(tmp_path / "s.json")) for source in parse_sources(place)]
            assert size.stride == 4 and len(size.offsets) == 25
            with tarfile.open(tmp_path / "0.tar") as tar:
                assert size.offsets == tuple(info.offset for info in tar if info.name.endswith("jpg"))[::4]
    for place in (f"{tmp_path}/1.tar.gz", f"pipe:cat {tmp_path}/0.tar"):
        cli.main(["data", "count", place, "--output", str(tmp_path / "t.json")])
        assert all(
            entry["offsets"] == [] for entry in json.loads((tmp_path / "t.report.json").read_text())["shards"].values()
        )


class Chunked(http.server.BaseHTTPRequestHandler):
    """One file whose length is not said."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = self.server.data
        for at in range(0, len(data), 50_000):
            part = data[at : at + 50_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_) -> None:
        pass


def test_a_server_that_says_no_length(large):
    folder, size = large
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chunked)
    server.data = (folder / "0.tar").read_bytes()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_port}/0.tar"
        assert read(place, size, 100, 110) == read(f"{folder}/0.tar", size, 100, 110)
        with open_shard(place) as file:
            assert file.read() == server.data
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def store(monkeypatch):
    """Writes an object to the bucket of an S3-compatible object store."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "kEy2kEy2kEy2",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pcmepp_openclip.data.remote._filesystems", {})  # another server, another client
    urllib.request.urlopen(f"{url}/moto-api/reset", b"").read()  # all servers of a process share their buckets
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield lambda key, data: client.put_object(Bucket="bucket", Key=key, Body=data)
    server.stop()


def test_s3_gives_the_same_samples(tmp_path, store, caplog):
    """The parent process reads first, so that the workers are forked from one with open connections."""
    caplog.set_level(logging.DEBUG)
    pattern = write_shards(tmp_path / "d", [40, 30])
    assert cli.main(["data", "count", pattern]) == 0
    for path in (tmp_path / "d").iterdir():
        store(f"d/{path.name}", path.read_bytes())
    expected = flat(load(arguments(pattern, workers=2)))
    data = load(arguments("s3://bucket/d/{00000..00001}.tar", workers=2))
    assert open_shard("s3://bucket/d/00000.tar").read() == (tmp_path / "d/00000.tar").read_bytes()
    assert flat(data) == expected and len(set(expected)) == 70
    assert open_shard("s3://bucket/d/00001.tar").read() == (tmp_path / "d/00001.tar").read_bytes()
    assert SECRET not in caplog.text and TOKEN not in caplog.text and "Signature" not in caplog.text


def test_s3_slices_and_large_objects(large, store):
    folder, size = large
    store("0.tar", (folder / "0.tar").read_bytes())
    with open_shard("s3://bucket/0.tar") as file:
        assert file.read() == (folder / "0.tar").read_bytes()
    for start, stop in ((0, 3), (200, 210), (265, 270)):
        assert read("s3://bucket/0.tar", size, start, stop) == read(f"{folder}/0.tar", size, start, stop)


def test_s3_objects_that_are_missing_or_change(store):
    with pytest.raises(MissingShard, match=r"s3://bucket/none\.tar: there is no such object"):
        open_shard("s3://bucket/none.tar")
    with pytest.raises(MissingShard):
        open_shard("s3://nowhere/none.tar")
    store("x.tar", b"a" * 3_000_000)
    file = open_shard("s3://bucket/x.tar")
    assert file.read(10) == b"a" * 10
    store("x.tar", b"b" * 3_000_000)
    with pytest.raises(MissingShard, match="changed while it was read"):
        file.read()


@pytest.mark.parametrize(
    "scheme, package, extra", [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("az", "adlfs", "azure")]
)
def test_a_store_whose_package_is_missing_names_the_extra(scheme, package, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("pcmepp_openclip.data.remote._filesystems", {})
    assert cli.run(["data", "check", f"{scheme}://bucket/0.tar"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"`pip install 'pcmepp-openclip[{extra}]'`" in said and package in said
