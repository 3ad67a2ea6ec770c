"""Pseudo-positives: pairs that the data call negative but that lie at least as close as the true pair."""

import torch
from torch import Tensor


def pseudo_positive_targets(logits_NM: Tensor, targets_NM: Tensor) -> tuple[Tensor, Tensor]:
    """Targets in which pseudo-positives count as matches, image to text and text to image.

    For an image v with true caption t, every caption t' with d(v, t') <= d(v, t) takes the target of (v, t); for a
    caption likewise over images. Three sources say three things: the paper's text defines the first direction
    (section 2.3), its printed pseudo-code, for want of an unsqueeze, computes the second, and the authors' code does
    both, as here. The targets are constants to the gradient.

    Arguments:
        logits_NM: y = -a d + b: the larger, the closer.
        targets_NM: m in [0, 1]; the largest of a row or a column is its true pair.
    """
    with torch.no_grad():
        row_label_N1, true_column_N1 = targets_NM.max(dim=1, keepdim=True)
        column_label_1M, true_row_1M = targets_NM.max(dim=0, keepdim=True)
        image_to_text_NM = torch.where(logits_NM >= logits_NM.gather(1, true_column_N1), row_label_N1, targets_NM)
        text_to_image_NM = torch.where(logits_NM >= logits_NM.gather(0, true_row_1M), column_label_1M, targets_NM)
    return image_to_text_NM, text_to_image_NM
