"""A batch of diagonal Gaussians, as a PCME++ encoder returns it.

Shape suffixes used in this package:

    N, M    samples; in a loss N is the batch of all ranks together and n the batch of this rank
    D       embedding dimensions
    E       dimensions of a distance's factors, see `distances/base.py`
    L       tokens
    C       width of a tower; in zero-shot classification, classes
    T       prompts per class
    H       attention heads
    K       retrieved items
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """N(mean, diag(exp(logvar))) for each sample of a batch.

    Arguments:
        mean: l2-normalised means, [N, D], in the dtype of the tower.
        logvar: log sigma^2, [N, D], always fp32.

    Example:
        >>> image = model.encode_image_gaussian(pixels)
        >>> image.uncertainty.argsort(descending=True)  # the most uncertain image first
    """

    mean: Tensor
    logvar: Tensor

    def select(self, rows: Sequence[int] | Tensor | slice) -> "Gaussian":
        """Return the samples at these indices."""
        index = rows if isinstance(rows, (Tensor, slice)) else list(rows)
        return Gaussian(self.mean[index], self.logvar[index])

    @property
    def uncertainty(self) -> Tensor:
        """Return the uncertainty of each sample: the sum of its variances, sum_d sigma_d^2, [N], fp32."""
        return self.logvar.float().exp().sum(dim=-1)

    @property
    def keys(self) -> Tensor:
        """Return a hash per sample, [N] int64: equal for equal Gaussians, different for others.

        Two others agree with a probability of 2^-64. Equal Gaussians are equally far from anything, but the rounding of
        a matrix product may say otherwise, so ties are detected by these keys.
        """
        with torch.no_grad():
            parts = zip(self.mean.split(1024), self.logvar.split(1024), strict=True)  # int64 takes twice the memory
            return torch.cat([_hash(torch.cat([mean.float(), logvar.float()], dim=1)) for mean, logvar in parts])


def full_precision(x: Tensor) -> AbstractContextManager:
    """Switch autocast off on the device of `x`: distances and losses are computed in fp32 under any precision."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


Backward = TypeVar("Backward", bound=Callable[..., Any])


def full_precision_backward(backward: Backward) -> Backward:
    """Decorate the `backward` of an autograd function whose forward pass was in full precision.

    A user may call `loss.backward()` within autocast, whose dtypes are not those of the saved tensors. Torch's
    `custom_bwd` does this too, but wants the kind of device when the class is defined.
    """

    @functools.wraps(backward)
    def in_full_precision(ctx: Any, *grads: Tensor | None) -> Any:
        with full_precision(next(grad for grad in grads if grad is not None)):
            return backward(ctx, *grads)

    return cast(Backward, in_full_precision)


def _hash(x_ND: Tensor) -> Tensor:
    """Return the sum of each row's bits as 32-bit integers, times fixed random numbers, modulo 2^64.

    The sum is exact in any order.
    """
    weight_D = mixed_bits(mixed_bits(torch.arange(1, x_ND.shape[1] + 1, device=x_ND.device)))
    bits_ND = (x_ND + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return (bits_ND * weight_D).sum(dim=1)


def mixed_bits(x: Tensor) -> Tensor:
    """Return the output of SplitMix64's finaliser, each bit of which depends on every bit of the input."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
