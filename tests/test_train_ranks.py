"""`pcmepp train` on two CPU ranks, started by torchrun as a user would."""

import os
import re
import subprocess
import sys

import open_clip
import torch
from drawn_shards import write_shards


def test_two_ranks_learn_and_leave_a_checkpoint(tmp_path):
    data = write_shards(tmp_path / "shards")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command += ["pcmepp_openclip.train", "--model", "PCMEpp-tiny", "--train-data", data, "--train-num-samples", "128"]
    command += ["--dataset-type", "webdataset", "--batch-size", "16", "--epochs", "12", "--warmup", "2", "--lr", "1e-3"]
    command += ["--workers", "1", "--precision", "fp32", "--log-every-n-steps", "1"]
    command += ["--logs", str(tmp_path), "--name", "run", "--local-loss", "--gather-with-grad"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    log = (tmp_path / "run/out.log").read_text()
    losses = [float(x) for x in re.findall(r"\bLoss: ([.\d]+) \(", log)]
    assert len(losses) == 48
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    path = tmp_path / "run/checkpoints/epoch_12.pt"
    model = open_clip.create_model("PCMEpp-tiny", pretrained=str(path))
    saved = torch.load(path, weights_only=True)["state_dict"]
    name = next(name for name in saved if name.endswith("uncertainty_text_projection"))
    assert torch.equal(model.uncertainty_text_projection, saved[name])
