"""`pcmepp train --dry-run`: what would happen on any number of ranks, and mistakes before they cost anything."""

import pytest
import torch
from drawn_shards import write_shards
from helpers import split

from pcmepp_openclip.cli import main as pcmepp
from pcmepp_openclip.runs import checkpoints
from pcmepp_openclip.training import command as train


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counted")
    few, many = write_shards(folder / "few", 4, 32), write_shards(folder / "many", 8, 48)
    for pattern in (few, many):
        assert pcmepp(["data", "count", pattern]) == 0
    return f"few={few}::many={many}"


def call(data, *flags):
    argv = ["--model", "PCMEpp-ViT-B-16", "--train-data", data, "--dataset-type", "webdataset", "--batch-size", "4"]
    return train.main([*argv, "--epochs", "10", "--workers", "2", "--warmup", "5", *flags])


def test_it_says_what_would_happen(counted, tmp_path, capsys):
    assert call(counted, "--dry-run", "4", "--accum-freq", "2", "--logs", str(tmp_path), "--name", "new") == 0
    out = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    out = {name.strip(): value.strip() for name, value in out.items()}
    assert out["global batch"].startswith("32 (4 per rank x 4 ranks x 2")
    assert out["steps"] == "16 per epoch, 160 in 10 epochs"  # 512 samples
    assert out["warm-up"] == "5 steps, 3.1 % of the run"
    assert out["samples seen"] == "5,120"
    assert "160,517,378 parameters" in out["model"] and out["checkpoint size"] == "about 1.93 GB"
    assert out["output"] == str(tmp_path / "new") and not (tmp_path / "new").exists()
    assert "GB (activations" in out["GPU memory"]


def test_the_share_of_each_source(counted, capsys):
    call(
        counted,
        *split("--dry-run --device cpu --dataset-resampled --train-data-mix few=3,many=1 --train-num-samples 400"),
    )
    out = capsys.readouterr().out
    assert "of few" in out and "3,000 (75.0 %)" in out and "1,000 (25.0 %)" in out


def test_mistakes(counted, tmp_path, capsys):
    (tmp_path / "old").mkdir()
    (tmp_path / "old/out.log").touch()
    torch.save({"some": torch.zeros(1)}, tmp_path / "foreign.pt")
    (tmp_path / "checkpoints").mkdir()
    checkpoints.save({}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-100])
    for flags, words in [
        (["--warmup", "100000"], "--warmup"),
        (["--batch-size", "1000", "--accum-freq", "4"], "smaller than the global batch"),
        (["--logs", str(tmp_path), "--name", "old"], "--resume latest"),
        (["--pretrained", str(tmp_path / "foreign.pt")], "foreign.pt"),
        (["--pretrained", "no_such_tag"], "no_such_tag"),
        (["--resume", str(tmp_path / "cut.pt")], "cut.pt"),
        (["--resume", str(tmp_path / "none.pt")], "there is no such file"),
        (["--workers", "60"], "--workers"),
        (["--vib-weight", "-1"], "--vib-weight must be at least 0"),
        (["--distance", "cds"], "--distance: Unknown distance"),
    ]:
        assert call(counted, "--dry-run", "--device", "cpu", *flags) == 2, flags
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, err
