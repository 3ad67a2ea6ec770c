"""`pcmepp eval`: read the data, load the model, run the evaluators, and write the results."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from ..ambiguity.store import CALIBRATION_FILE, check_calibration, find_bank, find_calibration
from ..data.captioned import Captioned, read_captioned
from ..encode.encode import process_group
from ..encode.load import has_random_weights, load_model, other_noise, recorded_history
from ..models.pcmepp import ProbabilisticModel
from ..reports import report
from ..system import files
from ..system.version import __version__
from . import coco, pages, pictures, questions
from .columns import EvaluatedModel
from .datasets import Hierarchies, Labelled, read_hierarcaps, read_himo, read_karpathy, read_labelled, read_noisy_pairs
from .tasks import TaskResult, evaluate_correspondence, evaluate_retrieval, evaluate_vagueness, evaluate_zeroshot


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    captioned, labelled, chains = _datasets(args)  # They are read before the model, so that mistakes show at once.
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
        has_val = (Path(where) / args.val_split).is_dir() and args.val_split != args.split
        labelled[name] = read_labelled(where, args.split), read_labelled(where, args.val_split) if has_val else None
    chains: dict[str, Hierarchies] = {}
    if args.hierarcaps:
        chains["hierarcaps"] = read_hierarcaps(args.hierarcaps, args.hierarcaps_images)
    if args.himo:
        chains["himo"] = read_himo(args.himo, args.himo_images)
    return captioned, labelled, chains


def _named(texts: list[str], flag: str) -> list[tuple[str, str]]:
    """Return the name and the place of each dataset; one without a name of its own is called by its folder."""
    places: dict[str, str] = {}
    for text in texts:
        named = re.fullmatch(r"([A-Za-z][\w.-]*)=(.+)", text)
        folder = Path(text).absolute()
        name, where = (named[1], named[2]) if named else ((folder if folder.is_dir() else folder.parent).name, text)
        name = re.sub(r"[^\w.-]+", "-", name) or "data"
        if name in places:
            raise ValueError(f"{flag}: two are called '{name}'; give them names, as in first={where}.")
        places[name] = where
    return list(places.items())


def load(args: argparse.Namespace) -> tuple[EvaluatedModel, list[str]]:
    """Load the model, ready to encode, and return it with the notes that its results need."""
    loaded = load_model(args.model, args.pretrained, args.device)
    if args.distances and not loaded.probabilistic:
        raise ValueError(f"--distances needs trained log-variances, which {args.model} lacks: drop it.")
    bank, calibration = find_bank(loaded, args.bank), find_calibration(loaded, args.calibration)
    if calibration is not None:
        check_calibration(calibration, loaded, bank, str(args.calibration or loaded.file_beside(CALIBRATION_FILE)))
    basis = "its means" if bank is None else "its means and its bank"
    notes = []
    if has_random_weights(args.model, args.pretrained):
        notes.append(f"{args.model} has random weights: give --pretrained.")
    if not isinstance(loaded.model, ProbabilisticModel):
        notes.append(f"{args.model} has no log-variance branch: it is evaluated by {basis} alone.")
    elif not loaded.probabilistic:
        notes.append(
            "The log-variance branch is untrained, so its uncertainty means nothing: the model is evaluated by "
            f"{basis} alone."
        )
    settings = args.precision, args.batch_size, args.workers, args.exif_orientation
    return EvaluatedModel(loaded, args.out / "embeddings", *settings, bank, calibration, args.distances), notes


def write_results(
    args: argparse.Namespace, encoder: EvaluatedModel, results: list[TaskResult], notes: list[str]
) -> None:
    """Write metrics.csv, the tables on the terminal, the report and, when all else is there, results.json."""
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
        print(f"\n{pages.TASKS[result.task][0]}: {result.name}")
        print(pages.text_table(result))
    name = args.model if not args.pretrained else f"{args.model}, {Path(args.pretrained).name}"
    lead = f"Split {args.split}, {args.precision}, weights {encoder.fingerprint[:12]}. {' '.join(notes)}"
    overview = list(questions.questions(results))
    print(f"\n{questions.text_tables(overview)}")
    sections = [*overview, *pages.report_sections(results)]
    sections += pictures.picture_sections(results, args.examples, args.tsne, args.tsne_seed)
    sections += pictures.training_section(recorded_history(args.pretrained))
    page = report.write_report(args.out, f"Evaluation of {name}", sections, lead)
    files.write_whole(args.out / "results.json", lambda path: path.write_text(json.dumps(content, indent=1)))
    print(f"\n{args.out / 'results.json'}\n{args.out / 'metrics.csv'}\n{page}")
