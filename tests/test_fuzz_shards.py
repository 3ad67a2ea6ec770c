"""Any bytes for a shard: its reader ends soon, with samples and notes, and never with an exception."""

import io
import random
import tarfile
import time

import pytest
from hostile_tars import END, HOSTILE, good, header, padded, pax
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shard_maker import pair
from webdataset.tariterators import base_plus_ext

from pcmepp_openclip.data import defects, tars
from pcmepp_openclip.data.captioned import read_captioned
from pcmepp_openclip.data.count import count_shard
from pcmepp_openclip.data.shards import iter_samples

LONGEST_S = 3.0
TYPES = [bytes([code]) for code in range(128)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "0.tar"


def read_all_ways(place, data: bytes, slow_ways: bool) -> None:
    """Every reader of shards, over bytes. What each may say is checked, and how long it takes."""
    place.write_bytes(data)
    ways = [str(place), *([f"pipe:cat {place}"] if slow_ways else [])]
    keys = []
    for way in ways:
        begun, noted = time.monotonic(), []
        samples = list(iter_samples(way, lambda *note, noted=noted: noted.append(note[::2]), retries=0))
        keys.append([sample.key for sample in samples if sample])
        assert {cause for cause, _ in noted} <= {value for name, value in vars(defects).items() if name.isupper()}
        assert all(where.isprintable() for _, where in noted)
        assert time.monotonic() - begun < LONGEST_S
    assert keys[0] == keys[-1], "a file and a stream give the same"
    begun = time.monotonic()
    count = count_shard(str(place), 10**6, retries=0)
    assert count.usable <= len(keys[0]) and (count.cause is None) <= (not count.problem)
    try:
        read_captioned(str(place))
    except ValueError as error:
        assert "--retrieval" in str(error) and "\n" not in str(error)
    assert time.monotonic() - begun < LONGEST_S


def whole(samples: int = 3, format: int = tarfile.GNU_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for number in range(samples):
            for name, data in pair(f"{number}" + "x" * 120 * (number % 2)).items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


WHOLE = [whole(format=tarfile.GNU_FORMAT), whole(format=tarfile.PAX_FORMAT), *HOSTILE.values()]
WHOLE = [data for data in WHOLE if len(data) < 1 << 17]


def repaired(data: bytearray, at: int) -> None:
    """The checksum of the header in a block, so that a change in it is not seen by that alone."""
    block = data[at : at + 512]
    if len(block) == 512:
        block[148:156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(block)


CHANGES = st.lists(st.tuples(st.integers(0), st.binary(min_size=1, max_size=12)), max_size=5)


@given(st.sampled_from(WHOLE), CHANGES, st.booleans())
def test_damaged_tars(place, data, changes, repair):
    changed = bytearray(data)
    for at, new in changes:
        at %= len(changed)
        changed[at : at + len(new)] = new
        if repair:
            repaired(changed, at - at % 512)
    read_all_ways(place, bytes(changed), slow_ways=False)


BLOCK = st.one_of(
    st.builds(
        header,
        name=st.text("ab./\n\x1b", max_size=20),
        type=st.sampled_from(TYPES),
        size=st.one_of(st.integers(0, 2000), st.integers(-(2**90), 2**90)),
    ),
    st.builds(lambda data, type: pax(data, type), st.binary(max_size=600), st.sampled_from([b"x", b"g", b"X"])),
    st.builds(
        lambda lines, type: pax(b"".join(lines), type),
        st.lists(
            st.builds(
                lambda length, key, value: b"%d %s=%s\n" % (length, key, value),
                st.integers(0, 40),
                st.sampled_from([b"path", b"size", b"GNU.sparse.major", b"GNU.sparse.size", b"mtime"]),
                st.one_of(st.binary(max_size=20), st.integers().map(lambda i: b"%d" % i)),
            ),
            max_size=4,
        ),
        st.sampled_from([b"x", b"g"]),
    ),
    st.binary(max_size=1100).map(padded),
    st.sampled_from([good(["k"]), good(["l"]), bytes(512), END, header("m.jpg", size=3) + padded(b"abc")]),
)


@given(st.lists(BLOCK, max_size=8), st.booleans())
@example([header("\n.", size=0)], True)
def test_tars_of_any_blocks(place, blocks, ended):
    read_all_ways(place, b"".join(blocks) + END * ended, slow_ways=False)


def test_files_and_streams_give_the_same(place):
    """A process for each is dear: fewer, but of both kinds of damage."""
    rng = random.Random(settings().max_examples)
    for _ in range(settings().max_examples // 20):
        changed = bytearray(rng.choice(WHOLE))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(changed))
            changed[at : at + 4] = rng.randbytes(4)
            repaired(changed, at - at % 512)
        read_all_ways(place, bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.3 else changed), True)


@given(st.binary(max_size=5000), st.sampled_from([b"", b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ\0", b"\x5d\0\0\x80"]))
def test_bytes_of_any_kind(place, data, magic):
    read_all_ways(place, magic + data, slow_ways=False)


@given(st.text("ab./", max_size=12))
def test_names_are_split_as_webdataset_splits_them(name):
    stock = base_plus_ext(name)
    assert (tars.split_name(name) or (None, None)) == stock
