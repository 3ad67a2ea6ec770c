"""Measure what the uncertainty of PCMEpp-tiny means under other settings of the loss.

python -m research.sweep [--steps 1000] [--lr 1e-3] [match_weight=10 init_match_scale=5 ...]

One run trains the model on the demo's scenes, held in memory, with the optimizer and schedule of `pcmepp demo`, and
prints the numbers of `pcmepp_openclip.demo.measure` on held-out scenes; --out appends them to a CSV file. It differs
from the demo only in speed: no shards, no image augmentation, and an embedding for the words that occur instead of all
of CLIP's.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import open_clip
import pandas as pd
import torch
from torch import Tensor

import pcmepp_openclip as pp
from pcmepp_openclip.ambiguity import Bank
from pcmepp_openclip.config import PCMEppCfg
from pcmepp_openclip.demo.dataset import HeldOut
from pcmepp_openclip.demo.drawing import render
from pcmepp_openclip.demo.goals import ESTIMATORS, GOALS
from pcmepp_openclip.demo.measure import BANK, Truth, measure, truth_of
from pcmepp_openclip.demo.scenes import draw_caption, draw_scene
from pcmepp_openclip.gaussian import Gaussian

COLUMNS = (
    *(prefix + goal.name for goal in GOALS for prefix in ESTIMATORS.values()),
    "own_R@1", "text_to_image_mAP@R", "image_to_text_mAP@R", "wording_mAP@R", "wording_prior_mAP@R",
    "bank/wording_prior_mAP@R", "wording_oracle_mAP@R", "blurred_auroc_of_1", "blurred_auroc_of_2",
)  # fmt: skip


@dataclasses.dataclass
class Pairs:
    """Scenes with their captions, and the inputs of a model that are made of them."""

    pixels: Tensor  # uint8, [N, 3, 32, 32]
    tokens: Tensor  # [M, 16]
    drawn: HeldOut


def make_pairs(seed: Any, size: int, captions: int = 1) -> Pairs:
    random = Random(seed)
    scenes = [draw_scene(random) for _ in range(size)]
    said = [draw_caption(random, scene) for scene in scenes for _ in range(captions)]
    pixels = torch.from_numpy(np.stack([np.asarray(render(scene)) for scene in scenes])).permute(0, 3, 1, 2)
    texts = [str(caption) for caption in said]
    unique = sorted(set(texts))
    ids = dict(zip(unique, open_clip.get_tokenizer("PCMEpp-tiny")(unique)[:, :16], strict=True))
    return Pairs(pixels.contiguous(), torch.stack([ids[text] for text in texts]), HeldOut(scenes, said))


def to_input(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(x)[:, None, None] for x in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    return (pixels.float() / 255 - mean) / std


def make_optimizer(model: Any, args: Any) -> torch.optim.Optimizer:
    """Return the optimizer of open_clip_train: no decay for gains, biases and scales."""
    named = list(model.named_parameters())
    plain = [p for n, p in named if p.ndim < 2 or any(x in n for x in ("bn", "ln", "bias", "logit_scale"))]
    rest = [p for _, p in named if not any(p is q for q in plain)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": rest, "weight_decay": args.wd}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=args.eps)


def train(model: Any, loss: Any, data: Pairs, args: Any, on_step: Any) -> None:
    optimizer = make_optimizer(model, args)
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    for step in range(args.steps):
        if len(order) < args.batch:
            order = torch.randperm(len(data.pixels), generator=generator)
        rows, order = order[: args.batch], order[args.batch :]
        rate = (step + 1) / args.warmup if step < args.warmup else None
        cosine = 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (args.steps - args.warmup)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (cosine if rate is None else rate)
        optimizer.zero_grad()
        terms = loss(**model(to_input(data.pixels[rows]), data.tokens[rows]), output_dict=True)
        sum(terms.values()).backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        on_step(step + 1, terms)


@torch.inference_mode()
def encode(model: Any, data: Pairs, chunk: int = 500) -> tuple[Gaussian, Gaussian]:
    images = [model.encode_image_gaussian(to_input(part)) for part in data.pixels.split(chunk)]
    texts = [model.encode_text_gaussian(part) for part in data.tokens.split(chunk)]
    return Gaussian(*map(torch.cat, zip(*images, strict=True))), Gaussian(*map(torch.cat, zip(*texts, strict=True)))


def shrink_vocabulary(config: dict, *datasets: Pairs) -> None:
    """Number the tokens that occur anew, in order: the largest, the end of text, stays so."""
    used = torch.cat([data.tokens.flatten() for data in datasets]).unique()
    for data in datasets:
        data.tokens = torch.searchsorted(used, data.tokens)
    config["text_cfg"]["vocab_size"] = len(used)


def build(config: dict, seed: int) -> tuple[Any, pp.PCMEppLoss]:
    """Return a new model and the loss of its config."""
    torch.manual_seed(seed)
    model = pp.PCMEppCLIP(**config, output_dict=True)
    cfg = PCMEppCfg.parse(config["pcmepp_cfg"])
    options: dict[str, Any] = {"distance": cfg.distance, "reduction": cfg.reduction, **cfg.weights}
    return model, pp.PCMEppLoss(train_means_by=cfg.train_means_by, **options)


@torch.no_grad()
def measured(model: Any, data: Pairs, images: Gaussian, texts: Gaussian, truth: Truth) -> dict[str, float]:
    """Return the numbers of the demo, with a bank of the first training pairs."""
    seen = encode(model, dataclasses.replace(data, pixels=data.pixels[:BANK], tokens=data.tokens[:BANK]))
    bank = Bank(seen[0].mean, seen[1].mean, model.logit_scale.exp().item())
    return dict(measure(images, texts, truth, bank, model.match_scale.item()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.sweep", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of pcmepp_cfg")
    parser.add_argument("--size", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--wd", type=float, default=0.2)
    parser.add_argument("--eps", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=0, help="also measure on the way")
    parser.add_argument("--out", type=Path, help="append the row to this CSV file")
    for tower in ("vision", "text"):
        parser.add_argument(f"--{tower}-layers", type=int)
        parser.add_argument(f"--{tower}-width", type=int)
    parser.add_argument("--patch", type=int)
    parser.add_argument("--dim", type=int)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)

    config = open_clip.get_model_config("PCMEpp-tiny")
    block = config["pcmepp_cfg"]
    for setting in args.settings:
        key, value = setting.split("=")
        try:
            block[key] = json.loads(value)
        except json.JSONDecodeError:  # it is a word, such as reduction=sum
            block[key] = value
    for tower in ("vision", "text"):
        for key in ("layers", "width"):
            config[f"{tower}_cfg"][key] = getattr(args, f"{tower}_{key}") or config[f"{tower}_cfg"][key]
    config["text_cfg"]["heads"] = config["text_cfg"]["width"] // 32
    config["vision_cfg"]["patch_size"] = args.patch or config["vision_cfg"]["patch_size"]
    config["embed_dim"] = args.dim or config["embed_dim"]
    data, held_out = make_pairs(f"train {args.seed}", args.size), make_pairs(f"test {args.seed}", 1000, captions=4)
    shrink_vocabulary(config, data, held_out)
    truth = truth_of(held_out.drawn)

    model, loss = build(config, args.seed)
    start = time.monotonic()
    row: dict[str, Any] = {}

    def on_step(step: int, terms: dict[str, Tensor]) -> None:
        if step == args.steps or (args.every and step % args.every == 0):
            images, texts = encode(model, held_out)
            numbers = measured(model, data, images, texts, truth)
            row.update(
                settings=" ".join(argv), step=step, seconds=round(time.monotonic() - start),
                **{name: round(numbers[name], 3) for name in COLUMNS},
                a=round(model.match_scale.item(), 2), b=round(model.shift.item(), 2),
                scale=round(model.logit_scale.exp().item(), 1),
                image_u=round(images.uncertainty.mean().item(), 3), text_u=round(texts.uncertainty.mean().item(), 3),
                loss=" ".join(f"{name[:5]}={value.item():.3g}" for name, value in terms.items()),
            )  # fmt: skip
            print(" | ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    train(model, loss, data, args, on_step)
    if args.out:
        pd.DataFrame([row]).to_csv(args.out, mode="a", header=not args.out.exists(), index=False)


if __name__ == "__main__":
    main()
