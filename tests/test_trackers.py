"""TensorBoard, W&B (offline) and the terminal: what a user sees of a run, before and after a restart."""

import json
import os
import re
import struct
import subprocess
import sys

import pytest
from drawn_shards import write_shards
from terminal import run_on_terminal

CALIBRATION = (
    *("match_ratio", "expected_matches", "image_miscalibration", "text_miscalibration"),
    *("image_slope", "text_slope", "image_agreement", "text_agreement"),
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of two epochs in two processes, the second on a terminal; its folder and what the terminal saw."""
    folder = tmp_path_factory.mktemp("trackers")
    command = [sys.executable, "-m", "pcmepp_openclip.train", "--model", "PCMEpp-tiny", "--train-data"]
    command += [write_shards(folder / "shards", 2, 32), "--train-num-samples", "64", "--dataset-type", "webdataset"]
    command += ["--batch-size", "16", "--workers", "0", "--precision", "fp32", "--log-every-n-steps", "1", "--logs"]
    command += [str(folder), "--name", "run", "--resume", "latest", "--report-to", "tensorboard,wandb", "--warmup", "2"]
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    first = subprocess.run([*command, "--epochs", "1"], env=env, cwd=folder, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    code, seen = run_on_terminal([*command, "--epochs", "2"], env=env, cwd=folder)
    assert code == 0, seen
    return folder, first.stderr, seen


def test_tensorboard_goes_on_with_the_steps(resumed):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(resumed[0] / "run/tensorboard"))
    events.Reload()
    names = ("loss", "match_loss", "match_scale", "match_shift", "text_uncertainty", "variance_share", *CALIBRATION)
    for name in names:
        assert [event.step for event in events.Scalars(f"train/{name}")] == list(range(8)), name


def test_wandb_goes_on_in_the_same_run(resumed):
    files = sorted(resumed[0].glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-run.wandb"] * 2  # the same id: one run when it is synced
    names = {f"train/{name}" for name in ("variance_share", *CALIBRATION)}
    steps = [step for file in files for step, items in history(file) if names <= set(items)]
    assert steps == list(range(8))


def history(path):
    """(step, values) of each row of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            yield record.history.step.num, items


def log_records(content, block=2**15, header=7):
    """The records of a LevelDB log, which is what W&B writes: blocks of pieces (checksum, length, kind, bytes)."""
    place, record = header, b""
    while place + header <= len(content):
        if block - place % block < header:
            place += block - place % block
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + header])
        record += content[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_a_progress_bar_on_a_terminal_and_lines_in_a_file(resumed):
    _, in_file, on_terminal = resumed
    assert re.search(r"epoch 1: .*samples/s", on_terminal)
    assert "samples/s" not in in_file and "Train Epoch: 0" in in_file
