"""Pseudo-positives: pairs that the data call negative but that lie at least as close as the true pair."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .labels import LabelledPairs


def pseudo_positive_targets(logits_NM: Tensor, targets_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets in which pseudo-positives count as matches, image to text and text to image.

    For an image v with true caption t, every caption t' with d(v, t') <= d(v, t) takes the target of (v, t); for a
    caption likewise over images. Three sources say three things: the paper's text defines the first direction
    (section 2.3), its printed pseudo-code, for want of an unsqueeze, computes the second, and the authors' code does
    both, as here. The targets are constants to the gradient.

    With soft targets, the largest of a row or a column is its true pair. Where several share it, as the captions of one
    image do, each of them is, and t' is to be as close as any of them.

    Arguments:
        logits_NM: y = -a d + b: the larger, the closer.
        targets_NM: m in [0, 1].
    """
    with torch.no_grad():
        image_to_text_NM, text_to_image_NM = (_raised(logits_NM, targets_NM, along) for along in (1, 0))
    return image_to_text_NM, text_to_image_NM


def _raised(logits_NM: Tensor, targets_NM: Tensor, along: int) -> Tensor:
    label = targets_NM.amax(dim=along, keepdim=True)
    farthest = torch.where(targets_NM == label, logits_NM, torch.inf).amin(dim=along, keepdim=True)
    return torch.where(logits_NM >= farthest, label, targets_NM)


class TruePairs(NamedTuple):
    """The true pairs, which determine the pseudo-positives: one value for each of the N pairs of all ranks.

    Arguments:
        logit_N: the matching logits of the true pairs.
        image_key_N, text_key_N: `Gaussian.keys`. Equal captions are equally close to an image, and count as ties
            however their logits are rounded; so do equal images.
    """

    logit_N: Tensor
    image_key_N: Tensor
    text_key_N: Tensor


def raised_labels(
    y: Tensor, label: Tensor | None, true_pairs: TruePairs | LabelledPairs | None, rows: slice, first: int
) -> Iterator[Tensor]:
    """Yield the increase of the labels of a chunk by pseudo-positives, first by the rows, then by the columns.

    These are masks without soft labels, and nothing at all without `true_pairs`.

    Arguments:
        y: the matching logits of the chunk, [r, N].
        label: the soft labels of the chunk, [r, N], or None.
        rows: the rows of the chunk, counted on this rank.
        first: the column of this rank's first true pair.
    """
    if isinstance(true_pairs, LabelledPairs):
        assert label is not None
        yield from true_pairs.raised(y, label, rows)
    elif true_pairs is not None:
        yield from _pseudo_positives(y, true_pairs, rows.start + first)


def _pseudo_positives(y: Tensor, true_pairs: TruePairs, first: int) -> Iterator[Tensor]:
    """Yield masks of the pairs, but true ones, that are as close as the true pair of their row, or column."""
    rows = slice(first, first + len(y))
    logit_N, image_key_N, text_key_N = true_pairs
    for threshold, tie in (
        (logit_N[rows, None], text_key_N[rows, None] == text_key_N),
        (logit_N, image_key_N[rows, None] == image_key_N),
    ):
        is_pseudo = tie.logical_or_(y >= threshold)
        is_pseudo.diagonal(first).fill_(False)
        yield is_pseudo
