"""The demo's report: what was measured, in plain words, with images."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..reports import plots
from ..reports.report import Plot, Section, Thumbnail
from ..reports.report import write_report as write_html
from .dataset import CAPTIONS_PER_IMAGE
from .drawing import render
from .goals import ESTIMATORS, GOALS, Numbers, outcomes, spread
from .measure import first_is
from .results import Result
from .scenes import CONDITIONS, COVERS

LEAD = """These models were trained for a few minutes on drawn scenes with captions, from vague ("a shape") to exact ("a
small red circle left of a large blue square"). Since the scenes are drawn, it is known which captions are true of which
images, so one can check what an uncertainty means. All of this is measured on scenes that were not trained on.

There are two estimators. The variance is PCME++'s: the model maps each image and each caption to a Gaussian, and the
sum of its variances is learned. The bank needs no training and works for any CLIP: the confusion is the effective
number of training pairs among which an image or a caption is confused, and the multiplicity estimates how many images a
caption fits. These are drawn scenes: on photographs much differs, see docs/uncertainty.md.

A target counts as reached if every seed reaches it, and one that is not reached is shown as such. Numbers are means
over the seeds, with the lowest and the highest in brackets; plots and images are those of the first seed."""
HITS = """A query hits when the first item found is the one it was paired with. A vague caption cannot do that, however
good the model: that is what its uncertainty should say. If anything that truly fits counts as a hit, "a shape" cannot
fail, and uncertain captions do better, not worse. The table has both, with the correlation over ten bins. The column of
the variance ranks by CSD, that of the bank by the cosine that is corrected for hubness."""
FAILURES = """The AUROC of an uncertainty for queries whose own item does not come first, by the mean. The largest
cosine needs no estimator. The last row is the confusion over the held-out items themselves in place of the
bank's references."""
ENTAILMENT = """Whether a caption is true of an image is another question than which caption was written for it. The
entailment score adds an estimate of how many images a caption fits to the cosine. The prior alone ranks the captions in
the same order for every image: a score that is no better has not looked at the image. The oracle knows how many images
each caption is true of. Each wording counts once."""
QUERIES = (("text_to_image", "image for a caption"), ("image_to_text", "caption for an image"))


def write_report(folder: Path, result: Result, runs: Sequence[Numbers]) -> Path:
    """Arguments: the result of the first seed, and the numbers of all seeds."""
    sections = [
        _targets(runs),
        _captions(result),
        _images(result, runs),
        _retrieval(result, runs),
        _failures(runs),
        _entailment(runs),
    ]
    return write_html(folder, "What the uncertainty of a small PCME++ model means", sections, LEAD)


def _targets(runs: Sequence[Numbers]) -> Section:
    rows, found = [], outcomes(runs)
    for goal in GOALS:
        cells = [cell for o in found if o.goal == goal for cell in (str(o.spread), o.verdict)]
        rows.append([goal.words, goal.target, *cells])
        for name, words in goal.beside:
            rows.append([f"beside: {words}", "", str(spread(runs, name)), "", "", ""])
    header = ["what one would like", "target", *(cell for name in ESTIMATORS for cell in (name, ""))]
    return Section("In short", "", rows, header)


def _captions(result: Result) -> Section:
    each_T = result.truth.each_T
    number_T = result.truth.fits_MN[each_T].sum(dim=1)
    of = {name: estimator.text_M[each_T] for name, estimator in result.estimators.items()}
    figures = []
    for name, uncertainty_T in of.items():
        figure, axes = plots.new(x="images that the caption is true of", y=f"uncertainty by the {name}")
        axes.scatter(number_T.tolist(), uncertainty_T.tolist(), s=6, alpha=0.4)
        axes.set_xscale("log")
        figures.append(Plot(f"captions-{name}", figure, f"uncertainty of captions by the {name}"))
    share_T = result.bank.multiplicity(result.texts.mean[each_T], "texts") / len(result.bank)
    order = share_T.argsort().tolist()
    rows = []
    for place in torch.linspace(0, len(order) - 1, 12).round().int().tolist():
        i = order[place]
        text = str(result.held_out.captions[int(each_T[i])])
        true_share = number_T[i].item() / len(result.held_out.scenes)
        rows.append([text, f"{of['variance'][i]:.3g}", f"{100 * share_T[i]:.1f} %", f"{100 * true_share:.1f} %"])
    return Section(
        "Captions",
        f"Each dot is a caption. Of {len(result.held_out.scenes)} images it is true of as many as the axis says. The "
        "table goes from the smallest multiplicity by the bank to the largest one, in equal steps.",
        rows,
        ["caption", "variance", "share of images that it fits, by the bank's multiplicity", "share that it is true of"],
        figures,
    )


def _images(result: Result, runs: Sequence[Numbers]) -> Section:
    scenes, captions = result.held_out.scenes, result.held_out.captions
    kinds = {name: [scene.condition == name for scene in scenes] for name in CONDITIONS[:2]}
    kinds |= {f"covered by {cover}": [scene.cover == cover for scene in scenes] for cover in COVERS}
    figures, thumbnails = [], []
    for name, estimator in result.estimators.items():
        figure, axes = plots.new(x=f"uncertainty of the image by the {name}", y="share of images")
        _histogram(axes, estimator.image_N, kinds)
        figures.append(Plot(f"images-{name}", figure, f"uncertainty of images by the {name}"))
        order = estimator.image_N.argsort().tolist()
        for i in (*order[:6], *order[-6:]):
            own = max(map(str, captions[i * CAPTIONS_PER_IMAGE : (i + 1) * CAPTIONS_PER_IMAGE]), key=len)
            thumbnails.append(Thumbnail(render(scenes[i]), f"{name} {estimator.image_N[i]:.3g}: {own}"))
    lost = (*CONDITIONS[1:], *(f"covered_by_{cover}" for cover in COVERS))
    rows = [
        [name.replace("_", " "), *(_shown(runs, f"{prefix}{name}_auroc") for prefix in ESTIMATORS.values())]
        for name in lost
    ]
    return Section(
        "Images",
        "Some scenes were blurred or half covered, in training too: with the colour of the paper, where nothing hints "
        "at it, with grey, or with coloured squares. Their captions tell of the scene as it was, of which less can be "
        "seen. The table has the AUROC against clean images. For each estimator there are first the six most certain "
        "images, then the six most uncertain ones, each with the longest of its captions.",
        rows,
        ["", *ESTIMATORS],
        figures,
        thumbnails,
    )


def _histogram(axes: object, uncertainty_N: Tensor, kinds: dict[str, list[bool]]) -> None:
    edges = torch.linspace(uncertainty_N.min(), uncertainty_N.max(), 31).numpy()
    for name, chosen in kinds.items():
        values = uncertainty_N[chosen].numpy()
        weights = [1 / max(1, len(values))] * len(values)
        axes.hist(values, edges, weights=weights, histtype="step", label=name)  # type: ignore[attr-defined]
    axes.legend(frameon=False, labelcolor=plots.INK)  # type: ignore[attr-defined]


def _retrieval(result: Result, runs: Sequence[Numbers]) -> Section:
    rows = []
    for name, words in QUERIES:
        csd = [_shown(runs, f"{prefix}{name}_csd_own_R@1") for prefix in ESTIMATORS.values()]
        rows.append([f"{words}: its own comes first (R@1)", *_with_chance(runs, f"{name}_own_R@1"), *csd])
        rows.append([f"{words}: what comes first fits (R@1)", *_with_chance(runs, f"{name}_any_match_R@1"), "–", "–"])
        csd = [_shown(runs, f"{prefix}{name}_csd_mAP@R") for prefix in ESTIMATORS.values()]
        rows.append([f"{words}: mAP@R with all that fit", *_with_chance(runs, f"{name}_mAP@R"), *csd])
        for kind, what in (("bins", "own comes first"), ("any_match_bins", "what comes first fits")):
            bins = [_shown(runs, f"{prefix}{name}_{kind}") for prefix in ESTIMATORS.values()]
            rows.append([f"{words}: bins by the uncertainty, {what}", "–", "–", *bins])
    hit_M = first_is(result.texts.mean @ result.images.mean.T, result.truth.own_MN)
    figures = []
    for name, estimator in result.estimators.items():
        figure, axes = plots.new(x=f"tenth of the captions, by the {name}", y="own image found first")
        axes.bar(range(1, 11), [part.mean().item() for part in hit_M[estimator.text_M.argsort()].tensor_split(10)])
        caption = f"how often captions find their own image first, from certain to uncertain by the {name}"
        figures.append(Plot(f"bins-{name}", figure, caption))
    return Section("Retrieval", HITS, rows, ["", "by the mean", "by chance", *ESTIMATORS], figures)


def _failures(runs: Sequence[Numbers]) -> Section:
    kinds = (
        ("cosine_miss_auroc", "", "the largest cosine"),
        ("miss_auroc", "", "the variance"),
        ("miss_auroc", "bank/", "the bank"),
        ("gallery_miss_auroc", "bank/", "the bank, over the held-out items"),
    )
    rows = [[words, *(_shown(runs, f"{prefix}{name}_{kind}") for name, _ in QUERIES)] for kind, prefix, words in kinds]
    return Section("Failures", FAILURES, rows, ["", *(words for _, words in QUERIES)])


def _entailment(runs: Sequence[Numbers]) -> Section:
    scores = [("", "", "the cosine of the means")]
    for prefix, words in (("", "variance"), ("bank/", "bank")):
        scores += [(prefix, "csd_", f"CSD, {words}"), (prefix, "entailment_", f"the entailment score, {words}")]
        scores += [(prefix, "prior_", f"the prior alone, {words}: no image at all")]
    scores += [("", "oracle_", "the oracle: the cosine and the true share")]
    rows = [
        [words, *(_shown(runs, f"{prefix}wording_{kind}{what}") for what in ("mAP@R", "auroc"))]
        for prefix, kind, words in scores
    ]
    header = ["ranked by", "mAP@R, caption for an image", "AUROC of true against false pairs"]
    return Section("Is the caption true?", ENTAILMENT, rows, header)


def _with_chance(runs: Sequence[Numbers], name: str) -> list[str]:
    return [_shown(runs, name), f"{spread(runs, f'{name}_chance').mean:.3f}"]


def _shown(runs: Sequence[Numbers], name: str) -> str:
    return str(spread(runs, name))
