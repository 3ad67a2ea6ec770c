"""The triplet loss of VSE++ and VSE-infinity: the baseline without probabilities.

    hinge_ij = max(0, margin + cos_ij - cos_ii)         the text of pair j is too close to the image of pair i
    loss     = mean_i (sum_j hinge_ij)                  with all negatives
    loss     = mean_i (max_j hinge_ij)                  with the hardest negative, j != i

of images, plus the same of texts. The hardest negatives of a model at its start are noise, so the first epochs take the
sum over all of them.

When to use it: as the baseline that the paper compares with, or where only the order of retrieved items matters. It
depends on the means alone, and gives no uncertainty. A caption that also fits counts as a negative, the hardest one as
a rule, which is why it suffers from noisy pairs.

Relations: the authors' sum over the batch is this mean with a weight of N.
References: Faghri et al., "VSE++", BMVC 2018; Chen et al., "Learning the Best Pooling Strategy for Visual Semantic
Embedding", CVPR 2021 (VSE-infinity).
"""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .batch import PairBatch
from .fused import chunks


def triplet_loss(cosine_NN: Tensor, margin: float = 0.2, hardest: bool = True) -> Tensor:
    """Return the loss of both directions, a 0-d tensor, for the cosines of a batch with its pairs on the diagonal."""
    return hinges(cosine_NN, 0, margin, hardest).mean() + hinges(cosine_NN.T, 0, margin, hardest).mean()


def hinges(cosine_nN: Tensor, first: int, margin: float, hardest: bool) -> Tensor:
    """Return the loss of each row, [n].

    Arguments:
        first: the column of the first row's own pair.
    """
    own_n = cosine_nN.diagonal(first)[: len(cosine_nN)]
    hinge_nN = (margin + cosine_nN - own_n[:, None]).relu()
    is_own_nN = torch.zeros_like(hinge_nN, dtype=torch.bool)
    is_own_nN.diagonal(first).fill_(True)
    hinge_nN = hinge_nN.masked_fill(is_own_nN, 0.0)
    return hinge_nN.max(dim=1).values if hardest else hinge_nN.sum(dim=1)


def triplet(batch: PairBatch) -> Tensor:
    """Return this rank's share of the loss, a 0-d tensor: its images with all texts, and its texts with all images.

    The cosines are visited in chunks of rows, which are computed again in the backward pass.
    """
    settings = batch.settings
    hardest = settings.triplet_negatives == "hardest" and batch.epoch >= settings.triplet_warmup_epochs
    rows_of = functools.partial(_rows, margin=settings.triplet_margin, hardest=hardest)
    image_nD, text_nD = batch.images.mean, batch.texts.mean
    total = image_nD.new_zeros(())
    for own_nD, other_ND in ((image_nD, batch.all_text_means), (text_nD, batch.gather(image_nD))):
        for rows in chunks(own_nD, len(other_ND)):
            part = checkpoint(rows_of, own_nD[rows], other_ND, rows.start + batch.first, use_reentrant=False)
            total = total + part / len(own_nD)
    return total


def _rows(own_rD: Tensor, other_ND: Tensor, first: int, margin: float, hardest: bool) -> Tensor:
    return hinges(own_rD @ other_ND.T, first, margin, hardest).sum()
