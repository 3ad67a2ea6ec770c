"""Tokens that GPO does not see in training (SizeAugment of VSE-infinity), so that it learns to pool other lengths.

For each sample r ~ U(0, 1). It keeps all tokens if r <= p; else each of them is dropped with probability p r. With the
paper's p of 0.2, 80 % of the images lose 12 % of their tokens on average.
"""

import torch
from torch import Tensor

from ..gaussian import mixed_bits


def kept_tokens(seed_N: Tensor, length: int, p: float) -> Tensor:
    """Return which tokens are kept, [N, L] of booleans. Each sample keeps at least one; CLS is treated like the others.

    The draws are a hash of the seed and the index of a token: the same in each forward pass of a step, on any device.

    Arguments:
        seed_N: int64, one seed per sample.
        length: L.
        p: the probability of the formula, in [0, 1).
    """
    index_L = torch.arange(1, length + 2, device=seed_N.device)  # the first draw is r; 0 stays 0 when mixed
    bits_NL = mixed_bits(mixed_bits(seed_N)[:, None] + mixed_bits(index_L))
    uniform_NL = ((bits_NL >> 20) & (2**24 - 1)).float() / 2**24  # 24 bits are exact in fp32
    r_N1, draw_NL = uniform_NL[:, :1], uniform_NL[:, 1:]
    kept_NL = (r_N1 <= p) | (draw_NL >= p * r_N1)
    return kept_NL | ~kept_NL.any(dim=1, keepdim=True)
