"""Approximate nearest neighbours: what an index over the means finds, alone or re-ranked by a distance."""

import math
from typing import Any

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .base import Distance, check_shapes
from .cosine import Cosine
from .csd import CSD

PROBED = 8  # one in so many cells is searched
LONGEST = 1000  # items that a search returns at most


class Approximate(Distance):
    """The search of a large gallery in two steps, as in the paper's appendix C.6.

        d(a, b) = rank_by(a, b) if the index finds b for a, infinite if not

    The index is FAISS' inverted file over the means of `b`: k-means sorts M items into sqrt(M) cells, and a query looks
    into the cells that are nearest to it. Nothing but the means is in the index; the variances are needed only for the
    items that it finds. Items that are not found come last, in random order. Images and texts may be either side: the
    second one is indexed.

    Arguments:
        rank_by: what the found items are ranked by: the cosine, or CSD for a re-ranking by the variances.
    """

    trainable = False

    def __init__(self, rank_by: Distance) -> None:
        self.rank_by = rank_by
        self._indexed: tuple[Tensor, Any] | None = None  # the chunks of one gallery share an index

    def matrix(self, a: Gaussian, b: Gaussian) -> Tensor:
        check_shapes(a, b)
        if self._indexed is None or self._indexed[0] is not b.mean:
            self._indexed = b.mean, index_of(b.mean)
        found_NK = self._indexed[1].search(_array(a.mean), min(LONGEST, len(b.mean)))[1]
        place_NK = torch.from_numpy(found_NK).to(a.mean.device)
        place_NK = place_NK.masked_fill(place_NK < 0, len(b.mean))  # fewer than K items were found
        found_NM = torch.zeros(len(a.mean), len(b.mean) + 1, dtype=torch.bool, device=a.mean.device)
        found_NM = found_NM.scatter_(1, place_NK, True)[:, :-1]
        return self.rank_by.matrix(a, b).masked_fill(~found_NM, math.inf)


def approximate_distances() -> dict[str, Distance]:
    """By the names that their metrics have: the means alone, and re-ranked by CSD."""
    return {"ann": Approximate(Cosine()), "ann_csd": Approximate(CSD())}


def index_of(mean_MD: Tensor) -> Any:
    """FAISS' inverted file over the means, by their inner products."""
    import faiss  # in an extra

    means = _array(mean_MD)
    cells = max(1, round(math.sqrt(len(means))))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(means.shape[1]), means.shape[1], cells, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # it would warn of small galleries
    index.nprobe = math.ceil(cells / PROBED)
    index.train(means)
    index.add(means)
    return index


def _array(mean_ND: Tensor) -> Any:
    return mean_ND.detach().float().cpu().contiguous().numpy()
