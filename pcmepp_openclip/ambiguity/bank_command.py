"""`pcmepp bank`: embed drawn pairs, save them as the bank of a model, and report what it confuses."""

import argparse
from pathlib import Path

import torch

from ..data.captioned import read_captioned
from ..data.sources import shown
from ..encode.load import load_model
from . import Bank
from . import command_pairs as pairs
from .bank import TEXTS
from .store import BANK_FILE, CALIBRATION_FILE, load_bank, save_bank

EXAMPLES = 5


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    data = read_captioned(args.data, args.split, "--data")
    if args.size > len(data.images):
        raise ValueError(f"--size {args.size}: there are only {len(data.images)} images in --data; lower --size.")
    path = pairs.output_file(args.out, BANK_FILE)
    data = pairs.draw(data, args.size, args.seed, captions=1)
    loaded = load_model(args.model, args.pretrained, args.device)
    images, texts = pairs.encode(loaded, data, args, probabilistic=False)
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
