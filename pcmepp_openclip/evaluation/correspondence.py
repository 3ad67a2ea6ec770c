"""Noisy correspondence: can wrong pairs be told from right ones by a score of each pair?

    wrong_pair_AUROC = how often a wrong pair has the higher score than a right one, ties as halves; 0.5 by chance

The scores of the pair (v_i, t_i), higher where it should be wrong:

    each distance      d(v_i, t_i), such as "csd" and "cosine"
    info_nce           -(log p(t_i | v_i) + log p(v_i | t_i)) / 2 by CLIP's softmax over a batch
    matching           the mean of the matching loss over the 2 B - 1 pairs of a batch of B that have v_i or t_i in them
    uncertainty        the sum of the variances of both
    caption_length     the number of words, which knows nothing of the pair

A batch is a random part of the pairs, as in training.

How it must not be read: a score that finds wrong captions drawn from all others need not find those that people write,
which are nearly right. On pairs that the model was trained on, the number is about what it has memorised, too. The
uncertainties of an image and of a caption do not depend on each other, so that they can only tell wrong pairs by what
training on them has taught.
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distances import Distance
from ..gaussian import Gaussian
from ..losses.matching import matching_logits
from .metric import Metric
from .uncertainty import auroc

BATCH = 1024


def correspondence(scores: Mapping[str, Tensor], wrong_N: Tensor) -> Iterator[Metric]:
    """Yield `wrong_pair_AUROC` of each score; nan where all pairs are right, or all wrong.

    Arguments:
        scores: [N] each, by name.
        wrong_N: [N] of 0 and 1.
    """
    for name, score_N in scores.items():
        yield Metric("wrong_pair_AUROC", auroc(score_N, wrong_N), samples="pairs", score=name)


def in_batches(
    images: Gaussian,
    texts: Gaussian,
    scale: float,
    matching: tuple[Distance, float, float] | None = None,
    batch: int = BATCH,
) -> dict[str, Tensor]:
    """Return `info_nce` and, given `matching`, `matching` of each pair, [N]; see the file's docstring.

    Arguments:
        images, texts: Gaussians of the pairs, [N, D], with l2-normalised means.
        scale: what CLIP multiplies a cosine by.
        matching: the distance d, a and b of the matching logit -a d + b.
        batch: the largest size of a batch; the pairs are divided into parts of equal size, up to 1.
    """
    count = len(images.mean)
    order_N = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    losses = {"info_nce": torch.empty(count)} | ({} if matching is None else {"matching": torch.empty(count)})
    for part in order_N.tensor_split(math.ceil(count / batch)):
        v, t = (Gaussian(x.mean[part].float(), x.logvar[part].float()) for x in (images, texts))
        logit_BB = scale * v.mean @ t.mean.T
        losses["info_nce"][part] = -(logit_BB.log_softmax(1).diagonal() + logit_BB.log_softmax(0).diagonal()) / 2
        if matching is not None:
            distance, a, b = matching
            y_BB = matching_logits(distance.matrix(v, t), a, b)
            loss_BB = F.softplus(y_BB)
            loss_BB.diagonal().sub_(y_BB.diagonal())  # the label of the others is 0
            total_B = loss_BB.sum(0) + loss_BB.sum(1) - loss_BB.diagonal()
            losses["matching"][part] = total_B / (2 * len(part) - 1)
    return losses
