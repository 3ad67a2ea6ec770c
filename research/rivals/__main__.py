"""Train a model by NCR, DECL, DAA or P2RM, and evaluate it.

    python -m research.rivals train --rival ncr --model PCMEpp-tiny --pretrained clip.pt --train-data TARS --steps 200
    python -m research.rivals eval --model PCMEpp-tiny --pretrained logs/run/checkpoints/epoch_1.pt --retrieval FOLDER

`python -m research.paper` writes both. The second is `pcmepp eval` for checkpoints of the first, which has one process.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import open_clip
import torch
from torch import Tensor

from pcmepp_openclip import Gaussian, cli

from ..command import run
from .losses import DAA_TEMPERATURE
from .training import METHODS, train


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["eval"]:
        return evaluate(argv)
    parser = argparse.ArgumentParser(
        prog="python -m research.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "eval"), help="eval takes the flags of `pcmepp eval`")
    parser.add_argument("--rival", choices=METHODS, required=True, help="the method")
    parser.add_argument("--model", required=True, help="a PCMEpp model")
    parser.add_argument("--pretrained", help="the weights to start from")
    parser.add_argument("--train-data", required=True, metavar="TARS", help="local shards, with braces")
    parser.add_argument("--val-data", metavar="TARS", help="save best.pt by the RSUM of these")
    parser.add_argument("--steps", type=int, help="length of a run on the scenes; without, COCO's 25 epochs")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--noise-ratio", type=float, default=0.0, help="share of captions that change places")
    parser.add_argument("--eta", type=float, default=0.025, help="DECL: negatives that each step takes away (0.025)")
    parser.add_argument("--weight", type=float, help="DAA and P2RM: weight beside the triplet loss (0.39 and 1)")
    parser.add_argument("--temperature", type=float, default=DAA_TEMPERATURE, help="DAA: of the smooth ranks (0.001)")
    parser.add_argument("--inside", type=float, default=0.02, help="P2RM: weight of distances in a rectangle (0.02)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", default="logs")
    parser.add_argument("--name", default="run", help="the folder of the run in --logs (run)")
    parser.add_argument("--resume", choices=("latest",), help="which is always so")
    train(parser.parse_args(argv))


def evaluate(argv: list[str]) -> None:
    """Run `pcmepp eval` with every model that `train` has saved as it was trained."""
    create = open_clip.create_model_and_transforms

    def created(name: str, pretrained: str, **options: Any) -> Any:
        rival = torch.load(pretrained, map_location="cpu", weights_only=True)["rival"]
        options["force_quick_gelu"] = rival["force_quick_gelu"]
        model, *transforms = create(name, pretrained=pretrained, **options)
        return together(model, rival["others"]), *transforms

    with patch.object(open_clip, "create_model_and_transforms", created):
        if code := cli.run(argv):
            sys.exit(code)


def together(model: Any, others: list[dict[str, Tensor]]) -> Any:
    """Return a model whose cosines are the mean over several networks: its means are all of theirs in a row."""
    networks = [copy.deepcopy(model) for _ in range(1 + len(others))]
    for network, weights in zip(networks[1:], others, strict=True):
        network.load_state_dict(weights)

    def joined(kind: str, batch: Tensor) -> Gaussian:
        parts = [getattr(network, f"encode_{kind}_gaussian")(batch) for network in networks]
        means = torch.cat([part.mean for part in parts], dim=1) / len(parts) ** 0.5
        return Gaussian(means, torch.cat([part.logvar for part in parts], dim=1))

    if others:
        model.networks = torch.nn.ModuleList(networks)
        for kind in ("image", "text"):
            setattr(model, f"encode_{kind}_gaussian", lambda batch, kind=kind: joined(kind, batch))
            setattr(model, f"encode_{kind}", lambda batch, normalize=False, kind=kind: joined(kind, batch).mean)
    return model


if __name__ == "__main__":
    sys.exit(run("research.rivals", main))
