"""The demo's report: what was measured, in plain words, with images."""

from pathlib import Path

import torch
from torch import Tensor

from ..gaussian import Gaussian
from ..reports import plots
from ..reports.report import Plot, Section, Thumbnail
from ..reports.report import write_report as write_html
from .dataset import CAPTIONS_PER_IMAGE, HeldOut
from .drawing import render
from .measure import GOALS, Truth, first_is
from .scenes import CONDITIONS

LEAD = """This model was trained for a few minutes on drawn scenes with captions, from vague ("a shape") to exact ("a
small red circle left of a large blue square"). It maps each image and each caption to a Gaussian: a mean, and
variances whose sum is its uncertainty. Since the scenes are drawn, it is known which captions are true of which
images, so one can check what that uncertainty means. All of this is measured on scenes that were not trained on.

A target that is not reached is shown as such: it is what this small model gives, not what one would like."""
HITS = """A query hits when the first thing found is the one it was paired with. A vague caption cannot do that, however
good the model: that is what its uncertainty should say. If anything that truly fits counts as a hit, "a shape" cannot
fail, and uncertain captions do better, not worse. The table has both, with the correlation over ten bins."""


def write_report(
    folder: Path, held_out: HeldOut, images: Gaussian, texts: Gaussian, truth: Truth, numbers: dict[str, float]
) -> Path:
    sections = [
        _targets(numbers),
        _captions(held_out, texts.uncertainty, truth),
        _images(held_out, images.uncertainty),
        _retrieval(images, texts, truth, numbers),
    ]
    return write_html(folder, "What the uncertainty of a small PCME++ model means", sections, LEAD)


def _targets(numbers: dict[str, float]) -> Section:
    rows = []
    for target in GOALS:
        value = numbers[target.name]
        wanted = f"{'at most' if target.below else 'at least'} {target.value:g}"
        rows.append([target.words, f"{value:.2f}", wanted, "reached" if target.reached(value) else "not reached"])
    return Section("In short", "", rows, ["what one would like", "value", "target", ""])


def _captions(held_out: HeldOut, uncertainty_M: Tensor, truth: Truth) -> Section:
    number_M = truth.fits_MN.sum(dim=1)
    by_text = {
        str(c): (u, n) for c, u, n in zip(held_out.captions, uncertainty_M.tolist(), number_M.tolist(), strict=True)
    }
    figure, axes = plots.new(x="images that the caption is true of", y="uncertainty of the caption")
    axes.scatter([n for _, n in by_text.values()], [u for u, _ in by_text.values()], s=6, alpha=0.4)
    axes.set_xscale("log")
    ordered = sorted(by_text.items(), key=lambda item: item[1])
    shown = [ordered[i] for i in torch.linspace(0, len(ordered) - 1, 12).round().int().tolist()]
    rows = [[text, f"{u:.3g}", f"{n}"] for text, (u, n) in shown]
    return Section(
        "Captions",
        f"Each dot is a caption. Of {len(held_out.scenes)} images it is true of as many as the axis says. The table "
        "goes from the most certain caption to the most uncertain one, in equal steps.",
        rows,
        ["caption", "uncertainty", "true of"],
        [Plot("captions", figure, "uncertainty of captions against the number of images they are true of")],
    )


def _images(held_out: HeldOut, uncertainty_N: Tensor) -> Section:
    figure, axes = plots.new(x="uncertainty of the image", y="share of images")
    edges = torch.linspace(uncertainty_N.min(), uncertainty_N.max(), 31).numpy()
    for condition in CONDITIONS:
        chosen = uncertainty_N[[scene.condition == condition for scene in held_out.scenes]]
        axes.hist(
            chosen.numpy(), edges, weights=[1 / max(1, len(chosen))] * len(chosen), histtype="step", label=condition
        )
    axes.legend(frameon=False, labelcolor=plots.INK)
    order = uncertainty_N.argsort().tolist()
    thumbnails = []
    for i in (*order[:6], *order[-6:]):
        caption = max(map(str, held_out.captions[i * CAPTIONS_PER_IMAGE : (i + 1) * CAPTIONS_PER_IMAGE]), key=len)
        thumbnails.append(Thumbnail(render(held_out.scenes[i]), f"{uncertainty_N[i]:.3g}: {caption}"))
    return Section(
        "Images",
        "Some scenes were blurred or half covered, in training too. Their captions tell of the scene as it was, so "
        "less of them can be seen. First the six most certain images, then the six most uncertain ones, each with "
        "the longest of its captions.",
        plots=[Plot("images", figure, "uncertainty of clean, blurred and half covered images")],
        thumbnails=thumbnails,
    )


def _retrieval(images: Gaussian, texts: Gaussian, truth: Truth, numbers: dict[str, float]) -> Section:
    rows = []
    for name, words in (("text_to_image", "image for a caption"), ("image_to_text", "caption for a image")):
        for kind, what in (("own_R@1", "its own comes first"), ("any_match_R@1", "what comes first fits")):
            values = [numbers[f"{name}_{kind}"], numbers[f"{name}_{kind}_chance"]]
            rows.append([f"{words}: {what}", *(f"{100 * value:.1f} %" for value in values), "–"])
        values = [numbers[f"{name}_{kind}"] for kind in ("mAP@R", "mAP@R_chance", "csd_mAP@R")]
        rows.append([f"{words}: mAP@R with all that fit", *(f"{100 * value:.1f} %" for value in values)])
        values = [numbers[f"{name}_{kind}"] for kind in ("bins", "csd_bins", "any_match_bins")]
        rows.append([f"{words}: bins, own comes first", f"{values[0]:.2f}", "–", f"{values[1]:.2f}"])
        rows.append([f"{words}: bins, what comes first fits", f"{values[2]:.2f}", "–", "–"])
    own_MN = torch.zeros_like(truth.fits_MN)
    own_MN[torch.arange(len(own_MN)), truth.own_M] = True
    hit_M = first_is(texts.mean @ images.mean.T, own_MN)
    figure, axes = plots.new(x="tenth of the captions, by uncertainty", y="own image found first")
    shares = [part.mean().item() for part in hit_M[texts.uncertainty.argsort()].tensor_split(10)]
    axes.bar(range(1, 11), shares)
    return Section(
        "Retrieval",
        HITS,
        rows,
        ["", "by the mean", "by chance", "by CSD"],
        [Plot("bins", figure, "how often captions find their own image first, from certain to uncertain")],
    )
