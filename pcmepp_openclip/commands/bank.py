"""The flags of `pcmepp bank` and `pcmepp calibrate`."""

from pathlib import Path

from ..system.flags import CommandParser, number
from .evaluation import add_computing_flags, add_model_flags


def bank_parser() -> CommandParser:
    """Make the bank of a model, which tells what its embeddings say of images and texts, without training.

        pcmepp bank --model ViT-B-32 --pretrained laion2b_s34b_b79k --data 'cc3m/{00..10}.tar' --out bank.safetensors
        pcmepp bank --model local-dir:exported --data FOLDER --out exported      # beside the weights

    It embeds pairs that are drawn at random, one caption per image. Choose pairs similar to your data, but not the ones
    that you evaluate on.
    """
    parser = CommandParser("pcmepp bank", bank_parser.__doc__)
    add_model_flags(parser, trained=True)
    _add_pair_flags(parser, 2, 4096, "pairs in the bank")
    add_computing_flags(parser)
    return parser


def calibrate_parser() -> CommandParser:
    """Fit the probability that an image and a text are a pair.

        pcmepp calibrate --model local-dir:exported --data FOLDER --out exported
        pcmepp calibrate --model ViT-B-32 --pretrained laion2b_s34b_b79k --bank bank.safetensors --data FOLDER --out DIR

    Take held-out pairs: neither those of the training nor those of the bank. Four scalars are fitted to images that are
    drawn at random, each with all of its captions, and saved as calibration.json. They hold for data like these: with
    --other-data, they are measured on another collection as well, and the shift alone is saved if it is better there.
    """
    parser = CommandParser("pcmepp calibrate", calibrate_parser.__doc__)
    group = add_model_flags(parser, trained=True)
    group.add_argument("--bank", metavar="FILE", help="the model's bank, or its folder; by default beside the weights")
    group.add_argument(
        "--estimator",
        choices=("bank", "variance"),
        help="what corrects a score (default: the bank where there is one)",
    )
    parser.refuse(
        lambda args: args.bank and args.estimator == "variance",
        "--estimator variance needs no --bank: drop one of the two.",
    )
    _add_pair_flags(parser, 4, 1000, "images that are drawn, at most")
    parser.add_argument(
        "--other-data",
        metavar="FOLDER",
        help="pairs of another collection, to measure on too; the shift alone is saved where it is better there",
    )
    add_computing_flags(parser)
    return parser


def _add_pair_flags(parser: CommandParser, least: int, size: int, size_help: str) -> None:
    """Add the flags that say which pairs are drawn, and where the result goes."""
    parser.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="images with captions: a folder in clip_benchmark's layout, or shards, as in 'coco/{00..09}.tar'",
    )
    parser.add_argument("--split", default="test", help="the split of a folder (default: test)")
    parser.add_argument("--size", type=number(int, least), default=size, help=f"{size_help} (default: {size})")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling pairs (default: 0)")
    parser.add_argument(
        "--out", required=True, type=Path, help="a file, or a folder, such as that of an exported model"
    )
