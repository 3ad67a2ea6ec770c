"""`pcmepp bank`: make the bank of a model, which tells what its embeddings say of images and texts, without training.

    pcmepp bank --model ViT-B-32 --pretrained laion2b_s34b_b79k --data 'cc3m/{00000..00010}.tar' --out bank.safetensors
    pcmepp bank --model local-dir:exported --data FOLDER --out exported      # beside the weights

It embeds pairs that are drawn at random, one caption per image. Choose pairs similar to your data, but not the ones
that you evaluate on.
"""

from pathlib import Path

import torch

from ..data.captioned import read_captioned
from ..data.sources import shown
from ..encode.load import load_model
from . import Bank
from . import command_pairs as pairs
from .bank import TEXTS
from .store import BANK_FILE, CALIBRATION_FILE, load_bank, save_bank

SIZE = 4096
EXAMPLES = 5


def main(argv: list[str]) -> None:
    args = pairs.parser("bank", __doc__, SIZE, "pairs in the bank").parse_args(argv)
    pairs.check_arguments(args, least_size=2)
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
    """The size of the file, and what the bank says of some of its own captions."""
    print(f"{path}: {len(bank)} pairs, {path.stat().st_size / 1e6:.1f} MB.")
    if (beside := path.with_name(CALIBRATION_FILE)).exists():
        print(f"{beside} was made before this bank: run `pcmepp calibrate` again if it was fitted with a bank.")
    confusion_B = bank.confusion(bank.texts_BD, TEXTS)
    order = confusion_B.argsort(descending=True)
    print(f"\nCaptions in the bank, and among how many of its {len(bank):,} images the model confuses them:")
    for i in dict.fromkeys(torch.linspace(0, len(order) - 1, EXAMPLES).long().tolist()):
        row = int(order[i])
        print(f"  {confusion_B[row]:8.1f}  {shown(captions[row])}")
