"""PCME's match probability of two Gaussians, estimated by samples, as a distance."""

import math

import torch
from torch import Tensor

from ..gaussian import Gaussian, full_precision
from .base import Distance, Transposed, check_shapes
from .tiles import in_tiles

SEED = 0  # the seed of the noise, which is the same for every pair and in every call
SMALLEST = 1e-8  # the least squared distance: the gradient of its square root has no bound at 0


class MatchProbability(Distance):
    """The negative log-odds of a match, by J samples of each Gaussian and all J^2 distances between them.

        z_j     = mu_a + sigma_a e_j,   z_k = mu_b + sigma_b e_k
        p       = 1/J^2 sum_jk sigmoid(-scale |z_j - z_k| + shift)
        d(a, b) = log(1 - p) - log p

    A matching logit -a d + b with a = 1 and b = 0 is then that of p itself, the objective of PCME, and d ranks as p
    does. The noise e is fixed and antithetic (half of it is the negative of the other half), different for the two
    sides, and the same for all samples: a pair has the same distance in every run and on every rank. It differs if the
    sides are exchanged, hence `transposed`. The squared distances of samples are computed in fp64, since they are small
    differences of large numbers where variances are small.

    When to use it: to rank by a model that was trained with PCME (`losses/pcme.py`, which draws new noise in each
    step), and for the paper's comparison of distances. It costs J^2 times as much as CSD.

    Arguments:
        scale, shift: the scale and shift of the logit of a pair of samples; a and b of a model that was trained with
            PCME.
        samples: J.

    Reference: Chun et al., "Probabilistic Embeddings for Cross-Modal Retrieval", CVPR 2021.
    """

    ranked_by_default = False

    def __init__(self, scale: float = 5.0, shift: float = 5.0, samples: int = 8):
        self.scale, self.shift, self.samples = scale, shift, samples

    @property
    def transposed(self) -> Distance:
        return Transposed(self)

    def noise(self, dims: int) -> tuple[Tensor, Tensor]:
        """Return e of the first side and of the second, [J, D] each."""
        generator = torch.Generator().manual_seed(SEED)
        half_2JD = torch.randn(2, (self.samples + 1) // 2, dims, generator=generator)
        first_JD, second_JD = torch.cat([half_2JD, -half_2JD], dim=1)[:, : self.samples]
        return first_JD, second_JD

    def matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        check_shapes(a, b)
        first_JD, second_JD = self._noise_like(a)

        def tile(a: Gaussian, b: Gaussian) -> Tensor:
            return self._log_odds(sample_distances(draw(a, first_JD).double(), draw(b, second_JD).double()))

        with full_precision(a.mean):
            return in_tiles(tile, a, b, per_pair=self.samples**2)

    def paired(self, a: Gaussian, b: Gaussian) -> Tensor:
        check_shapes(a, b)
        first_JD, second_JD = self._noise_like(a)
        with full_precision(a.mean):
            distance_NJJ = paired_sample_distances(draw(a, first_JD).double(), draw(b, second_JD).double())
            return self._log_odds(distance_NJJ)

    def _noise_like(self, a: Gaussian) -> list[Tensor]:
        return [noise_JD.to(a.mean.device) for noise_JD in self.noise(a.mean.shape[1])]

    def _log_odds(self, distance_xJJ: Tensor) -> Tensor:
        logit_xJJ = self.shift - self.scale * distance_xJJ.float()
        return log_mean_sigmoid(-logit_xJJ) - log_mean_sigmoid(logit_xJJ)


def draw(x: Gaussian, noise: Tensor) -> Tensor:
    """Return samples of each Gaussian, [N, J, D] in fp32, for noise [J, D] or [N, J, D]."""
    return x.mean.float()[:, None] + (0.5 * x.logvar.float()).exp()[:, None] * noise


def sample_distances(z_NJD: Tensor, z_MJD: Tensor) -> Tensor:
    """Return the Euclidean distances between the samples of every Gaussian of both sides, [N, M, J, J]."""
    (n, j, _), m = z_NJD.shape, len(z_MJD)
    product = (z_NJD.flatten(0, 1) @ z_MJD.flatten(0, 1).T).reshape(n, j, m, j).transpose(1, 2)
    square_NJ, square_MJ = (z.square().sum(dim=-1) for z in (z_NJD, z_MJD))
    return _root(square_NJ[:, None, :, None] + square_MJ[None, :, None, :] - 2 * product)


def paired_sample_distances(z_NJD: Tensor, other_NJD: Tensor) -> Tensor:
    """Return the Euclidean distances between the samples of the i-th Gaussians of both sides, [N, J, J]."""
    square_NJ1, square_N1J = (z.square().sum(dim=-1, keepdim=True) for z in (z_NJD, other_NJD))
    return _root(square_NJ1 + square_N1J.mT - 2 * z_NJD @ other_NJD.mT)


def log_mean_sigmoid(logit_xJJ: Tensor) -> Tensor:
    """Return log mean sigmoid over the last two dimensions, finite for logits of any size."""
    pairs = logit_xJJ.shape[-2] * logit_xJJ.shape[-1]
    return torch.nn.functional.logsigmoid(logit_xJJ).logsumexp(dim=(-2, -1)) - math.log(pairs)


def _root(square: Tensor) -> Tensor:
    return square.clamp(min=SMALLEST).sqrt()
