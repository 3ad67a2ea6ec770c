"""The demo's report: the measured numbers in plain words, with images."""

from pathlib import Path

import torch

from ..reports import plots
from ..reports.report import Plot, Section, Thumbnail
from ..reports.report import write_report as write_html
from .dataset import CAPTIONS_PER_IMAGE
from .drawing import render
from .figure import equal_steps
from .goals import ESTIMATORS, GOALS, Runs, spread, values
from .measure import LOST, Result, first_is

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
IMAGES = """Some scenes were blurred or half covered, in training too: with the colour of the paper, where nothing hints
at it, with grey, or with coloured squares. Their captions tell of the scene as it was, of which less can be seen. The
table has the AUROC against clean images. For each estimator there are first the six most certain images, then the six
most uncertain ones, each with the longest of its captions."""
QUERIES = {"text_to_image": "image for a caption", "image_to_text": "caption for an image"}
FAILED = {  # rows of the failures, and the names of their numbers
    "the largest cosine": "{}_cosine_miss_auroc",
    "the variance": "{}_miss_auroc",
    "the bank": "bank/{}_miss_auroc",
    "the bank, over the held-out items": "bank/{}_gallery_miss_auroc",
}
SCORES = {  # scores of a pair, and how the names of their numbers begin
    "the cosine of the means": "wording_",
    "CSD, variance": "wording_csd_",
    "the entailment score, variance": "wording_entailment_",
    "the prior alone, variance: no image at all": "wording_prior_",
    "CSD, bank": "bank/wording_csd_",
    "the entailment score, bank": "bank/wording_entailment_",
    "the prior alone, bank: no image at all": "bank/wording_prior_",
    "the oracle: the cosine and the true share": "wording_oracle_",
}


def write_report(folder: Path, result: Result, runs: Runs) -> Path:
    """Write the report of the first seed's result and the numbers of all seeds. Returns the path of the page."""
    sections = [
        Section(
            "In short",
            "",
            goal_rows(runs),
            ["what one would like", "target", *(x for e in ESTIMATORS for x in (e, ""))],
        ),
        _captions(result),
        _images(result, runs),
        *_tables(result, runs),
    ]
    return write_html(folder, "What the uncertainty of a small PCME++ model means", sections, LEAD)


def _cells(runs: Runs, *names: str | None) -> list[str]:
    """Return the numbers of these names, "–" for None."""
    return ["–" if name is None else spread(values(runs, name)) for name in names]


def _by_each(name: str) -> list[str]:
    """Return the names of a number by each estimator."""
    return [prefix + name for prefix in ESTIMATORS.values()]


def goal_rows(runs: Runs) -> list[list[str]]:
    """Return a row for each goal, and for each number that it should be read with."""
    rows = []
    for goal in GOALS:
        numbers = [values(runs, name) for name in _by_each(goal.name)]
        rows.append([goal.words, goal.target, *(cell for x in numbers for cell in (spread(x), goal.verdict(x)))])
        rows += [[f"beside: {words}", "", *_cells(runs, name), "", "", ""] for name, words in goal.references]
    return rows


def _captions(result: Result) -> Section:
    each_T, scenes, figures = result.truth.each_T, result.held_out.scenes, []
    number_T = result.truth.fits_MN[each_T].sum(dim=1)
    for name, estimator in result.estimators.items():
        figure, axes = plots.new(x="images that the caption is true of", y=f"uncertainty by the {name}")
        axes.scatter(number_T.tolist(), estimator.text_M[each_T].tolist(), s=6, alpha=0.4)
        axes.set_xscale("log")
        figures.append(Plot(f"captions-{name}", figure, f"uncertainty of captions by the {name}"))
    share_T = result.bank.multiplicity(result.texts.mean[each_T], "texts") / len(result.bank)
    rows = []
    for i in equal_steps(share_T, 12):
        text, variance = str(result.held_out.captions[each_T[i]]), result.texts.uncertainty[each_T[i]]
        shares = (f"{100 * share:.1f} %" for share in (share_T[i], number_T[i] / len(scenes)))
        rows.append([text, f"{variance:.3g}", *shares])
    text = f"""Each dot is a caption. Of {len(scenes)} images it is true of as many as the axis says. The table goes
from the smallest multiplicity by the bank to the largest one, in equal steps."""
    header = [
        "caption",
        "variance",
        "share of images that it fits, by the bank's multiplicity",
        "share that it is true of",
    ]
    return Section("Captions", text, rows, header, figures)


def _images(result: Result, runs: Runs) -> Section:
    scenes, captions, figures, thumbnails = result.held_out.scenes, result.held_out.captions, [], []
    for name, estimator in result.estimators.items():
        figure, axes = plots.new(x=f"uncertainty of the image by the {name}", y="share of images")
        edges = torch.linspace(estimator.image_N.min(), estimator.image_N.max(), 31).numpy()
        for kind in ("clean", *LOST[:1], *LOST[2:]):
            chosen = estimator.image_N[result.truth.shows(kind)].numpy()
            weights = [1 / max(1, len(chosen))] * len(chosen)
            axes.hist(chosen, edges, weights=weights, histtype="step", label=kind.replace("_", " "))
        axes.legend(frameon=False, labelcolor=plots.INK)
        figures.append(Plot(f"images-{name}", figure, f"uncertainty of images by the {name}"))
        order = estimator.image_N.argsort().tolist()
        for i in (*order[:6], *order[-6:]):
            own = max(map(str, captions[i * CAPTIONS_PER_IMAGE : (i + 1) * CAPTIONS_PER_IMAGE]), key=len)
            thumbnails.append(Thumbnail(render(scenes[i]), f"{name} {estimator.image_N[i]:.3g}: {own}"))
    rows = [[kind.replace("_", " "), *_cells(runs, *_by_each(f"{kind}_auroc"))] for kind in LOST]
    return Section("Images", IMAGES, rows, ["", *ESTIMATORS], figures, thumbnails)


def _tables(result: Result, runs: Runs) -> list[Section]:
    """Return the sections about retrieval, failures and whether a caption is true."""
    rows, failures = [], []
    for name, words in QUERIES.items():
        for label, plain, estimated in (
            ("its own comes first (R@1)", "own_R@1", "csd_own_R@1"),
            ("what comes first fits (R@1)", "any_match_R@1", None),
            ("mAP@R with all that fit", "mAP@R", "csd_mAP@R"),
            ("bins by the uncertainty, own comes first", None, "bins"),
            ("bins by the uncertainty, what comes first fits", None, "any_match_bins"),
        ):
            names = [f"{name}_{plain}", f"{name}_{plain}_chance"] if plain else [None, None]
            each = _by_each(f"{name}_{estimated}") if estimated else [None, None]
            rows.append([f"{words}: {label}", *_cells(runs, *names, *each)])
    for label, name in FAILED.items():
        failures.append([label, *_cells(runs, *(name.format(query) for query in QUERIES))])
    truths = [[label, *_cells(runs, f"{name}mAP@R", f"{name}auroc")] for label, name in SCORES.items()]
    truth, figures = result.truth, []
    hit_M = first_is(result.texts.mean @ result.images.mean.T, truth.own_MN)
    for name, estimator in result.estimators.items():
        figure, axes = plots.new(x=f"tenth of the captions, by the {name}", y="own image found first")
        axes.bar(range(1, 11), [part.mean().item() for part in hit_M[estimator.text_M.argsort()].tensor_split(10)])
        caption = f"how often captions find their own image first, from certain to uncertain by the {name}"
        figures.append(Plot(f"bins-{name}", figure, caption))
    header = ["ranked by", "mAP@R, caption for an image", "AUROC of true against false pairs"]
    return [
        Section("Retrieval", HITS, rows, ["", "by the mean", "by chance", *ESTIMATORS], figures),
        Section("Failures", FAILURES, failures, ["", *QUERIES.values()]),
        Section("Is the caption true?", ENTAILMENT, truths, header),
    ]
