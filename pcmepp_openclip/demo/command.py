"""Draw scenes, train PCMEpp-tiny on them, and measure what its uncertainty means.

    pcmepp demo                                        a few minutes on two cores
    pcmepp demo --steps 200 --size 4000 --out small    faster, less accurate
    pcmepp demo --steps 10000 --size 400000            slower, more accurate

The model is trained by `pcmepp train`, as on a cluster. The same seed gives the same result on the same machine.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..system.files import check_folder
from .dataset import HeldOut, draw_held_out, write_retrieval, write_train, write_zeroshot
from .scenes import fitting

MODEL, BATCH = "PCMEpp-tiny", 128
HELD_OUT, ZEROSHOT = 1000, 500
FIGURE = "uncertainty.png"  # docs/images/uncertainty.png is the one of the defaults


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="pcmepp demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=_positive, default=40_000, help="number of training pairs to draw (40000)")
    parser.add_argument("--steps", type=_positive, default=800, help=f"training steps, with {BATCH} pairs each (800)")
    parser.add_argument("--seed", type=int, default=0, help="random seed of scenes, model and training (0)")
    parser.add_argument("--out", type=Path, default=Path("pcmepp-demo"), help="output folder (pcmepp-demo)")
    args = parser.parse_args(argv)
    if args.size < BATCH:
        raise ValueError(f"--size {args.size} is smaller than a batch: draw at least {BATCH} pairs.")
    if (args.out / "run").exists():
        raise ValueError(f"{args.out} already holds a demo: remove it, or choose another folder with --out.")
    check_folder(args.out, "--out")
    start = time.monotonic()
    shards, held_out = draw(args)
    checkpoint = train(args, shards)
    numbers = evaluate(args, checkpoint, held_out)
    print(f"\nDone in {time.monotonic() - start:.0f} s.")
    show(args, numbers)


def draw(args: argparse.Namespace) -> tuple[str, HeldOut]:
    """Write all data. Returns the pattern of the training shards, and the held-out scenes."""
    print(f"1. Drawing {args.size} scenes to train on and {HELD_OUT} held-out ones.", flush=True)
    shards = write_train(args.out / "data" / "train", args.size, args.seed)
    held_out = draw_held_out(HELD_OUT, args.seed)
    write_retrieval(args.out / "data" / "retrieval", held_out)
    write_zeroshot(args.out / "data" / "zeroshot", ZEROSHOT, args.seed)
    return shards, held_out


def train_flags(args: argparse.Namespace, shards: str) -> list[str]:
    """The flags of `pcmepp train`. The settings of the loss are in the model's config."""
    flags = ["--model", MODEL, "--train-data", f"scenes={shards}", "--dataset-type", "webdataset"]
    flags += ["--dataset-resampled", "--train-num-samples", str(args.steps * BATCH), "--epochs", "1"]
    flags += ["--batch-size", str(BATCH), "--lr", "2e-3", "--warmup", str(max(1, args.steps // 10))]
    flags += ["--beta2", "0.98", "--eps", "1e-6"]  # open_clip's defaults for a ViT, which it recognises by name
    flags += ["--aug-cfg", "scale=(1.0,1.0)"]  # no crops: they would cut shapes off and change sizes
    flags += ["--workers", "1", "--precision", "fp32", "--seed", str(args.seed), "--save-every-minutes", "0"]
    return [*flags, "--log-every-n-steps", "100", "--logs", str(args.out), "--name", "run"]


def train(args: argparse.Namespace, shards: str) -> Path:
    """Run `pcmepp train` in a separate process, as a user would. Returns the path of its checkpoint."""
    flags = train_flags(args, shards)
    print(f"\n2. Training: pcmepp train {shlex.join(flags)}", flush=True)
    # One thread is as fast for such a small model, and gives the same sums on any number of cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pcmepp_openclip.train", *flags], env=environment)
    if done.returncode != 0:
        raise ValueError(f"training failed with exit code {done.returncode}: see {args.out / 'run' / 'out.log'}.")
    return args.out / "run" / "checkpoints" / "epoch_1.pt"


def evaluate(args: argparse.Namespace, checkpoint: Path, held_out: HeldOut) -> dict[str, float]:
    """Measure, and write demo.json, the figure, the report and the exported model."""
    import open_clip
    import torch

    from ..evaluation.datasets import read_captioned
    from ..evaluation.encode import Encoder
    from ..models.export import export_model
    from ..reports import plots
    from . import figure
    from .measure import GOALS, Truth, measure
    from .pages import write_report

    print("\n3. Measuring on the held-out scenes.", flush=True)
    model, _, preprocess = open_clip.create_model_and_transforms(MODEL, pretrained=str(checkpoint))
    data = read_captioned(str(args.out / "data" / "retrieval"))
    encoder = Encoder(model, preprocess, open_clip.get_tokenizer(MODEL), True, args.out / "embeddings")
    images, texts = encoder.images(data.images), encoder.texts(data.captions, "captions")
    wording = {text: number for number, text in enumerate(sorted(set(map(str, held_out.captions))))}
    truth = Truth(
        fits_MN=torch.from_numpy(fitting(held_out.captions, held_out.scenes)),
        own_M=torch.tensor(held_out.own),
        text_M=torch.tensor([wording[str(caption)] for caption in held_out.captions]),
        words_M=torch.tensor([len(str(caption).split()) for caption in held_out.captions]),
        things_N=torch.tensor([len(scene.things) for scene in held_out.scenes]),
        condition_N=[scene.condition for scene in held_out.scenes],
    )
    numbers = dict(measure(images, texts, truth))
    result: dict[str, Any] = {"size": args.size, "steps": args.steps, "seed": args.seed, "numbers": numbers}
    result["reached"] = {target.name: target.reached(numbers[target.name]) for target in GOALS}
    (args.out / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    plots.png(figure.draw(held_out, images, texts, truth), args.out / FIGURE, dpi=140)
    write_report(args.out / "report", held_out, images, texts, truth, numbers)
    export_model(model, args.out / "model", MODEL)
    return numbers


def show(args: argparse.Namespace, numbers: dict[str, float]) -> None:
    from .measure import GOALS

    print("\nWhat the uncertainty of this model means, on scenes that it has not seen:\n")
    for target in GOALS:
        value = numbers[target.name]
        verdict = "reached" if target.reached(value) else "not reached"
        target_value = f"target: {'at most' if target.below else 'at least'} {target.value:g}, {verdict}"
        print(f"  {value:6.2f}  {f'({target_value})':35}  {target.words}")
    out, model, data = args.out, args.out / "model", args.out / "data"
    print(f"""
The figure      {out / FIGURE}
The report      {out / "report" / "index.html"}
The numbers     {out / "demo.json"}
The model       {model}, loaded by open_clip.create_model("local-dir:{model}")
The data        {data}
The run         {out / "run"}

Next:
  pcmepp eval --model local-dir:{model} --retrieval {data}/retrieval --zeroshot {data}/zeroshot --out {out}/eval
  pcmepp demo --steps {10 * args.steps} --size {10 * args.size} --out {out}-long
  pcmepp train --model PCMEpp-ViT-B-16 --train-data 'YOUR/SHARDS/{{00000..00331}}.tar' --dry-run""")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
