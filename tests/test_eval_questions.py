"""The four tables that a report begins with."""

from eval_data import CLASSES

from pcmepp_openclip.evaluation.datasets import Captioned, Labelled
from pcmepp_openclip.evaluation.hierarchies import Hierarchies
from pcmepp_openclip.evaluation.metric import Metric
from pcmepp_openclip.evaluation.questions import questions, text_tables
from pcmepp_openclip.evaluation.tasks import TaskResult


def failures(samples, hit, values):
    for score, value in values.items():
        for name in ("miss_AUROC", "FPR95", "AUPR_error", "AURC_x1000", "E-AURC_x1000"):
            yield Metric(name, value, samples=samples, hit=hit, score=score)


def results(probabilistic=True):
    uncertainty = {"": 0.75} if probabilistic else {}
    retrieval = [Metric("R@1", 0.5, distance, "image_to_text") for distance in ("cosine", "csd")]
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
        TaskResult("d", "retrieval", Captioned(), retrieval, probabilistic),
        TaskResult("d", "zeroshot", Labelled(CLASSES, None), zeroshot, probabilistic),
        TaskResult("himo", "vagueness", Hierarchies(), vague, probabilistic),
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
        ["dataset", "direction", "distance", "R@1", "-SR2 10 levels", "bin correlation"],
        ["d", "image to text", "cosine", "0.5000", "", ""],
        ["d", "image to text", "csd", "0.5000", "0.9000 (0.8000 to 0.9500)", "-1.0000"],
    ]
    assert [row[:5] for row in failure[1:]] == [
        ["d", "images", "csd R@1", "uncertainty", "0.7500"],
        ["d", "images", "csd R@1", "max softmax", "0.7000"],
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
        ["himo", "vagueness", "cosine", "", "0.4000"],
    ]
    text = text_tables(found)
    assert "2. Failure: is a miss foreseen?" in text and "0.9000 (0.8000 to 0.9500)" in text


def test_a_plain_clip_has_no_row_of_uncertainty():
    found = list(questions(results(probabilistic=False)))
    assert all(section.rows for section in found)
    assert not any("uncertainty" in row for section in found for row in section.rows)


def test_what_was_not_evaluated_says_what_it_needs():
    first, failure, representation, vagueness = questions(results()[:1])
    assert first.rows and failure.rows and representation.rows  # its crops
    assert not vagueness.rows and vagueness.text == "Not evaluated here: it needs --hierarcaps or --retrieval."
    assert "4. " not in text_tables([first, failure, representation, vagueness])
