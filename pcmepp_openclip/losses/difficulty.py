"""The regression of the uncertainty on the difficulty of a sample: how badly it finds its own partner.

    difficulty_i = log sum_j exp(s cos_ij) - s cos_ii              InfoNCE of the own pair, a constant to the gradient
    loss         = mean_i (log u_i - log(2 / s * difficulty_i))^2  of images, plus that of texts

For a caption that is true of a share p of all images, the difficulty is log(N p) in a batch of N, so that
`s u / 2 = log p + const`: the unit that a tied match scale with k = 1/2 gives to an uncertainty.

When to use it: in place of the matching loss, for the log-variances of a frozen model (`--head-only`) on pairs that it
was not trained on, with images cropped at random. Pairs that a model has memorised are easy for it, and say nothing
about others; where there are no other pairs, `cross_fit` judges each by a model of the other folds. On photographs this
was the one objective whose variance told vague captions and blurred images from others, see docs/uncertainty.md.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .batch import PairBatch

Model = TypeVar("Model")

FLOOR = 1e-3  # is added to the target, whose logarithm would have no bound otherwise


def difficulty(batch: PairBatch) -> Tensor:
    """Return this rank's share of the loss, a 0-d tensor. InfoNCE also yields the difficulties, see `fused.py`."""
    total = batch.clip_scale.new_zeros(())
    sides = ((batch.images, batch.pairs.image_difficulty), (batch.texts, batch.pairs.text_difficulty))
    for gaussian, difficulty_n in sides:
        target_n = (2 / batch.clip_scale.detach() * difficulty_n + FLOOR).log()
        total = total + (gaussian.logvar.logsumexp(dim=-1) - target_n).square().mean()
    return total


def pair_difficulty(image_ND: Tensor, text_ND: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the difficulties [N] of the images and of the texts of N pairs, of normalized means.

    They are in nats: 0 for a pair that is told from all others, log N where the model says nothing.
    """
    logits_NN = scale * image_ND @ text_ND.T
    own_N = logits_NN.diagonal()
    return logits_NN.logsumexp(dim=1) - own_N, logits_NN.logsumexp(dim=0) - own_N


def cross_fit(fit: Callable[[Tensor], Model], rows_N: Tensor, folds: int = 2) -> list[tuple[Model, Tensor]]:
    """Train one model for each fold, on all other folds, so that every pair is held out once and none is lost.

    >>> parts = cross_fit(train, torch.randperm(len(pairs)))  # `train(rows)` returns a model of these pairs
    >>> for model, rows in parts:
    ...     images, texts = pair_difficulty(*model.encode(rows), model.scale)

    Returns:
        The models, each with the rows of its fold, which it was not trained on.
    """
    if not 2 <= folds <= len(rows_N):
        raise ValueError(f"folds must be between 2 and the {len(rows_N)} pairs, not {folds}.")
    fold_N = torch.arange(len(rows_N)) % folds
    return [(fit(rows_N[fold_N != fold]), rows_N[fold_N == fold]) for fold in range(folds)]
