"""The flags of `pcmepp eval`, and those that every command shares which loads a model."""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from ..system.flags import CommandParser, number


def add_model_flags(parser: CommandParser, trained: bool = False) -> argparse._ArgumentGroup:
    """Add --model and --pretrained, as `load_model` takes them, and return their group.

    Arguments:
        trained: whether a model with random weights is a mistake.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, help="a name in open_clip.list_models(), hf-hub:ORG/NAME or local-dir:PATH"
    )
    group.add_argument("--pretrained", help="a pretrained tag of open_clip or a checkpoint file")
    parser.check(lambda args: _check_model(args, trained))
    return group


def add_computing_flags(parser: CommandParser) -> argparse._ArgumentGroup:
    """Add --batch-size, --workers and --device, and return their group."""
    group = parser.add_argument_group("computation")
    group.add_argument("--batch-size", type=number(int, 1), default=64, help="samples per batch and rank (default: 64)")
    group.add_argument(
        "--workers",
        type=number(int, 0),
        default=min(4, os.cpu_count() or 1),
        help="processes that decode images, per rank",
    )
    group.add_argument("--device", help="default: cuda if available, else cpu")
    return group


def eval_parser() -> CommandParser:
    """Evaluate retrieval, zero-shot classification and the uncertainty of a model.

        pcmepp eval --model PCMEpp-ViT-B-16 --pretrained epoch_32.pt --retrieval FOLDER --zeroshot FOLDER --out DIR
        pcmepp eval --model ViT-B-32 --pretrained openai --bank bank.safetensors --retrieval FOLDER --out DIR
        torchrun --nproc-per-node 8 -m -- pcmepp_openclip.cli eval ...      # the same on 8 ranks

    Prints tables and writes DIR/results.json, DIR/metrics.csv, DIR/index.html and its plots as DIR/*.png. The same
    command resumes an interrupted evaluation.
    """
    parser = CommandParser("pcmepp eval", eval_parser.__doc__)
    group = add_model_flags(parser)
    group.add_argument(
        "--bank",
        type=Path,
        metavar="FILE",
        help="reference pairs of the model, from `pcmepp bank`: confusion for any CLIP (default: the one beside the "
        "weights of a local-dir or hf-hub model)",
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="from `pcmepp calibrate`: also judge the probability of a pair (default: the one beside the weights of a "
        "local-dir or hf-hub model)",
    )
    _add_data_flags(parser)
    _add_report_flags(parser)
    group = add_computing_flags(parser)
    group.add_argument("--precision", choices=("fp32", "amp_bf16"), default="fp32", help="default: fp32")
    group.add_argument(
        "--exif-orientation",
        action="store_true",
        help="rotate images according to their EXIF orientation; open_clip does not",
    )
    return parser


def _add_data_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("data; --retrieval and --zeroshot can be repeated, as FOLDER or NAME=FOLDER")
    group.add_argument(
        "--retrieval",
        action="append",
        default=[],
        metavar="FOLDER",
        help="images with captions: a folder in clip_benchmark's layout, or shards, as in 'coco/{00..09}.tar'",
    )
    group.add_argument(
        "--zeroshot",
        action="append",
        default=[],
        metavar="FOLDER",
        help="images with classes: a folder in clip_benchmark's layout, or one subfolder of images per class",
    )
    group.add_argument("--coco", metavar="JSON", help="Karpathy's dataset_coco.json: COCO 1K, 5K, CxC, ECCV Caption")
    group.add_argument("--coco-images", metavar="FOLDER", help="the folder that contains COCO's val2014")
    parser.needs("--coco", "--coco-images", why=", the folder that contains COCO's val2014")
    parser.refuse(
        lambda args: args.coco and find_spec("eccv_caption") is None,
        "--coco needs the eccv_caption package: pip install 'pcmepp-openclip[coco]'.",
    )
    group.add_argument("--hierarcaps", metavar="CSV", help="HierarCaps' hierarcaps_test.csv: vague and exact captions")
    group.add_argument("--hierarcaps-images", metavar="FOLDER", help="the folder that contains COCO's val2014")
    group.add_argument("--himo", metavar="JSON", help="HiMo-CLIP's himo_docci_data.json: ever longer captions")
    group.add_argument("--himo-images", metavar="FOLDER", help="the folder of DOCCI's images")
    for flag in ("--coco", "--hierarcaps", "--himo"):
        parser.needs(f"{flag}-images", flag, why=", the file with the captions")
    group.add_argument(
        "--noisy-pairs",
        metavar="SHARDS",
        help="counted shards, as in --train-data: are the captions that --noise-ratio exchanges in training told from "
        "the right ones?",
    )
    group.add_argument(
        "--noise-ratio", type=number(float, 0, 1), metavar="FRACTION", help="with --noisy-pairs: that of the training"
    )
    group.add_argument(
        "--noise-seed", type=number(int, 0), default=0, metavar="N", help="with --noisy-pairs: that of the training"
    )
    parser.needs("--noisy-pairs", "--noise-ratio", why=", and --noise-seed if it was not 0 in training")
    parser.needs("--noise-ratio", "--noisy-pairs")
    parser.needs("--noise-seed", "--noisy-pairs")
    parser.refuse(
        lambda args: not any((args.retrieval, args.zeroshot, args.coco, args.hierarcaps, args.himo, args.noisy_pairs)),
        "There is nothing to evaluate on: give --retrieval, --zeroshot, --coco, --hierarcaps, --himo or --noisy-pairs.",
    )
    group.add_argument(
        "--distances",
        nargs="+",
        default=[],
        metavar="NAME",
        help="distances to rank by in addition to the default ones and the model's own; a wrong name lists them",
    )
    parser.check(_check_distances)
    group.add_argument("--split", default="test", help="the split to evaluate on (default: test)")
    group.add_argument(
        "--val-split",
        default="val",
        help="the split on which zero-shot settings are chosen, if it exists (default: val)",
    )
    group.add_argument(
        "--crops",
        action="store_true",
        help="also encode a centre crop of each image: is it more uncertain than the whole?",
    )
    group.add_argument(
        "--ann",
        action="store_true",
        help="also retrieve by an approximate index over the means (FAISS), alone and re-ranked by CSD",
    )
    parser.refuse(
        lambda args: args.ann and find_spec("faiss") is None,
        "--ann needs FAISS: pip install 'pcmepp-openclip[faiss]'.",
    )
    parser.needs("--ann", "--retrieval", "--coco", why=": it is about retrieval")


def _add_report_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--out", required=True, type=Path, help="folder for results, report and cached embeddings")
    group.add_argument(
        "--examples",
        type=number(int, 0),
        default=5,
        metavar="N",
        help="show the N most and the N least uncertain images and captions with what they find; 0 for none (5)",
    )
    group.add_argument(
        "--tsne",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="show N images and their captions in one plane by t-SNE, with areas by uncertainty; needs scikit-learn",
    )
    parser.refuse(
        lambda args: args.tsne and find_spec("sklearn") is None,
        "--tsne needs scikit-learn: pip install 'pcmepp-openclip[plots]'.",
    )
    parser.needs("--tsne", "--retrieval", "--coco", why=": it shows images with captions")
    group.add_argument("--tsne-seed", type=number(int, 0), default=0, help="chooses these images, and places them (0)")
    parser.needs("--tsne-seed", "--tsne")


# These checks import torch.


def _check_model(args: argparse.Namespace, trained: bool) -> None:
    if args.model:
        from .. import plugin  # noqa: F401
        from ..encode.load import check_name, has_random_weights

        check_name(args.model)
        if trained and has_random_weights(args.model, args.pretrained):
            raise ValueError(f"--model {args.model} has random weights: give --pretrained.")


def _check_distances(args: argparse.Namespace) -> None:
    if args.distances:
        from ..distances import by_name

        try:
            by_name(args.distances)
        except ValueError as error:
            raise ValueError(f"--distances: {error}") from None
