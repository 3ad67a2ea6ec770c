"""`pcmepp bank` embeds drawn pairs as the bank of a model, and `pcmepp calibrate` fits the probability of a pair."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from random import Random

import torch

from ..data.captioned import Captioned, read_captioned
from ..data.sources import shown
from ..encode.encode import Encoder
from ..encode.load import LoadedModel, load_model
from ..gaussian import Gaussian
from ..system.files import check_folder
from . import Bank, Calibration, calibration
from .bank import TEXTS
from .store import BANK_FILE, CALIBRATION_FILE, find_bank, load_bank, save_bank, save_calibration, source_of

EXAMPLES = 5  # Of so many captions of a new bank the confusion is printed.
SAME = 1 - 1e-6  # the cosine of an embedding and its copy in a bank, which is rounded to fp16


def make_bank(args: argparse.Namespace) -> None:
    """Run `pcmepp bank`."""
    data = read_captioned(args.data, args.split, "--data")
    if args.size > len(data.images):
        raise ValueError(f"--size {args.size}: there are only {len(data.images)} images in --data; lower --size.")
    path = output_file(args.out, BANK_FILE)
    data = draw(data, args.size, args.seed, captions=1)
    loaded = load_model(args.model, args.pretrained, args.device)
    images, texts = encode(loaded, data, args, probabilistic=False)
    save_bank(Bank(images.mean, texts.mean, loaded.scale), path, loaded.bank_fingerprint)
    report(load_bank(path), data.captions, path)


def report(bank: Bank, captions: list[str], path: Path) -> None:
    """Print the size of the file, and the confusion of some of the bank's own captions."""
    print(f"{path}: {len(bank)} pairs, {path.stat().st_size / 1e6:.1f} MB.")
    if (beside := path.with_name(CALIBRATION_FILE)).exists():
        print(f"{beside} was made before this bank: run `pcmepp calibrate` again if it was fitted with a bank.")
    confusion_B = bank.confusion(bank.texts_BD, TEXTS)
    order = confusion_B.argsort(descending=True)
    print(f"\nCaptions in the bank, and among how many of its {len(bank):,} images the model confuses them:")
    for i in dict.fromkeys(torch.linspace(0, len(order) - 1, EXAMPLES).long().tolist()):
        row = int(order[i])
        print(f"  {confusion_B[row]:8.1f}  {shown(captions[row])}")


def calibrate(args: argparse.Namespace) -> None:
    """Run `pcmepp calibrate`."""
    data = read_captioned(args.data, args.split, "--data")
    path = output_file(args.out, CALIBRATION_FILE)
    data = draw(data, min(args.size, len(data.images)), args.seed)
    loaded = load_model(args.model, args.pretrained, args.device)
    bank = chosen_bank(args, loaded)
    images, texts = encode(loaded, data, args, probabilistic=bank is None)
    if bank is not None:
        check_held_out(images, bank, args.data)
    scale, image_of_text = loaded.scale, torch.tensor(data.image_of_caption)
    inputs = calibration.calibration_inputs(images, texts, scale, bank)
    calibrations = [
        calibration.fit_shift(inputs[0], image_of_text),
        calibration.fit(*inputs, image_of_text, "variance" if bank is None else "bank"),
    ]
    errors = {"the data it was fitted to": [candidate.error for candidate in calibrations]}
    if args.other_data:
        data = read_captioned(args.other_data, args.split, "--other-data")
        data = draw(data, min(args.size, len(data.images)), args.seed)
        images, texts = encode(loaded, data, args, probabilistic=bank is None)
        inputs = calibration.calibration_inputs(images, texts, scale, bank)
        pair_NM = torch.arange(len(data.images))[:, None] == torch.tensor(data.image_of_caption)
        errors["the other data"] = [
            calibration.reliability(candidate.probability(*inputs), pair_NM)[1] for candidate in calibrations
        ]
    before, after = list(errors.values())[-1]
    chosen = calibrations[0 if args.other_data and before < after else 1]
    save_calibration(
        dataclasses.replace(chosen, source=source_of(loaded, bank if chosen.estimator == "bank" else None)), path
    )
    print(summary(chosen, errors))
    print(path)


def chosen_bank(args: argparse.Namespace, loaded: LoadedModel) -> Bank | None:
    """Return the bank by --bank and --estimator, or None to use the variances."""
    bank = None if args.estimator == "variance" else find_bank(loaded, args.bank)
    if bank is None and args.estimator == "bank":
        raise ValueError(f"--estimator bank: {args.model} has no bank beside its weights; give --bank FILE.")
    if bank is None and not loaded.probabilistic:
        raise ValueError(f"{args.model} has no trained variances: make a bank by `pcmepp bank`, and give --bank FILE.")
    return bank


def check_held_out(images: Gaussian, bank: Bank, data: str) -> None:
    """Raise a ValueError if more than one in ten images is in the bank, where its own pair adds to its hubness. Fewer
    may be copies, which large collections have."""
    cosine_NB = images.mean.double() @ bank.images_BD.double().T
    known = int((cosine_NB.amax(dim=1) > SAME).sum())
    if 10 * known > len(cosine_NB):
        raise ValueError(
            f"--data {shown(data)}: {known} of its {len(cosine_NB)} images are those of the bank, and a calibration "
            "needs pairs that the bank does not hold: give others, or another --bank."
        )


def summary(fitted: Calibration, errors: dict[str, list[float]]) -> str:
    lines = [
        f"Fitted to {fitted.pairs} captions with their images, by the {fitted.estimator}.",
        f"  scale {fitted.scale:.4f}, image weight {fitted.image_weight:.4f}, text weight {fitted.text_weight:.4f}, "
        f"shift {fitted.shift:.4f}",
        "Expected calibration error at a prior of 1/2, on images that were not fitted to:",
    ]
    for where, (shift, calibrated) in errors.items():
        lines += [f"  {where}:", f"    {shift:.4f}  sigmoid(s cos + shift)", f"    {calibrated:.4f}  calibrated"]
    shift, calibrated = list(errors.values())[-1]
    if shift < calibrated:
        lines.append(
            "The shift alone transfers better and is saved."
            if len(errors) > 1
            else "The calibration is no better than the shift alone: give more images."
        )
    return "\n".join(lines)


def output_file(out: Path, name: str) -> Path:
    """Return the file that `--out` names: `out` if it ends as `name` does, else the file `name` in that folder."""
    path = out if out.suffix == Path(name).suffix and not out.is_dir() else out / name
    check_folder(path.parent, "--out")
    if path.is_dir():
        raise ValueError(f"--out {out}: {path} is a folder; name another place.")
    return path


def draw(data: Captioned, size: int, seed: int, captions: int | None = None) -> Captioned:
    """Draw `size` images without replacement, in random order, with all of their captions, or with so many of each
    that are drawn too."""
    of_image: list[list[str]] = [[] for _ in data.images]
    for caption, image in zip(data.captions, data.image_of_caption, strict=True):
        of_image[image].append(caption)
    random, pairs = Random(seed), Captioned()
    for i in random.sample(range(len(data.images)), size):
        drawn = of_image[i] if captions is None else random.sample(of_image[i], captions)
        pairs.add(data.images[i], drawn, data.facts[i])
    return pairs


def encode(
    loaded: LoadedModel, data: Captioned, args: argparse.Namespace, probabilistic: bool
) -> tuple[Gaussian, Gaussian]:
    """Encode the images and the captions, by the means alone unless `probabilistic`."""
    with tempfile.TemporaryDirectory(prefix="pcmepp-embeddings-") as cache:
        loaded = dataclasses.replace(loaded, probabilistic=probabilistic)
        encoder = Encoder(loaded, Path(cache), batch_size=args.batch_size, workers=args.workers)
        return encoder.images(data.images), encoder.texts(data.captions)
