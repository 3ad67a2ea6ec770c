"""Four questions on one page: what is found, which failures are foreseen, what an embedding is worth, what is vague.

Each has one table over all datasets of an evaluation, which shows the uncertainty, the bank if there is one, and what
needs neither.
"""

from collections.abc import Iterator, Sequence

import pandas as pd

from ..reports.report import Section
from ..system.redact import printable
from .neighbours import HIT
from .pages import cells, metric_frame, words_of
from .tasks import TaskResult

RETRIEVAL = """\
R@k is the share of queries whose own partner is among the first k. The length of the list is what holds the partner
in 90 % of the cases, by split-conformal calibration. CSD asks which caption was written for the image, the cosine
how related they are, and entailment whether the caption is true, which mAP@R counts where all true matches are
known. "bank" is the cosine corrected for hubness, and "bank entailment" asks the last question of a bank of reference
pairs in place of the variance; on photographs, neither entailment nor CSD was better than the corrected cosine."""
FAILURE = """\
Which queries miss? AUROC is 0.5 by chance and 1 at best; FPR95, AURC and E-AURC are better if lower; AUPR of errors
is better if higher and by chance the share of misses. "-SR2" is 1 where hits fall evenly over 10 levels of
uncertainty, with a 95 % interval over queries; "bin correlation" is -1 there.

The uncertainty is the sum of the variances. "bank" is the effective number of references that the query is confused
among, "bank over the gallery" the same among the items at hand. Read both against the confidences that any
CLIP has: the largest cosine, the largest probability of the softmax, its entropy, Doctor, and the number of words."""
REPRESENTATION = """\
Is an image's nearest other image of the same class (R@1), and does the image's uncertainty tell (R-AUROC; 0.5 by
chance)? The last column is how often a centre crop is more uncertain than the whole image."""
VAGUENESS = """\
Are vague captions more uncertain? Kendall's tau is of the depth of a caption in a chain from vague to exact with its
certainty, 1 at best and 0 by chance; below it the same for the bank, for the distance from the empty caption and for
the number of words. The rank correlations are with the number of images that a caption fits, and with its number of
words."""
MISSING = "Not evaluated here: it needs {flags}."

FAILURE_COLUMNS = (
    *("miss_AUROC", "FPR95", "AUPR_error", "AURC_x1000", "E-AURC_x1000"),
    *("-SR2_10_levels", "bin_correlation"),
)
RETRIEVAL_COLUMNS = ("R@1", "R@5", "R@10", "any_match_R@1", "mAP@R", "conformal_list_size")
REPRESENTATION_COLUMNS = ("R@1", "R-AUROC", "cropped_has_bigger_uncertainty")
VAGUENESS_COLUMNS = (
    "kendall_tau",
    "traversal_precision",
    "traversal_recall",
    "HiMo@K",
    "spearman_matches",
    "spearman_caption_length",
)


def questions(results: Sequence[TaskResult]) -> Iterator[Section]:
    """Yield the four sections; one without data says what it needs."""
    frame = metric_frame(results)
    frame["cell"] = cells(frame)
    frame["score"] = frame.score.replace({"": "uncertainty", "bank_gallery": "bank over the gallery"})
    retrieval = _table(frame[frame.direction != ""], ("dataset", "direction", "distance"), RETRIEVAL_COLUMNS)
    failure = _table(frame, ("dataset", "samples", "hit", "score"), FAILURE_COLUMNS)
    for number, (title, text, table, flags) in enumerate(
        (
            ("Retrieval: what is found?", RETRIEVAL, retrieval, "--retrieval or --coco"),
            ("Failure: is a miss foreseen?", FAILURE, failure, "--retrieval or --zeroshot"),
            ("Representation: what is an embedding worth?", REPRESENTATION, _representation(frame), "--zeroshot"),
            ("Vagueness: are vague captions uncertain?", VAGUENESS, _vagueness(frame), "--hierarcaps or --retrieval"),
        ),
        start=1,
    ):
        header = [words_of(column) for column in table.columns]
        rows = [[words_of(str(cell)) for cell in row] for row in table.itertuples(index=False)]
        yield Section(f"{number}. {title}", text if rows else MISSING.format(flags=flags), rows, header if rows else ())


def text_tables(sections: Sequence[Section]) -> str:
    """Return the sections' tables for the terminal."""
    tables = (pd.DataFrame(section.rows, columns=section.header).to_string(index=False) for section in sections)
    known = [(section, table) for section, table in zip(sections, tables, strict=True) if section.rows]
    return printable("\n\n".join(f"{section.title}\n{table}" for section, table in known))


def _representation(frame: pd.DataFrame) -> pd.DataFrame:
    keys = ["dataset", "task", "score"]
    judged = frame[frame["name"] == "R-AUROC"]
    right = frame[(frame.hit == HIT) & (frame["name"] == "hits_of_all")].assign(name="R@1")
    right = right.drop(columns="score").merge(judged[keys], on=keys[:2])  # R@1 is that of every row
    crops = frame[frame["name"] == "cropped_has_bigger_uncertainty"]
    return _table(pd.concat([right, judged, crops]), keys, REPRESENTATION_COLUMNS)


def _vagueness(frame: pd.DataFrame) -> pd.DataFrame:
    by_distance = frame["name"] == "HiMo@K"
    frame = frame.assign(score=frame.score.mask(by_distance, "ranked by " + frame.distance))
    return _table(frame, ("dataset", "task", "score"), VAGUENESS_COLUMNS)


def _table(frame: pd.DataFrame, keys: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Return a row per combination of keys, in the order in which these first occur, and a column per metric of `names`
    that occurs."""
    frame = frame[frame["name"].isin(names)]
    if frame.empty:
        return pd.DataFrame()
    rows = frame[list(keys)].drop_duplicates()
    wide = frame.pivot(index=list(keys), columns="name", values="cell")
    wide = wide[[name for name in names if name in wide.columns]].fillna("")
    return rows.join(wide, on=list(keys))
