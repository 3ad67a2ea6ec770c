"""Checkpoint files under any damage: none is taken for good, none is a traceback, the one before is taken."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pcmepp_openclip.runs import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints of a small model and its optimizer."""
    folder = tmp_path_factory.mktemp("fuzz")
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    parts = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": [(1, 2.5, "x")]}
    for epoch in (1, 2):
        assert checkpoints.save({"epoch": epoch, **parts}, folder / f"epoch_{epoch}.pt")
    return folder


def places(share):
    """Of a byte, often near the end, where the directory and the digest are."""
    return st.floats(0, 1, exclude_max=True).map(lambda x: 1 - share * (1 - x))


place = places(1) | places(0.3) | places(0.02)
damages = st.one_of(
    st.tuples(st.just("flip"), place, st.integers(0, 7)),
    st.tuples(st.just("cut"), place),
    st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("overwrite"), place, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("drop"), place, st.integers(1, 600)),
    st.tuples(st.just("append"), st.just(0.0), st.binary(min_size=1, max_size=200)),
)


def damaged(data, kind, where, what=None):
    at = min(int(where * len(data)), len(data) - 1)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << what]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "append":
        return data + what
    if kind == "drop":
        return data[:at] + data[at + what :]
    return data[:at] + what + data[at + (len(what) if kind == "overwrite" else 0) :]


@given(st.lists(damages, min_size=1, max_size=3))
def test_no_damage_is_missed_or_escapes(folder, steps):
    logging.disable(logging.CRITICAL)
    path = folder / "epoch_2.pt"
    good = data = path.read_bytes()
    for step in steps:
        data = damaged(data, *step) or b"\0"
    path.write_bytes(data)
    try:
        if data == good:
            assert checkpoints.newest_good(folder) == path
        else:
            assert checkpoints.newest_good(folder) == folder / "epoch_1.pt"
            with pytest.raises(ValueError, match=r"epoch_2\.pt is not a good checkpoint"):
                checkpoints.load(path)
    finally:
        path.write_bytes(good)
        logging.disable(logging.NOTSET)
