"""`pcmepp demo`: a small PCME++ model encodes a picture and a few captions, and shows what it returns."""

import argparse

import open_clip
import torch
from PIL import Image, ImageDraw

from .csd import csd
from .model import PCMEppCLIP

CAPTIONS = ["a shape", "a circle", "a red circle", "a small red circle on a white background", "a blue square"]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="pcmepp demo", description=__doc__)
    parser.add_argument("--model", default="PCMEpp-tiny", help="a PCME++ model of open_clip.list_models()")
    parser.add_argument("--pretrained", help="a tag or a checkpoint of it; without, the weights are random")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    try:
        model, _, preprocess = open_clip.create_model_and_transforms(args.model, pretrained=args.pretrained)
    except RuntimeError as error:  # open_clip's kind for a wrong name, tag or file
        raise ValueError(str(error)) from error
    if not isinstance(model, PCMEppCLIP):
        raise ValueError(f"{args.model} is not a PCME++ model: it has no uncertainties to show.")
    model.eval()
    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).ellipse((20, 20, 44, 44), fill="red")
    with torch.inference_mode():
        image = model.encode_image_gaussian(preprocess(picture)[None])
        texts = model.encode_text_gaussian(open_clip.get_tokenizer(args.model)(CAPTIONS))
        cosine, distance = (image.mean @ texts.mean.T)[0], csd(image, texts)[0]

    print(f"\n{args.model}{'' if args.pretrained else ' with random weights: the numbers mean nothing yet'}")
    print(f"a drawn red circle: uncertainty {image.uncertainty[0]:.4f}\n")
    print(f"{'caption':45} {'uncertainty':>11} {'cosine':>8} {'CSD':>8}")
    for row in zip(CAPTIONS, texts.uncertainty.tolist(), cosine.tolist(), distance.tolist(), strict=True):
        print("{:45} {:11.4f} {:8.3f} {:8.3f}".format(*row))
