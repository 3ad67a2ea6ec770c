"""The interface of a distance between Gaussians, for training, validation, evaluation and the demo alike."""

from typing import NamedTuple

from torch import Tensor

from ..gaussian import Gaussian, full_precision


class Factors(NamedTuple):
    """A distance as one matrix product and one offset per sample, so that nothing of size N x M x D is formed:

        d_ij = row_i + column_j - scale * query_i . gallery_j

    For one query `row_i` is a constant, so `query @ gallery.T - offset` with `offset = column / scale` ranks the
    gallery: the highest value is the nearest item. That is also the form which an inner-product index can search.

    All are fp32, or fp64 if a small distance is the difference of large numbers.

    Arguments:
        query_NE: [N, E], where E may differ from the dimension of the embeddings.
        gallery_ME: [M, E].
        row_N: [N].
        column_M: [M], or None if it is 0 for every item.
        scale: positive; it is apart so that `query_NE` can be the means themselves and not a copy.
    """

    query_NE: Tensor
    gallery_ME: Tensor
    row_N: Tensor
    column_M: Tensor | None = None
    scale: float = 1.0

    @property
    def offset_M(self) -> Tensor | None:
        """Return the offset that ranks the gallery together with the product, [M], see above."""
        return None if self.column_M is None else self.column_M / self.scale


class Distance:
    """A distance between Gaussians; smaller means closer. A subclass defines `factors`, or `matrix` and `paired`.

    Add one to the registry, and every command knows it:

        >>> class Manhattan(Distance):
        ...     def matrix(self, a, b):
        ...         return torch.cdist(a.mean.float(), b.mean.float(), p=1)
        ...
        ...     def paired(self, a, b):
        ...         return (a.mean.float() - b.mean.float()).abs().sum(dim=1)
        >>> DISTANCES["manhattan"] = Manhattan()

    A distance must be differentiable in the means and the log-variances to be trained with. It is computed in fp32,
    whatever the dtype of its input and under autocast too.

    A distance that treats images and texts differently is called with the images first; `transposed` is the same
    distance for calls with the texts first, and must be defined too: `Transposed(self)`.

    A score that is only ranked by has `trainable = False`. A distance that `pcmepp eval` should rank by only on
    request, or if the model was trained with it, has `ranked_by_default = False`.
    """

    trainable = True
    ranked_by_default = True

    @property
    def transposed(self) -> "Distance":
        """Return the distance d'(b, a) = d(a, b). This is the distance itself if it is symmetric."""
        return self

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors | None:
        """Return the form that needs no N x M x D, or None for a distance that has no such form."""
        return None

    def matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        """Return the distance of every Gaussian of `a` to every Gaussian of `b`, [N, M]."""
        check_shapes(a, b)
        with full_precision(a.mean):
            factors = self._factors(a, b)
            distance_NM = factors.row_N[:, None] - (factors.scale * factors.query_NE) @ factors.gallery_ME.T
            return (distance_NM if factors.column_M is None else distance_NM + factors.column_M).float()

    def paired(self, a: Gaussian, b: Gaussian) -> Tensor:
        """Return the distance of the i-th Gaussian of `a` to the i-th Gaussian of `b`, [N]."""
        check_shapes(a, b)
        with full_precision(a.mean):
            factors = self._factors(a, b)
            distance_N = factors.row_N - factors.scale * (factors.query_NE * factors.gallery_ME).sum(dim=1)
            return (distance_N if factors.column_M is None else distance_N + factors.column_M).float()

    def _factors(self, a: Gaussian, b: Gaussian) -> Factors:
        factors = self.factors(a, b)
        if factors is None:
            raise NotImplementedError(f"{type(self).__name__} must define `factors`, or both `matrix` and `paired`.")
        return factors


class Transposed(Distance):
    """The distance d'(b, a) = d(a, b), for a distance d that treats images and texts differently."""

    def __init__(self, of_images: Distance):
        self.of_images, self.trainable = of_images, of_images.trainable

    @property
    def transposed(self) -> Distance:
        return self.of_images

    def factors(self, query: Gaussian, gallery: Gaussian) -> Factors | None:
        factors = self.of_images.factors(gallery, query)
        if factors is None:
            return None
        gallery_ME, query_NE, column_M, row_N, scale = factors
        return Factors(
            query_NE, gallery_ME, query_NE.new_zeros(len(query_NE)) if row_N is None else row_N, column_M, scale
        )

    def matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        return self.of_images.matrix(b, a).T

    def paired(self, a: Gaussian, b: Gaussian) -> Tensor:
        return self.of_images.paired(b, a)


def check_shapes(a: Gaussian, b: Gaussian) -> None:
    if a.mean.ndim != 2 or b.mean.ndim != 2 or a.mean.shape[1] != b.mean.shape[1]:
        raise ValueError(
            "A distance takes two batches of Gaussians with means [N, D] and [M, D] of the same D; "
            f"got {list(a.mean.shape)} and {list(b.mean.shape)}."
        )
