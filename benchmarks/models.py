"""Every model of open_clip's as a PCME++ model: does it build and train, and is its mean the plain model's embedding?

python -m benchmarks models                         all of them; about 20 minutes on one core
python -m benchmarks models RN50 ViT-B-16-SigLIP    some of them
python -m benchmarks models --page docs/models.md   with the table written into a page

The FLOPs are counted at the model's own image size and context length. The pass with real numbers is one of two random
images of a few patches and two random texts, with random weights.
"""

import dataclasses
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from tqdm import tqdm

from . import results
from .flops import SPLIT, TOP, Count, count
from .hf_configs import LAYERS
from .measure import new_processes
from .twins import PREFIX, cut, deviation, trunks_cut

LARGE = 3e8  # a model with more parameters is cut before it is run
PER_PROCESS = 16  # a process checks so many models
MAY_FAIL = 4  # so many of all models may fail
TOLERANCE = 1e-5  # the largest difference of a mean from the plain model's embedding
HEADS = ["model", "image tower", "text tower", "branches"]
HEADS += ["parameters", "added", "training FLOPs", "checked", "deviation", ""]
START, END = "<!-- python -m benchmarks models -->", "<!-- end -->"


@dataclass(frozen=True)
class Checked:
    """One line of the table.

    Arguments:
        name: the name of the plain model.
        image, text: its towers in words.
        plain, ours: the costs of the two models; None if they do not build.
        how: "run" with real numbers, "run, 4 layers" with towers that were cut, "meta" for shapes only.
        deviation: the largest difference of an embedding from the plain model's; None without numbers.
        reason: why it does not work, in a sentence; empty if it does.
    """

    name: str
    image: str
    text: str
    plain: Count | None = None
    ours: Count | None = None
    how: str = ""
    deviation: float | None = None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours.flops / self.plain.flops if self.plain and self.ours else None

    @property
    def bar(self) -> float:
        return SPLIT if self.ours and set(self.ours.branches) == {"split"} else TOP

    def cells(self) -> list[str]:
        plain, ours, ratio = self.plain, self.ours, self.ratio
        return [
            self.name,
            self.image,
            self.text,
            ", ".join(ours.branches) if ours else "",
            f"{plain.parameters / 1e6:.0f} M" if plain else "",
            f"{100 * (ours.parameters / plain.parameters - 1):.1f} %" if plain and ours else "",
            "" if ratio is None else f"{ratio:.3f}" + (f" > {self.bar}" if ratio > self.bar else ""),
            self.how,
            "" if self.deviation is None else f"{self.deviation:.0e}",
            self.reason or "ok",
        ]


def towers(name: str) -> tuple[str, str]:
    """Return the image tower and the text tower of a plain model, in a few words."""
    config = open_clip.get_model_config(name)
    assert config is not None
    vision, text = config["vision_cfg"], config["text_cfg"]
    own = f"ViT, {vision['layers']} layers" if isinstance(vision.get("layers"), int) else "ResNet"
    image = f"timm {vision['timm_model_name']}" if "timm_model_name" in vision else own
    return image, text.get("hf_model_name") or f"{text.get('layers', 12)} layers"


def check(name: str) -> Checked:
    """Return the line of one model."""
    line = Checked(name, *towers(name))
    try:
        line = dataclasses.replace(line, plain=(plain := count(name)))
    except Exception as error:
        return dataclasses.replace(line, reason=f"The plain model fails: {sentence(error)}")
    try:
        line = dataclasses.replace(line, ours=(ours := count(PREFIX + name)), how="meta")
        if idle := sorted(ours.idle - plain.idle):
            return dataclasses.replace(line, reason=f"{len(idle)} parameters get no gradient, such as {idle[0]}.")
        if plain.parameters <= LARGE:
            how, largest = "run", deviation(name)
        else:
            with trunks_cut():
                how, largest = f"run, {LAYERS} layers", deviation(name, **cut(name))
    except Exception as error:
        return dataclasses.replace(line, reason=sentence(error))
    reason = "" if largest <= TOLERANCE else "The mean is not the plain model's embedding."
    return dataclasses.replace(line, how=how, deviation=largest, reason=reason)


def check_all(names: Sequence[str], check: Callable[[str], Checked] = check) -> Iterator[Checked]:
    """Yield the lines of the models, one by one.

    They come from another process, which is replaced now and then: it may die for lack of memory, and not all that it
    has used is given back.
    """
    names_left = list(names)
    while names_left:
        with ProcessPoolExecutor(1, new_processes(), _start) as pool:
            for _ in range(min(PER_PROCESS, len(names_left))):
                name = names_left.pop(0)
                try:
                    yield pool.submit(check, name).result()
                except BrokenProcessPool:
                    yield Checked(name, *towers(name), reason="The process died, most likely for lack of memory.")
                    break


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def sentence(error: Exception) -> str:
    """Return an error in one line that does not break a table."""
    text = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {text[:200]}" if not isinstance(error, ValueError) else text[:200]


def summary(lines: list[Checked]) -> str:
    """Return the counts in words."""
    fine = [line for line in lines if not line.reason]
    run = [line.deviation for line in fine if line.deviation is not None]
    text = f"{len(fine)} of {len(lines)} models build and run forward and backward; "
    text += f"{len(run)} of them with numbers" + (f", with a deviation of at most {max(run):.0e}" if run else "") + "."
    for bar, placement in ((SPLIT, "both branches split off"), (TOP, "a branch is on top")):
        ratios = [line.ratio for line in fine if line.bar == bar and line.ratio is not None]
        text += f" Where {placement}, {sum(r <= bar for r in ratios)} of {len(ratios)} need at most {bar} of the FLOPs."
    return text


def parts(page: Path) -> tuple[str, str]:
    """Return the text of a page before and after its table, markers included."""
    if not page.is_file():
        raise ValueError(f"--page: there is no file {page}.")
    before, start, after_start = page.read_text().partition(START)
    _, end, after = after_start.partition(END)
    if not start or not end:
        raise ValueError(f"--page: {page} lacks the line {START} or the line {END}.")
    return before + start, end + after


def main(argv: list[str]) -> None:
    parser = results.parser("benchmarks models", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="plain models of open_clip's; all by default")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a Markdown page to write the table into as well")
    args = parser.parse_args(argv)
    plain = [name for name in open_clip.list_models() if not name.startswith(PREFIX)]
    for name in args.names:
        if name not in plain:
            parser.error(f"open_clip has no model '{name}'.")
    try:
        around = parts(args.page) if args.page else None
    except ValueError as error:
        parser.error(str(error))
    names, start = args.names or plain, time.monotonic()
    lines = list(tqdm(check_all(names), total=len(names), unit="model"))
    minutes = f"{(time.monotonic() - start) / 60:.1f} minutes"
    table = results.markdown(HEADS, [line.cells() for line in lines])
    text = f"{table}\n\n{results.machine()}; {minutes}.\n\n{summary(lines)}"
    columns = HEADS[1:-1]
    records: list[dict[str, Any]] = [
        {"name": line.name, **dict(zip(columns, line.cells()[1:-1], strict=True)), "reason": line.reason}
        for line in lines
    ]
    results.save(args.out, "models", text, records)
    if around:
        args.page.write_text(f"{around[0]}\n\n{text}\n\n{around[1]}")
    print(text)
    if sum(bool(line.reason) for line in lines) > (0 if args.names else MAY_FAIL):
        sys.exit(1)
