"""Pseudo-positives: pairs that the data call negative but that lie at least as close as the true pair."""

import torch
from torch import Tensor


def pseudo_positive_targets(logits_NM: Tensor, targets_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in which pseudo-positives count as matches, image to text and text to image.

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
