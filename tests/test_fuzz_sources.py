"""Any text for --train-data, any content for a sizes.json: what can be understood, or one sentence."""

import json
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from shard_maker import arguments, specify, write_shards

from pcmepp_openclip.data.sizes import MAX_SAMPLES, ShardSize
from pcmepp_openclip.data.sources import kind, label, parse_sources, shard_key, sibling

PIECES = st.sampled_from(
    [
        *("a=", "b=", "::", ":", "/", "/data/", "{0..3}", "{a,b}", "{", "}", ",", "..", "{9..1..2}", "{00000..00011}"),
        *("*", "?", "pipe:", "cat ", "http://", "https://u:p@h/", "s3://b/", "hf://datasets/o/n/", "file://", "gs://"),
        *("hf://datasets/o/n@r/", "x.tar", ".tar", "?sig=1", " ", "\n", "\0", "é", "'", '"', "$(x)", "\\", "%", "~"),
        *("{1..999999999999}", "{-9..99999999999999999999}"),
    ]
)
TEXT = st.one_of(st.lists(PIECES, max_size=8).map("".join), st.text(max_size=40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "d"
    write_shards(folder, [2, 2])
    return folder


@given(TEXT)
@example("\n{1..999999999999}")
@example("\x00http://*")
def test_any_specification_is_understood_or_one_sentence(text):
    if "hf://" in text and "*" in text:
        return  # would ask the Hub
    try:
        sources = parse_sources(text)
    except ValueError as error:
        assert str(error).startswith("--train-data") and str(error).isprintable(), str(error)
        return
    assert sources and len({source.name for source in sources}) == len(sources)
    for source in sources:
        assert source.shards and len(set(source.shards)) == len(source.shards)
        for shard in source.shards:
            assert kind(shard) != "unknown"
            assert isinstance(label(shard), str) and isinstance(shard_key(shard), str)
            sibling(shard, "sizes.json")


NUMBER = st.one_of(
    st.integers(), st.integers(0, 5), st.floats(), st.text(string.digits + "²x", max_size=4), st.booleans(), st.none()
)
NAME = st.one_of(st.sampled_from(["00000.tar", "00001.tar", "shards", "usable", "unusable"]), st.text(max_size=5))
JSON = st.recursive(
    NUMBER, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAME, inner, max_size=4))
)
SIZES = st.fixed_dictionaries({"00000.tar": NUMBER, "00001.tar": NUMBER})


@given(st.one_of(JSON, SIZES, SIZES), st.one_of(JSON, SIZES))
@example(None, None)
def test_any_sizes_are_numbers_or_one_sentence(folder, sizes, report):
    (folder / "sizes.json").write_text(json.dumps(sizes))
    (folder / "sizes.report.json").write_text(json.dumps({"shards": report} if isinstance(report, dict) else report))
    read(folder)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_for_sizes_are_numbers_or_one_sentence(folder, sizes, report):
    (folder / "sizes.json").write_bytes(sizes)
    (folder / "sizes.report.json").write_bytes(report)
    read(folder)


def read(folder) -> None:
    try:
        spec = specify(arguments(f"{folder}/{{00000..00001}}.tar"))
    except ValueError as error:
        assert "sizes" in str(error) and str(error).isprintable() and len(str(error)) < 1000
        return
    (sizes,) = spec.sizes
    assert all(isinstance(size, ShardSize) and 0 <= size.samples <= MAX_SAMPLES for size in sizes)
    assert all(isinstance(index, int) and index >= 0 for size in sizes for index in size.unusable)
    assert 0 < spec.samples <= 2 * MAX_SAMPLES
