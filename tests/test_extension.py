"""A distance and a loss term of one's own, in one file and with one line each: to train, validate and evaluate with."""

import json

import torch
from drawn_shards import write_shards
from eval_data import write_retrieval
from helpers import REPO, run_python

SCRIPT = """
import sys

import own_terms  # registers them

from pcmepp_openclip.cli import main

for command in " ".join(sys.argv[1:]).split(" + "):
    assert main(command.split()) == 0, command
"""


def test_a_distance_and_a_loss_term_of_one_s_own(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    environment = {"PYTHONPATH": f"{REPO / 'tests/support'}:{REPO}"}
    data, validation = write_shards(tmp_path / "train", 2, 32), write_shards(tmp_path / "val", 1, 24)
    flags = f"""--model PCMEpp-tiny --dataset-type webdataset --train-data {data} --train-num-samples 64 --batch-size 16
        --val-data {validation} --val-num-samples 24 --epochs 1 --workers 0 --precision fp32 --log-every-n-steps 1
        --logs {tmp_path / "logs"} --name run
        --distance manhattan --agreement-weight 0.5 --match-weight 2 --contrastive-weight 0
        --train-means-by all""".split()
    write_retrieval(tmp_path / "scenes")
    folder = tmp_path / "logs/run/checkpoints"
    evaluated = f"""--model PCMEpp-tiny --pretrained {folder / "epoch_1.pt"} --workers 0
        --retrieval {tmp_path / "scenes"} --out {tmp_path / "out"}""".split()
    done = run_python(str(script), "train", *flags, "+", "eval", *evaluated, env=environment)
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert lines and all(line["agreement_loss"] > 0 and "contrastive_loss" not in line for line in lines)
    (validated,) = (json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines())
    assert 0 <= validated["manhattan/image_to_text_R@1"] <= 1 and "image_to_text_R@1" in validated
    assert "captions/manhattan_R@1/miss_AUROC" in validated and "csd/image_to_text_R@1" not in validated
    config = torch.load(folder / "epoch_1.pt", weights_only=True)["about"]["config"]["model_cfg"]["pcmepp_cfg"]
    assert config["distance"] == "manhattan" and config["agreement_weight"] == 0.5
    metrics = json.loads((tmp_path / "out/results.json").read_text())["retrieval"]["scenes"]["metrics"]
    assert 0 <= metrics["manhattan/text_to_image_R@1"] <= 1 and "csd/text_to_image_R@1" in metrics
