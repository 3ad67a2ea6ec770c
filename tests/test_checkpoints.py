"""Checkpoint files: whole or not at all, verified, pruned; a disk that is full costs one save."""

import logging
import os
import random
import subprocess
import sys
import zipfile

import open_clip
import pytest
import torch
from helpers import run_code

from pcmepp_openclip import cli
from pcmepp_openclip.runs import checkpoints, rng
from pcmepp_openclip.system import digest


def write(folder, *names):
    for name in names:
        assert checkpoints.save({"epoch": 1, "state_dict": {"w": torch.arange(1000.0)}}, folder / name)


def test_a_checkpoint_comes_back(tmp_path):
    write(tmp_path, "epoch_1.pt")
    assert torch.equal(checkpoints.load(tmp_path / "epoch_1.pt")["state_dict"]["w"], torch.arange(1000.0))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_1.pt"]


def test_the_newest_good_one_is_taken_and_the_others_are_named(tmp_path, caplog):
    write(tmp_path, "epoch_9.pt", "epoch_10.pt", "epoch_10_batch_5.pt", "epoch_10_batch_40.pt", "epoch_11.pt")
    (tmp_path / "epoch_12.pt").write_bytes((tmp_path / "epoch_11.pt").read_bytes()[:-500])  # cut
    damaged = bytearray((tmp_path / "epoch_11.pt").read_bytes())
    damaged[len(damaged) // 2] ^= 1  # one bit, within a tensor
    (tmp_path / "epoch_11.pt").write_bytes(damaged)
    (tmp_path / "tmp.pt").write_bytes(b"stock open_clip's left-over")
    (tmp_path / ".epoch_13.pt.7.tmp").write_bytes(b"ours")
    assert checkpoints.newest_good(tmp_path).name == "epoch_10_batch_40.pt"
    assert "epoch_12.pt" in caplog.text and "epoch_11.pt" in caplog.text and "damaged" in caplog.text
    with pytest.raises(ValueError, match="epoch_11"):
        checkpoints.load(tmp_path / "epoch_11.pt")
    assert checkpoints.newest_good(tmp_path / "empty") is None


def flips(path, bits):
    """The file with one of these bits flipped, again and again; afterwards as it was."""
    with path.open("r+b") as file:
        for bit in bits:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            for value in (byte ^ 1 << bit % 8, byte):
                file.seek(bit // 8)
                file.write(bytes([value]))
                file.flush()
                if value != byte:
                    yield bit


def test_no_flipped_bit_is_missed_and_the_one_before_is_taken(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    write(tmp_path, "epoch_1.pt", "epoch_2.pt")
    path = tmp_path / "epoch_2.pt"
    directory, end = zipfile.ZipFile(path).start_dir * 8, path.stat().st_size * 8
    dice = random.Random(0)
    for number, bit in enumerate(flips(path, range(directory, end))):  # every one
        assert checkpoints.fault(path) is not None, bit
        if number % 50 == 0:
            assert checkpoints.newest_good(tmp_path).name == "epoch_1.pt", bit
            with pytest.raises(ValueError, match=r"epoch_2\.pt is not a good checkpoint"):
                checkpoints.load(path)
    for bit in flips(path, [dice.randrange(directory) for _ in range(20_000)]):
        assert checkpoints.fault(path) is not None, bit
    assert checkpoints.newest_good(tmp_path) == path


def test_a_file_without_a_digest_is_taken_and_that_is_said_once(tmp_path, caplog):
    """Of stock open_clip, or of an earlier version."""
    caplog.set_level(logging.INFO)
    write(tmp_path, "epoch_1.pt")
    path = tmp_path / "epoch_2.pt"
    torch.save({"epoch": 2, "state_dict": {"w": torch.arange(20.0), "v": torch.arange(9)}}, path)
    assert [checkpoints.newest_good(tmp_path) for _ in range(3)] == [path] * 3
    assert caplog.text.count("without a digest") == 1 and "epoch_2.pt was saved" in caplog.text
    caplog.set_level(logging.ERROR)
    bits = range(zipfile.ZipFile(path).start_dir * 8, path.stat().st_size * 8)
    for bit in flips(path, bits[::3]):  # its checksums do not cover all, but what is taken can be read
        taken = checkpoints.newest_good(tmp_path)
        assert taken in (path, tmp_path / "epoch_1.pt"), bit
        checkpoints.load(taken)


def test_a_part_that_is_called_a_folder_is_damaged(tmp_path):
    """torch would return whatever is in memory for it."""
    path = tmp_path / "epoch_1.pt"
    torch.save({"state_dict": {"w": torch.arange(20.0)}}, path)
    content, entry = path.read_bytes(), b"PK\1\2"
    starts = [at for at in range(len(content)) if content.startswith(entry, at)]
    assert len(starts) == len(zipfile.ZipFile(path).namelist()) and checkpoints.fault(path) is None
    for start in starts:
        attributes = start + 38
        path.write_bytes(content[:attributes] + bytes([digest.ZIP_FOLDER]) + content[attributes + 1 :])
        assert "is damaged" in checkpoints.fault(path)
        with pytest.raises(ValueError, match=r"epoch_1\.pt is not a good checkpoint: its part .* is damaged"):
            checkpoints.load(path)


def test_files_that_torch_wrote_without_checksums_are_taken(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"w": torch.ones(9)}}, tmp_path / "epoch_1.pt")
        write(tmp_path, "epoch_2.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    for name in ("epoch_1.pt", "epoch_2.pt"):
        assert checkpoints.fault(tmp_path / name) is None and checkpoints.load(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"\0", digest.SEAL, digest.SEAL + b"0" * 64, b"PK\3\4"])
def test_what_is_no_checkpoint_at_all_is_not_good(tmp_path, content):
    write(tmp_path, "epoch_1.pt")
    (tmp_path / "epoch_2.pt").write_bytes(content)
    (tmp_path / "epoch_3.pt").mkdir()
    assert checkpoints.newest_good(tmp_path).name == "epoch_1.pt"
    with pytest.raises(ValueError, match="epoch_2"):
        checkpoints.load(tmp_path / "epoch_2.pt")


def test_a_digest_is_nothing_to_readers_that_do_not_know_of_it(tmp_path):
    write(tmp_path, "epoch_1.pt")
    code = """if True:
        import sys, torch, open_clip.factory
        for read in (open_clip.factory.load_state_dict, *(
            lambda path, mmap=mmap: torch.load(path, weights_only=True, mmap=mmap)["state_dict"] for mmap in (0, 1)
        )):
            assert torch.equal(read(sys.argv[1])["w"], torch.arange(1000.0))
        assert "pcmepp_openclip" not in sys.modules
    """
    run_code(code, str(tmp_path / "epoch_1.pt"))


@pytest.mark.parametrize("place", ["tensor", "directory", "digest", "cut"])
def test_a_damaged_file_is_refused_by_everything_that_reads_weights(tmp_path, capsys, place):
    model = open_clip.create_model("PCMEpp-tiny")
    path = tmp_path / "epoch_1.pt"
    checkpoints.save({"epoch": 1, "state_dict": model.state_dict()}, path)
    assert cli.main(["convert", str(path), str(tmp_path / "good.safetensors")]) == 0
    whole, directory = path.read_bytes(), zipfile.ZipFile(path).start_dir
    at = {"tensor": directory // 2, "directory": directory + 2, "digest": len(whole) - 10, "cut": 0}[place]
    damaged = bytearray(whole)
    damaged[at] ^= place != "cut"
    path.write_bytes(damaged[:-1000] if place == "cut" else damaged)
    with pytest.raises(Exception, match=r"epoch_1\.pt"):
        open_clip.create_model("PCMEpp-tiny", pretrained=str(path))
    for command in (["convert", path, tmp_path / "clip.pt"], ["push", path, "org/name", "--model", "PCMEpp-tiny"]):
        capsys.readouterr()
        assert cli.main([str(word) for word in command]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "epoch_1.pt is not a good checkpoint" in said


def test_pruning_never_takes_the_last(tmp_path):
    write(tmp_path, "epoch_1.pt", "epoch_2.pt", "epoch_2_batch_5.pt", "epoch_2_batch_9.pt", "epoch_3.pt")
    (tmp_path / ".epoch_2.pt.999999.tmp").touch()
    names = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    checkpoints.prune(tmp_path, tmp_path / "epoch_2_batch_9.pt", keep_every_epoch=True)
    assert names() == ["epoch_1.pt", "epoch_2.pt", "epoch_2_batch_9.pt", "epoch_3.pt"]
    checkpoints.prune(tmp_path, tmp_path / "epoch_3.pt", keep_every_epoch=False)
    assert names() == ["epoch_3.pt"]


def test_a_full_disk_costs_one_save_and_is_said_loudly(tmp_path, caplog):
    """A real limit on the size of files, in a process of its own."""
    code = f"""
import logging, resource, signal, sys, torch
from pathlib import Path
from pcmepp_openclip.runs import checkpoints
logging.basicConfig(stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path({str(tmp_path)!r})
small, large = ({{"w": torch.zeros(n)}} for n in (10, 10**6))
assert checkpoints.save(small, folder / "epoch_1.pt")
resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
assert not checkpoints.save(large, folder / "epoch_2.pt")
assert checkpoints.save(small, folder / "epoch_3.pt")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "CHECKPOINT NOT SAVED" in done.stdout and "epoch_2.pt" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1.pt", "epoch_3.pt"]


def test_a_file_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    torch.save({"epoch": 1, "state_dict": Evil()}, tmp_path / "epoch_1.pt")
    with pytest.raises(Exception, match=r"weights_only|Unsupported"):
        checkpoints.load(tmp_path / "epoch_1.pt")
    assert not (tmp_path / "hacked").exists()


def test_random_numbers_go_on(tmp_path):
    import random

    import numpy

    draw = lambda: (torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist(), random.gauss(0, 1))  # noqa: E731
    draw()
    write(tmp_path, "epoch_1.pt")
    checkpoints.save({"rng": rng.state("cpu")}, tmp_path / "epoch_2.pt")
    first = draw()
    rng.restore(checkpoints.load(tmp_path / "epoch_2.pt")["rng"], "cpu")
    assert draw() == first


def test_the_random_numbers_of_a_gpu_are_those_of_the_runs_own(monkeypatch):
    """The current device need not be the one of --device cuda:1."""
    states, touched = {"cuda:1": torch.tensor([1], dtype=torch.uint8)}, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": (touched.append(device), states[device])[1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device="cuda": states.update({device: new}))
    saved = rng.state("cuda:1")
    states["cuda:1"] = torch.tensor([2], dtype=torch.uint8)
    rng.restore(saved, "cuda:1")
    assert states["cuda:1"].item() == 1
    rng.restore(saved, "cuda:3")  # resumed on another one
    assert states["cuda:3"].item() == 1
    rng.restore(saved, "cpu")
    assert "cuda" not in rng.state("cpu") and states.keys() == {"cuda:1", "cuda:3"} and touched == ["cuda:1"]


def test_a_saver_names_a_file_when_it_is_on_the_disk_and_goes_on_behind_a_failure(tmp_path, caplog):
    saver, seen = checkpoints.Saver(), []
    for number in (1, 2):
        path = tmp_path / f"epoch_{number}.pt"
        saver.save({"w": torch.full((1000,), float(number))}, path, then=lambda path=path: seen.append(path.exists()))
    gone = tmp_path / "gone"
    saver.save({}, gone / "epoch_3.pt", then=lambda: seen.append("never"))
    saver.wait()
    assert seen == [True, True] and "NOT SAVED" in caplog.text and "gone" in caplog.text
    assert checkpoints.load(tmp_path / "epoch_2.pt")["w"][0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_1.pt", "epoch_2.pt"]
