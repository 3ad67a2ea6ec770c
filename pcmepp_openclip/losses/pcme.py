"""PCME's soft contrastive loss by Monte-Carlo estimates of the match probability. PCME++ replaced it by CSD.

    p_ij = 1/J^2 sum_kl sigmoid(-a |z_ik - z_jl| + b)        J samples z = mu + sigma e of each image i and each text j
    loss = - sum_ij [m_ij log p_ij + (1 - m_ij) log(1 - p_ij)] / N^2

with m_ij = 1 for true pairs and else 0, and N in place of N^2 with the reduction "sum". a and b are the match scale and
shift of the model. PCME adds the VIB (`vib.py`) with a weight of 1e-3 beside a sum over all pairs and both directions:
beside this mean, a VIB of the same strength weighs 1e-3 / (2 N^2), which is 3e-8 in a batch of N = 128.

When to use it: as the baseline that the paper compares with. It needs J^2 distances per pair where CSD needs one, and
its gradient has the noise of the samples.

The noise is new in each step, and a function of the seed, the step and the place of a pair in the batch of all ranks:
the same on any number of ranks, in all passes of an accumulated step, and after a resume.

Relations: the authors' code takes sigmoid(2 x), which is a and b twice as large, and sums over all pairs and both
directions, which is a weight of 2 N^2. It samples with sigma = exp(s), although its VIB reads s as log sigma^2, as this
package always does, where sigma = exp(s / 2): its samples spread as those of a variance of exp(2 s).
Reference: Chun et al., "Probabilistic Embeddings for Cross-Modal Retrieval", CVPR 2021.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..distances.match_probability import draw, log_mean_sigmoid, paired_sample_distances, sample_distances
from .batch import PairBatch
from .fused import chunks
from .matching import pairs_divisor


def pcme_noise(seed: int, pairs: int, samples: int, like_ND: Tensor) -> Tensor:
    """Return e of the images and of the texts of the batch of all ranks, [2, N, J, D]."""
    generator = torch.Generator(like_ND.device).manual_seed(seed)
    shape = 2, pairs, samples, like_ND.shape[1]
    return torch.randn(shape, generator=generator, device=like_ND.device)


def pcme(batch: PairBatch) -> Tensor:
    """Return this rank's share of the loss, a 0-d tensor: its images with all texts.

    The rows are visited in chunks, which are computed again in the backward pass, so that nothing of N x N x J^2
    elements is held.
    """
    n, N, samples = len(batch.images.mean), len(batch.all_texts.mean), batch.settings.pcme_samples
    own = slice(batch.first, batch.first + n)
    image_NJD, text_NJD = pcme_noise(batch.noise_seed, N, samples, batch.images.mean)
    z_nJD, z_NJD = draw(batch.images, image_NJD[own]), draw(batch.all_texts, text_NJD)
    a, b = batch.match_scale, batch.match_shift
    no_match = torch.zeros_like(a)
    for rows in chunks(batch.images.mean, N * samples**2):
        no_match = no_match + checkpoint(_log_no_match, z_nJD[rows], z_NJD, a, b, use_reentrant=False)
    logit_nJJ = b - a * paired_sample_distances(z_nJD, z_NJD[own])
    odds = (log_mean_sigmoid(logit_nJJ) - log_mean_sigmoid(-logit_nJJ)).sum()  # true pairs match
    return -(no_match + odds) * (N / n / pairs_divisor(N, N, batch.reduction))


def _log_no_match(z_rJD: Tensor, z_NJD: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over the pairs of some rows of log(1 - p)."""
    return log_mean_sigmoid(a * sample_distances(z_rJD, z_NJD) - b).sum()
