"""The tables of the paper. Each row is a line of tables.csv: the paper's numbers, and the flags that make the row.

A name in braces there stands for the flags of that name here. Flags are in addition to those of the scale (`runs`); a
later flag overrides an earlier one. The numbers are those of Chun, "Improved Probabilistic Image-Text Representations",
ICLR 2024.
"""

import csv
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .columns import RETRIEVAL, UNCERTAINTY, ZEROSHOT, Column

# The losses. Every model starts from a CLIP; none but InfoNCE itself has InfoNCE in its loss.
OFF = "--contrastive-weight 0 --match-weight 0 --pp-weight 0 --vib-weight 0"
# The authors' code counts the matching loss once per direction, and alpha and beta were chosen beside that.
MATCH = (
    "--contrastive-weight 0 --match-weight 2 --match-logit learned --train-means-by all --init-match-scale 5 "
    "--init-match-shift 5"
)
VIB, NO_VIB = "--vib-weight 1e-4", "--vib-weight 0"
PP, NO_PP = "--pp-weight 0.1", "--pp-weight 0"
MSDA = "--mixup 2 --cutmix 2 --mix-share 0.25"
FLAGS = {
    "MATCH": MATCH,
    "VIB": VIB,
    "NO_VIB": NO_VIB,
    "PP": PP,
    "NO_PP": NO_PP,
    "MSDA": MSDA,
    "PCMEPP": f"{MATCH} {VIB} {PP} {MSDA}",
    "MEAN_ONLY": f"{MATCH} {NO_VIB} {PP} {MSDA} --distance euclidean",
    "DISTANCE": f"{MATCH} {VIB} {NO_PP}",  # "all newly proposed optimization techniques except VIB are omitted"
    # Distances that divide by the variances start with variances of 1: at those of the configs they are hundreds of
    # times as large. ELK needs that on COCO alone, where it is then about 1.27 D, which b = a d takes up; on the scenes
    # its logits are around 0 from the start of the config.
    "WIDE": "--init-logvar-bias 0",
    "INFONCE": f"{OFF} --contrastive-weight 1 --train-means-by all",
    "VSE": f"{OFF} --triplet-weight 1 --triplet-warmup-epochs 0 --train-means-by all",
    # The authors' code sums PCME's loss over the N^2 pairs of a batch of N = 128 and over both directions: 2 N^2 times
    # the mean, beside which VIB has a weight of 1e-3.
    "PCME": f"{OFF} --pcme-weight 32768 --vib-weight 1e-3 --match-logit learned --train-means-by all "
    "--init-match-scale 5 --init-match-shift 5",
    # 123 negatives less after 5 % of 200 steps, as after 5 % of the authors' training
    "DECL": "--rival decl --eta 12.3",
    "NOISE_20": "--noise-ratio 0.2 --noise-seed 0 --noise-per-caption",
    "NOISE_50": "--noise-ratio 0.5 --noise-seed 0 --noise-per-caption",
    "PRETRAINED": "--contrastive-weight 1 --match-weight 1 --match-logit learned --train-means-by all "
    "--init-match-scale 1 --init-match-shift 1 --pp-weight 0 --vib-weight 1e-6",
}


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's numbers, and the flags that make it.

    Arguments:
        key: the name of the row for `--rows`, unique in its table.
        name: the paper's name for it.
        group: rows are compared within their group.
        flags: flags of `pcmepp train`, or with --rival of `research.rivals`, in one line; "" where nothing is trained.
        by: a distance in `DISTANCES` that items are ranked by, or "ann" and "ann_csd" with `--ann`; in a table of
            zero-shot accuracies the name of the metric.
        start: where the training starts: "clip", a CLIP that was pretrained on the same kind of data, or "scratch".
            Without flags, "clip" evaluates that CLIP itself; "none" runs nothing.
        only: the one scale at which the row makes sense, "" for all.
        checkpoint: which checkpoint of a run on COCO is evaluated, a key of `runs.CHECKPOINTS`.
        coco_flags: further flags of `pcmepp train` on COCO, such as those that count epochs.
        eval_flags: further flags of `pcmepp eval`.
        note: a remark to be printed, such as why the row is not run.
        paper: the paper's numbers by column.
    """

    key: str
    name: str
    group: str = ""
    flags: str = ""
    by: str = "csd"
    start: str = "clip"
    only: str = ""
    scenes_model: str = "PCMEpp-tiny"
    coco_model: str = "PCMEpp-GPO-ViT-B-32"
    checkpoint: str = "best"
    coco_flags: str = ""
    eval_flags: str = ""
    note: str = ""
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """Return the name with that of the group."""
        return f"{self.group}: {self.name}" if self.group else self.name

    def runs_on(self, data: str) -> bool:
        """Return whether the row is run at that scale."""
        return self.start != "none" and self.only in ("", data)


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Arguments:
        summary: one line for `python -m research.paper --list`.
        where: the paper's label of it.
        rows: its rows, in the paper's order.
        data: the scales that it can be run at.
        task: the part of `pcmepp eval` that it reads: "retrieval" or "zeroshot".
    """

    summary: str
    where: str
    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = RETRIEVAL
    data: tuple[str, ...] = ("scenes", "coco")
    task: str = "retrieval"

    def __post_init__(self) -> None:
        keys, known = [row.key for row in self.rows], {column.name for column in self.columns}
        assert len(set(keys)) == len(keys), f"two rows of one key: {keys}"
        for row in self.rows:
            assert known >= set(row.paper), f"{row.key}: numbers of {set(row.paper) - known}, which is no column"


class Figure(NamedTuple):
    """A figure of the paper, and the command that draws it."""

    summary: str
    command: str


def read_row(line: Mapping[str, str]) -> Row:
    """Read a line of tables.csv; an empty cell is the default of `Row`, or a number that the paper does not have."""
    names = {field.name for field in dataclasses.fields(Row)} - {"paper"}
    words: dict[str, Any] = {name: line[name].format_map(FLAGS) for name in names if line[name]}
    numbers = {name: float(line[name]) for name in line if name not in {"table", *names} and line[name]}
    return Row(**words, paper=numbers)


def _tables() -> dict[str, Table]:
    """Read the tables with their rows."""
    with Path(__file__).with_name("tables.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert {line["table"] for line in lines} == set(TITLES)
    beta, imagenet = {"columns": (*RETRIEVAL, *UNCERTAINTY)}, {"columns": ZEROSHOT, "data": ("scenes",)}
    special: dict[str, dict[str, Any]] = {"beta": beta, "imagenet": {**imagenet, "task": "zeroshot"}}
    return {
        name: Table(*title, tuple(read_row(x) for x in lines if x["table"] == name), **special.get(name, {}))
        for name, title in TITLES.items()
    }


TITLES = {  # the summary of each table, and the paper's label
    "main": ("methods on COCO: CLIP zero-shot, VSE∞, InfoNCE, PCME, PCME++", "Table 1"),
    "noise": ("captions shuffled for 20 % and 50 % of the training pairs", "Table 2"),
    "ablation": ("VIB, pseudo-positives and mixed images, on and off", "Table 3"),
    "distances": ("the distance of the matching loss, with VIB alone", "Table 4"),
    "alpha": ("the weight of the pseudo-positives, without and with noise", "Tables C.2 and C.3"),
    "msda": ("settings of Mixup and CutMix", "Table C.4"),
    "beta": ("the weight of VIB: mean uncertainty, and its correlation with R@1", "Table C.5"),
    "architecture": ("layers of the log-variance head, and GPO", "Table C.6"),
    "rivals": ("choices made for DAA, P2RM and DECL, which no paper states", "no table"),
    "inference": ("retrieval by the mean, by distances, and by an approximate index (FAISS)", "Table C.7"),
    "imagenet": ("zero-shot classification by one prompt, all, and the most certain ones", "Table 5"),
}
TABLES = _tables()
_EVAL = "pcmepp eval --model MODEL --pretrained CHECKPOINT --retrieval FOLDER"
FIGURES = {
    "toy": Figure("the 2-D toy: variances of certain and confusing samples (Figure A.1)", "python -m research.toy"),
    "bins": Figure("uncertainty against R@1 in 10 bins (Figure 3)", f"{_EVAL} --out DIR"),
    "uncertain": Figure("the most uncertain images and captions (Figure C.3)", f"{_EVAL} --out DIR"),
    "tsne": Figure("t-SNE of the embeddings with their areas (Figure 4)", f"{_EVAL} --tsne 3 --out DIR"),
    "pseudo-positives": Figure(
        "the number of pseudo-positives in training (Figure C.1b): `pseudo_positives` in its log",
        "pcmepp train --model MODEL --train-data SHARDS --pp-weight 0.1",
    ),
    "overfitting": Figure(
        "overfitting with weak pseudo-positives under noise (Figure C.1a)",
        "python -m research.paper alpha --rows 50-0,50-0.01,50-0.1",
    ),
}
