"""The four tables that a report begins with."""

from eval_data import CLASSES

from pcmepp_openclip.evaluation.datasets import Captioned, Hierarchies, Labelled
from pcmepp_openclip.evaluation.metric import Metric
from pcmepp_openclip.evaluation.questions import questions, text_tables
from pcmepp_openclip.evaluation.tasks import TaskResult


def failures(samples, hit, values):
    for score, value in values.items():
        for name in ("miss_AUROC", "FPR95", "AUPR_error", "AURC_x1000", "E-AURC_x1000"):
            yield Metric(name, value, samples=samples, hit=hit, score=score)


def results(probabilistic=True):
    uncertainty = {"": 0.75} if probabilistic else {}
    retrieval = [
        Metric(name, value, distance, "image_to_text")
        for distance in ("cosine", "csd")
        for name, value in (("R@1", 0.5), ("mAP@R", 0.3))
    ]
    retrieval += [Metric("RSUM", 321.0, "cosine"), *failures("images", "csd_R@1", uncertainty | {"max_softmax": 0.7})]
    zeroshot = [*failures("images", "accuracy", uncertainty | {"max_softmax": 0.8})]
    zeroshot += [Metric("hits_of_all", 0.25, samples="images", hit="neighbour_R@1")]
    for score in (*uncertainty, "max_cosine"):
        zeroshot.append(Metric("R-AUROC", 0.6, samples="images", hit="neighbour_R@1", score=score))
    if probabilistic:
        about = {"samples": "images", "hit": "csd_R@1"}
        retrieval += [
            Metric("-SR2_10_levels", 0.9, **about, low=0.8, high=0.95),
            Metric("bin_correlation", -1, **about),
        ]
        retrieval += [Metric("bin_correlation", 0.123, samples="images", hit="csd_any_match_R@1")]
        for metrics in (retrieval, zeroshot):  # of one name, in two tasks
            metrics.append(Metric("cropped_has_bigger_uncertainty", 0.5, samples="images"))
    vague = [Metric("kendall_tau", 0.6, samples="captions", score=score) for score in (*uncertainty, "radius")]
    vague.append(Metric("HiMo@K", 0.4, "cosine"))
    return [
        TaskResult("d", "retrieval", Captioned(), {}, retrieval),
        TaskResult("d", "zeroshot", Labelled(CLASSES, None), {}, zeroshot),
        TaskResult("himo", "vagueness", Hierarchies(), {}, vague),
    ]


def test_four_tables():
    found = list(questions(results()))
    assert [section.title.split()[1] for section in found] == [
        "Retrieval:",
        "Failure:",
        "Representation:",
        "Vagueness:",
    ]
    retrieval, failure, representation, vagueness = ([section.header, *section.rows] for section in found)
    assert retrieval == [
        ["dataset", "direction", "distance", "R@1", "mAP@R"],
        ["d", "image to text", "cosine", "0.5000", "0.3000"],
        ["d", "image to text", "csd", "0.5000", "0.3000"],
    ]
    assert failure[0][-2:] == ["-SR2 10 levels", "bin correlation"]
    assert failure[1][-2:] == ["0.9000 (0.8000 to 0.9500)", "-1.0000"] and failure[2][-2:] == ["", ""]
    assert [row[:5] for row in failure[1:]] == [
        ["d", "images", "csd R@1", "uncertainty", "0.7500"],
        ["d", "images", "csd R@1", "max softmax", "0.7000"],
        ["d", "images", "csd any match R@1", "uncertainty", ""],
        ["d", "images", "accuracy", "uncertainty", "0.7500"],
        ["d", "images", "accuracy", "max softmax", "0.8000"],
    ]
    assert representation[1:] == [
        ["d", "zeroshot", "uncertainty", "0.2500", "0.6000", "0.5000"],
        ["d", "zeroshot", "max cosine", "0.2500", "0.6000", ""],
        ["d", "retrieval", "uncertainty", "", "", "0.5000"],
    ]
    assert vagueness[1:] == [
        ["himo", "vagueness", "uncertainty", "0.6000", ""],
        ["himo", "vagueness", "radius", "0.6000", ""],
        ["himo", "vagueness", "ranked by cosine", "", "0.4000"],
    ]
    text = text_tables(found)
    assert "2. Failure: is a miss foreseen?" in text and "0.9000 (0.8000 to 0.9500)" in text


def test_a_plain_clip_has_no_row_of_uncertainty():
    found = list(questions(results(probabilistic=False)))
    assert all(section.rows for section in found)
    assert not any("uncertainty" in row for section in found for row in section.rows)


def test_a_bank_has_its_rows_beside_the_uncertainty():
    """In the order in which the metrics come, for a plain CLIP too."""
    scores = ("", "bank", "bank_gallery", "max_cosine")
    found = results()
    found[0].metrics += failures("captions", "cosine_R@1", dict.fromkeys(scores, 0.5))
    found[0].metrics += [Metric("spearman_matches", 0.2, samples="captions", score=score) for score in scores[:3]]
    found[1].metrics += [Metric("R-AUROC", 0.7, samples="images", hit="neighbour_R@1", score="bank")]
    found[1].metrics += [Metric("cropped_has_bigger_uncertainty", 0.8, samples="images", score="bank")]
    found[2].metrics += [Metric("kendall_tau", 0.3, samples="captions", score="bank"), Metric("HiMo@K", 0.1, "bank")]
    _, failure, representation, vagueness = (section.rows for section in questions(found))
    rows = [row[3] for row in failure if row[1] == "captions"]
    assert rows == ["uncertainty", "bank", "bank over the gallery", "max cosine"]
    assert ["d", "zeroshot", "bank", "0.2500", "0.7000", "0.8000"] in representation
    assert [row[2] for row in vagueness if row[0] == "d"] == ["uncertainty", "bank", "bank over the gallery"]
    himo = {row[2]: row[3:] for row in vagueness if row[0] == "himo"}
    assert himo["bank"] == ["0.3000", "", ""] and himo["ranked by bank"] == ["", "0.1000", ""]


def test_what_was_not_evaluated_says_what_it_needs():
    first, failure, representation, vagueness = questions(results()[:1])
    assert first.rows and failure.rows and representation.rows  # its crops
    assert not vagueness.rows and vagueness.text == "Not evaluated here: it needs --hierarcaps or --retrieval."
    assert "4. " not in text_tables([first, failure, representation, vagueness])
