"""`pcmepp eval`: evaluate retrieval, zero-shot classification and the uncertainty of a model.

    pcmepp eval --model PCMEpp-ViT-B-16 --pretrained epoch_32.pt --retrieval FOLDER --zeroshot FOLDER --out DIR
    pcmepp eval --model ViT-B-32 --pretrained openai --bank bank.safetensors --retrieval FOLDER --out DIR
    torchrun --nproc-per-node 8 -m -- pcmepp_openclip.cli eval ...      # the same on 8 ranks

Prints tables and writes DIR/results.json, DIR/metrics.csv, DIR/index.html and its plots as DIR/*.png. The same command
resumes an interrupted evaluation.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from ..ambiguity.store import CALIBRATION_FILE, check_calibration, find_bank, find_calibration
from ..data.arguments import share, whole_number
from ..data.captioned import Captioned, read_captioned
from ..distances import DISTANCES, by_name
from ..distances.approximate import load_faiss
from ..encode.encode import process_group
from ..encode.load import add_model_flags, has_random_weights, load_model, other_noise, recorded_history
from ..models.pcmepp import ProbabilisticModel
from ..reports import report
from ..system import files
from ..system.text import flag_of
from ..system.version import __version__
from . import coco, pages, pictures, questions, tsne
from .columns import EvaluatedModel
from .datasets import Hierarchies, Labelled, read_hierarcaps, read_himo, read_karpathy, read_labelled, read_noisy_pairs
from .tasks import TaskResult, evaluate_correspondence, evaluate_retrieval, evaluate_vagueness, evaluate_zeroshot


def main(argv: list[str]) -> None:
    args = _arguments(argv)
    captioned, labelled, chains = _datasets(args)  # before the model, so that mistakes show at once
    noisy = [read_noisy_pairs(args.noisy_pairs, args.noise_ratio, args.noise_seed)] if args.noisy_pairs else []
    _check_out(args.out)
    with process_group() as rank:
        encoder, notes = load(args)
        if noisy and (note := other_noise(args.pretrained, args.noise_ratio, args.noise_seed)):
            notes.append(note)
        if rank == 0:
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
        options = args.crops, args.ann
        results = [evaluate_retrieval(encoder, name, data, rank, *options) for name, data in captioned.items()]
        results += [evaluate_zeroshot(encoder, name, *data, rank, args.crops) for name, data in labelled.items()]
        results += [evaluate_vagueness(encoder, name, data, rank, himo=name == "himo") for name, data in chains.items()]
        results += [evaluate_correspondence(encoder, name, pairs, rank) for name, pairs in noisy]
        if rank == 0:
            try:
                write_results(args, encoder, [result for result in results if result is not None], notes)
            except OSError as error:
                raise ValueError(f"--out {args.out} cannot be written to ({error.strerror}).") from None


def _check_out(out: Path) -> None:
    for folder in (out, out / "embeddings"):
        files.check_folder(folder, "--out")
    for name in ("results.json", "metrics.csv", "index.html"):
        if (out / name).is_dir():
            raise ValueError(f"--out {out}: its {name} is a folder; name another one.")


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pcmepp eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("model")
    add_model_flags(group)
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
    group.add_argument("--hierarcaps", metavar="CSV", help="HierarCaps' hierarcaps_test.csv: vague and exact captions")
    group.add_argument("--hierarcaps-images", metavar="FOLDER", help="the folder that contains COCO's val2014")
    group.add_argument("--himo", metavar="JSON", help="HiMo-CLIP's himo_docci_data.json: ever longer captions")
    group.add_argument("--himo-images", metavar="FOLDER", help="the folder of DOCCI's images")
    group.add_argument(
        "--noisy-pairs",
        metavar="SHARDS",
        help="counted shards, as in --train-data: are the captions that --noise-ratio exchanges in training told from "
        "the right ones?",
    )
    group.add_argument("--noise-ratio", type=share, metavar="FRACTION", help="with --noisy-pairs: that of the training")
    group.add_argument(
        "--noise-seed", type=whole_number, default=0, metavar="N", help="with --noisy-pairs: that of the training"
    )
    group.add_argument(
        "--distances",
        nargs="+",
        default=[],
        metavar="NAME",
        help="distances to rank by in addition to the default ones and the model's own: "
        f"{', '.join(name for name in DISTANCES if name not in by_name())}",
    )
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
    group = parser.add_argument_group("output and computation")
    group.add_argument("--out", required=True, type=Path, help="folder for results, report and cached embeddings")
    group.add_argument(
        "--examples",
        type=int,
        default=5,
        metavar="N",
        help="show the N most and the N least uncertain images and captions with what they find; 0 for none (5)",
    )
    group.add_argument(
        "--tsne",
        type=int,
        default=0,
        metavar="N",
        help="show N images and their captions in one plane by t-SNE, with areas by uncertainty; needs scikit-learn",
    )
    group.add_argument("--tsne-seed", type=int, default=0, help="chooses these images, and places them (0)")
    group.add_argument("--batch-size", type=int, default=64, help="samples per batch and rank (default: 64)")
    group.add_argument(
        "--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes that decode images, per rank"
    )
    group.add_argument("--precision", choices=("fp32", "amp_bf16"), default="fp32", help="default: fp32")
    group.add_argument(
        "--exif-orientation",
        action="store_true",
        help="rotate images according to their EXIF orientation; open_clip does not",
    )
    group.add_argument("--device", help="default: cuda if available, else cpu")
    args = parser.parse_args(argv)
    if not (args.retrieval or args.zeroshot or args.coco or args.hierarcaps or args.himo or args.noisy_pairs):
        flags = "--retrieval, --zeroshot, --coco, --hierarcaps, --himo or --noisy-pairs"
        raise ValueError(f"There is nothing to evaluate on: give {flags}.")
    for flag in ("coco", "hierarcaps", "himo"):
        if vars(args)[f"{flag}_images"] and not vars(args)[flag]:
            raise ValueError(f"--{flag}-images needs --{flag}, the file with the captions.")
    if args.coco and not args.coco_images:
        raise ValueError("--coco needs --coco-images, the folder that contains COCO's val2014.")
    if args.noisy_pairs and args.noise_ratio is None:
        raise ValueError("--noisy-pairs needs --noise-ratio, and --noise-seed if it was not 0 in training.")
    if not args.noisy_pairs and (args.noise_ratio is not None or args.noise_seed):
        raise ValueError("--noise-ratio and --noise-seed are for --noisy-pairs: add that, or drop them.")
    if args.tsne and not (args.retrieval or args.coco):
        raise ValueError("--tsne shows images with captions: add --retrieval or --coco.")
    if args.tsne_seed and not args.tsne:
        raise ValueError("--tsne-seed chooses among the images of --tsne: add --tsne N.")
    for flag in ("examples", "tsne", "tsne_seed"):
        if vars(args)[flag] < 0:
            raise ValueError(f"{flag_of(flag)} must be at least 0, not {vars(args)[flag]}.")
    if args.tsne:
        tsne.load_sklearn()
    try:
        by_name(args.distances)
    except ValueError as error:
        raise ValueError(f"--distances: {error}") from None
    if args.ann:
        load_faiss()
        if not (args.retrieval or args.coco):
            raise ValueError("--ann is about retrieval: give --retrieval or --coco, or drop it.")
    if args.batch_size < 1 or args.workers < 0:
        raise ValueError("--batch-size must be at least 1, and --workers at least 0.")
    return args


def _datasets(
    args: argparse.Namespace,
) -> tuple[dict[str, Captioned], dict[str, tuple[Labelled, Labelled | None]], dict[str, Hierarchies]]:
    captioned = {name: read_captioned(where, args.split) for name, where in _named(args.retrieval, "--retrieval")}
    if args.coco:
        package, data = coco.load_eccv_caption(), read_karpathy(args.coco, args.coco_images, args.split)
        assert data.coco_images is not None and data.coco_captions is not None
        coco.check_ids(package, data.coco_images, data.coco_captions)
        captioned["coco"] = data
    labelled: dict[str, tuple[Labelled, Labelled | None]] = {}
    for name, where in _named(args.zeroshot, "--zeroshot"):
        apart = (Path(where) / args.val_split).is_dir() and args.val_split != args.split
        labelled[name] = read_labelled(where, args.split), read_labelled(where, args.val_split) if apart else None
    chains: dict[str, Hierarchies] = {}
    if args.hierarcaps:
        chains["hierarcaps"] = read_hierarcaps(args.hierarcaps, args.hierarcaps_images)
    if args.himo:
        chains["himo"] = read_himo(args.himo, args.himo_images)
    return captioned, labelled, chains


def _named(texts: list[str], flag: str) -> list[tuple[str, str]]:
    """(name, place) of each; without a name of its own it is called by its folder."""
    found: dict[str, str] = {}
    for text in texts:
        named = re.fullmatch(r"([A-Za-z][\w.-]*)=(.+)", text)
        folder = Path(text).absolute()
        name, where = (named[1], named[2]) if named else ((folder if folder.is_dir() else folder.parent).name, text)
        name = re.sub(r"[^\w.-]+", "-", name) or "data"
        if name in found:
            raise ValueError(f"{flag}: two are called '{name}'; give them names, as in first={where}.")
        found[name] = where
    return list(found.items())


def load(args: argparse.Namespace) -> tuple[EvaluatedModel, list[str]]:
    """The model, ready to encode, and what must be said of it."""
    loaded = load_model(args.model, args.pretrained, args.device)
    if args.distances and not loaded.probabilistic:
        raise ValueError(f"--distances needs trained log-variances, which {args.model} lacks: drop it.")
    bank, calibration = find_bank(loaded, args.bank), find_calibration(loaded, args.calibration)
    if calibration is not None:
        check_calibration(calibration, loaded, bank, str(args.calibration or loaded.file_beside(CALIBRATION_FILE)))
    by = "its means" if bank is None else "its means and its bank"
    notes = []
    if has_random_weights(args.model, args.pretrained):
        notes.append(f"{args.model} has random weights: give --pretrained.")
    if not isinstance(loaded.model, ProbabilisticModel):
        notes.append(f"{args.model} has no log-variance branch: it is evaluated by {by} alone.")
    elif not loaded.probabilistic:
        notes.append(
            "The log-variance branch is untrained, so its uncertainty means nothing: the model is evaluated by "
            f"{by} alone."
        )
    encoder = EvaluatedModel(
        loaded.model,
        loaded.preprocess,
        loaded.tokenizer,
        loaded.probabilistic,
        args.out / "embeddings",
        device=loaded.device,
        precision=args.precision,
        batch_size=args.batch_size,
        workers=args.workers,
        upright=args.exif_orientation,
        bank=bank,
        calibration=calibration,
        also=args.distances,
    )
    return encoder, notes


def write_results(
    args: argparse.Namespace, encoder: EvaluatedModel, results: list[TaskResult], notes: list[str]
) -> None:
    """metrics.csv, the tables on the terminal, the report and, when all else is there, results.json."""
    content: dict[str, Any] = {
        "pcmepp": __version__,
        "model": args.model,
        "pretrained": args.pretrained,
        "weights": encoder.fingerprint,
        "precision": args.precision,
        "split": args.split,
        **({"exif_orientation": True} if args.exif_orientation else {}),
        **({"bank": {"pairs": len(encoder.bank)}} if encoder.bank else {}),
        **({"calibration": encoder.calibration.as_json()} if encoder.calibration else {}),
        "notes": notes,
    }
    for result in results:
        content.setdefault(result.task, {})[result.name] = result.as_json()
    args.out.mkdir(parents=True, exist_ok=True)
    frame = pages.metric_frame(results)
    files.write_whole(args.out / "metrics.csv", lambda path: frame.to_csv(path, index=False))
    for result in results:
        print(f"\n{pages.TITLES[result.task]}: {result.name}")
        print(pages.text_table(result))
    name = args.model if not args.pretrained else f"{args.model}, {Path(args.pretrained).name}"
    lead = f"Split {args.split}, {args.precision}, weights {encoder.fingerprint[:12]}. {' '.join(notes)}"
    asked = list(questions.questions(results))
    print(f"\n{questions.text_tables(asked)}")
    sections = [*asked, *pages.report_sections(results)]
    sections += pictures.picture_sections(results, args.examples, args.tsne, args.tsne_seed)
    sections += pictures.training_section(recorded_history(args.pretrained))
    page = report.write_report(args.out, f"Evaluation of {name}", sections, lead)
    files.write_whole(args.out / "results.json", lambda path: path.write_text(json.dumps(content, indent=1)))
    print(f"\n{args.out / 'results.json'}\n{args.out / 'metrics.csv'}\n{page}")
