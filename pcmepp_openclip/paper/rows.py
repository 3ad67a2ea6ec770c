"""What a table of the paper is."""

from dataclasses import dataclass

from .columns import RETRIEVAL, Column

B32, B16, L14 = "ViT-B-32", "ViT-B-16", "ViT-L-14"


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's numbers, and the flags that make it.

    Arguments:
        key: what `--rows` calls it, unique in its table.
        name: what the paper calls it.
        flags: of `pcmepp train`, in one line; None where the row is not trained.
        paper: the paper's numbers in the order of the columns, None where it has none.
        by: what items are ranked by: a distance in `DISTANCES`, or "ann" and "ann_csd" with `--ann`; in a table of
            zero-shot accuracies the name of the metric.
        group: rows are compared within their group.
        start: where the training starts: "clip", a CLIP that was pretrained on the same kind of data, or "scratch".
            With flags of None, "clip" evaluates that CLIP itself.
        note: what must be said of the row, such as why it is not run.
        scenes_model, coco_model: the models.
        checkpoint: which checkpoint of a run on COCO is evaluated, a key of `tables.CHECKPOINTS`.
        coco_flags: further flags of `pcmepp train` on COCO, such as those that count epochs.
        eval_flags: further flags of `pcmepp eval`.
        only: the one scale at which it makes sense, "" for all.
    """

    key: str
    name: str
    flags: str | None
    paper: tuple[float | None, ...]
    by: str = "csd"
    group: str = ""
    start: str = "clip"
    note: str = ""
    scenes_model: str = "PCMEpp-tiny"
    coco_model: str = f"PCMEpp-GPO-{B32}"
    checkpoint: str = "best"
    coco_flags: str = ""
    eval_flags: tuple[str, ...] = ()
    only: str = ""

    @property
    def runs(self) -> bool:
        """Whether it is run at all."""
        return self.flags is not None or self.start == "clip"

    def runs_on(self, data: str) -> bool:
        return self.runs and self.only in ("", data)


@dataclass(frozen=True)
class Table:
    """A table of the paper: one entry of the registry.

    Arguments:
        about: one line for `pcmepp paper --list`.
        where: the paper's label of it.
        rows: in the paper's order.
        data: the data that it can be run on.
        task: what of `pcmepp eval` it reads: "retrieval" or "zeroshot".
    """

    about: str
    where: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...] = RETRIEVAL
    data: tuple[str, ...] = ("scenes", "coco")
    task: str = "retrieval"

    def __post_init__(self) -> None:
        keys = [row.key for row in self.rows]
        assert len(set(keys)) == len(keys), f"two rows of one key: {keys}"
        for row in self.rows:
            assert len(row.paper) == len(self.columns), f"{row.key}: {len(row.paper)} numbers"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, or a table that another command makes.

    Arguments:
        commands: words after `pcmepp`, for people to copy.
        runs: whether `pcmepp paper` runs the first command itself.
    """

    about: str
    commands: tuple[str, ...]
    runs: bool = False
