"""`pcmepp calibrate`: fit the probability that an image and a text are a pair, and save it with its error."""

import argparse
import dataclasses

import torch

from ..data.captioned import read_captioned
from ..data.sources import shown
from ..encode.load import LoadedModel, load_model
from ..gaussian import Gaussian
from . import Bank, Calibration, calibration, scores
from . import command_pairs as pairs
from .store import CALIBRATION_FILE, find_bank, save_calibration, source_of

SAME = 1 - 1e-6  # the cosine of an embedding and its copy in a bank, which is rounded to fp16


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    data = read_captioned(args.data, args.split, "--data")
    path = pairs.output_file(args.out, CALIBRATION_FILE)
    data = pairs.draw(data, min(args.size, len(data.images)), args.seed)
    loaded = load_model(args.model, args.pretrained, args.device)
    bank = chosen_bank(args, loaded)
    images, texts = pairs.encode(loaded, data, args, probabilistic=bank is None)
    if bank is not None:
        check_held_out(images, bank, args.data)
    scale, image_of_text = loaded.scale, torch.tensor(data.image_of_caption)
    inputs = scores.calibration_inputs(images, texts, scale, bank)
    calibrations = [
        calibration.fit_shift(inputs[0], image_of_text),
        calibration.fit(*inputs, image_of_text, "variance" if bank is None else "bank"),
    ]
    errors = {"the data it was fitted to": [candidate.error for candidate in calibrations]}
    if args.other_data:
        data = read_captioned(args.other_data, args.split, "--other-data")
        data = pairs.draw(data, min(args.size, len(data.images)), args.seed)
        images, texts = pairs.encode(loaded, data, args, probabilistic=bank is None)
        inputs = scores.calibration_inputs(images, texts, scale, bank)
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
