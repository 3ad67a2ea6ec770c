"""Retrieval with one or several right answers per query, by any distance, in chunks of the matrix.

Validation while training and `pcmepp eval` both call `rankings`, so their numbers have the same definition, the same
rule for ties and the same names.

How it must not be read: R@k counts only the items that a query is paired with, as the field does; a model that finds
another caption that fits as well is wrong there. mAP@R, R-Precision and any_match_R@1 are for that, where all matches
are known.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..distances import Distance, by_name, get_distance
from ..gaussian import Gaussian
from .metric import Metric

KS = (1, 5, 10)
CHUNK = 10_000_000  # At most this many elements of the matrix are held: below 32 MB, glibc fragments its heap.
SAMPLES = {"image_to_text": "images", "text_to_image": "captions"}  # Each direction has these queries.
Matches = Sequence[Sequence[int]]  # Each query has the indices of its right items in the gallery.


@dataclass(frozen=True)
class Ranking:
    """The results of one distance in one direction, per query.

    Arguments:
        distance, direction: see `Metric`.
        measure: the distance itself, which is called with the queries first.
        own_rank_N: the rank, from 0, of the first item that the query is paired with.
        match_rank_N: the rank of the first item that fits, or None where only the pairs are known.
        average_precision_N, r_precision_N: mAP@R and R-Precision per query, see `precisions`; None where every query
            has one right answer, since both are then the same as R@1.
    """

    distance: str
    direction: str
    measure: Distance
    own_rank_N: Tensor
    match_rank_N: Tensor | None
    average_precision_N: Tensor | None
    r_precision_N: Tensor | None

    @property
    def samples(self) -> str:
        """Return the name of the queries, "images" or "captions"."""
        return SAMPLES[self.direction]

    @property
    def hits(self) -> dict[str, Tensor]:
        """Return whether the first item is right, [N] of 0 and 1, by what counts as right, such as "csd_R@1"."""
        ranks = {"R@1": self.own_rank_N, "any_match_R@1": self.match_rank_N}
        return {f"{self.distance}_{name}": (rank < 1).float() for name, rank in ranks.items() if rank is not None}

    def metrics(self) -> Iterator[Metric]:
        """Yield R@1, R@5, R@10, mean and median rank, and with several right answers any_match_R@1, mAP@R and
        R-Precision."""
        rank = self.own_rank_N.double()
        values: dict[str, Tensor | None] = {f"R@{k}": rank < k for k in KS}
        values["any_match_R@1"] = None if self.match_rank_N is None else self.match_rank_N < 1
        values |= {"mAP@R": self.average_precision_N, "R-Precision": self.r_precision_N}
        means = {name: value.double().mean().item() for name, value in values.items() if value is not None}
        means["mean_rank"] = rank.mean().item() + 1
        ordered, n = self.own_rank_N.sort().values, len(rank)
        means["median_rank"] = ((ordered[(n - 1) // 2] + ordered[n // 2]) // 2).item() + 1
        for name, value in means.items():
            yield Metric(name, value, self.distance, self.direction)


def rankings(
    images: Gaussian,
    texts: Gaussian,
    image_of_text: Sequence[int],
    images_of_text: Matches | None = None,
    distances: Iterable[str] | Mapping[str, Distance] | None = None,
) -> list[Ranking]:
    """Return the rankings in both directions by each distance, image to text first.

    Arguments:
        image_of_text: for each text the index of the image that it was written for.
        images_of_text: for each text the indices of all images that it fits, where known.
        distances: names of registered distances, or distances by name; None for those that are ranked by default.
    """
    pairs = [[i] for i in image_of_text]
    n = len(images.mean)
    by_image = None if images_of_text is None else invert(images_of_text, n)
    directions = (
        ("image_to_text", images, texts, _Right.of(texts, invert(pairs, n), by_image)),
        ("text_to_image", texts, images, _Right.of(images, pairs, images_of_text)),
    )
    return [
        _rank(name, distance if direction == "image_to_text" else distance.transposed, direction, query, gallery, right)
        for name, distance in by_name(distances).items()
        for direction, query, gallery, right in directions
    ]


def retrieval_metrics(ranked: Sequence[Ranking]) -> Iterator[Metric]:
    """Yield the metrics of each ranking, and after those of each distance its RSUM, the sum of all R@k in per cent."""
    for distance in dict.fromkeys(ranking.distance for ranking in ranked):
        rsum = 0.0
        for ranking in ranked:
            if ranking.distance == distance:
                for metric in ranking.metrics():
                    rsum += 100 * metric.value if metric.name in {f"R@{k}" for k in KS} else 0
                    yield metric
        yield Metric("RSUM", rsum, distance)


class _Right(NamedTuple):
    """The right answers of each query, which are the same for every distance.

    Arguments:
        own_NR: places in `tie_order` of the items that a query is paired with, padded with M.
        match_NR: places of all items that fit, or None where only the pairs are known.
        count_N: the number of right items: of those that fit, or else of the paired ones.
    """

    own_NR: Tensor
    match_NR: Tensor | None
    count_N: Tensor

    @classmethod
    def of(cls, gallery: Gaussian, own: Matches, matches: Matches | None) -> "_Right":
        counts = [len(items) for items in (own if matches is None else matches)]
        match_NR = None if matches is None else places(matches, gallery)
        return cls(places(own, gallery), match_NR, torch.tensor(counts, device=gallery.mean.device))


def _rank(name: str, distance: Distance, direction: str, query: Gaussian, gallery: Gaussian, right: _Right) -> Ranking:
    own_NR, match_NR, count_N = right
    right_NR, most = own_NR if match_NR is None else match_NR, int(count_N.max())
    own_ranks, ranks_of_matches, precision = [], [], []
    for rows, score_nM in scores(query, gallery, distance):
        own_ranks.append(first_rank(score_nM, own_NR[rows]))
        if match_NR is not None:
            ranks_of_matches.append(first_rank(score_nM, match_NR[rows]))
        if most > 1:
            is_right_nM = score_nM.new_zeros(len(score_nM), score_nM.shape[1] + 1, dtype=torch.bool)
            hit_nK = is_right_nM.scatter_(1, right_NR[rows], True).gather(1, top_k(score_nM, most))
            precision.append(torch.stack(precisions(hit_nK, count_N[rows])))
    average, r_precision = torch.cat(precision, dim=1) if precision else (None, None)
    match_rank_N = torch.cat(ranks_of_matches) if ranks_of_matches else None
    return Ranking(name, direction, distance, torch.cat(own_ranks), match_rank_N, average, r_precision)


def match_ranks(query: Gaussian, gallery: Gaussian, matches: Matches, distance: str | Distance) -> Tensor:
    """Return the rank, from 0, of the first right item for each query, [N]."""
    place_NR = places(matches, gallery)
    return torch.cat([first_rank(score, place_NR[rows]) for rows, score in scores(query, gallery, distance)])


def nearest(
    query: Gaussian, gallery: Gaussian, distance: str | Distance, k: int, chunk: int = CHUNK
) -> Iterator[Tensor]:
    """Yield the indices of the k nearest items, [n, k], nearest first, for chunks of queries in order."""
    order_M = tie_order(gallery)
    for _, score_nM in scores(query, gallery, distance, chunk):
        yield order_M[top_k(score_nM, k)]


def tie_order(gallery: Gaussian) -> Tensor:
    """Return the fixed random order of the gallery by which ties are broken, [M]: never by the order in which right
    answers happen to be stored, so that a model which maps everything to one point finds as much as chance does."""
    order_M = torch.randperm(len(gallery.mean), generator=torch.Generator().manual_seed(0))
    return order_M.to(gallery.mean.device)


def scores(
    query: Gaussian, gallery: Gaussian, distance: str | Distance, chunk: int = CHUNK
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, closeness) for chunks of queries in order: [n, M], larger for nearer, the gallery in `tie_order`.

    Equal items of the gallery always tie: their score is computed once.
    """
    order_M = tie_order(gallery)
    key_U, place_M = gallery.keys.unique(return_inverse=True)
    if len(key_U) == len(order_M):
        kept_U, expand_M = order_M, None
    else:  # Any one of the equal items stands for all.
        indices = torch.arange(len(place_M), device=place_M.device)
        kept_U = torch.empty_like(key_U).index_copy_(0, place_M, indices)
        expand_M = place_M[order_M]
    measure = get_distance(distance)
    factors = measure.factors(query, gallery)
    if factors is None:
        gallery = gallery.select(kept_U)
    else:
        gallery_UE = factors.gallery_ME[kept_U]
        offset_U = None if factors.offset_M is None else factors.offset_M[kept_U]
    step = max(1, chunk // len(order_M))
    for start in range(0, len(query.mean), step):
        rows = slice(start, min(start + step, len(query.mean)))
        if factors is None:
            score_nU = -measure.matrix(query.select(rows), gallery)
        else:
            score_nU = factors.query_NE[rows] @ gallery_UE.T
            if offset_U is not None:
                score_nU -= offset_U
        yield rows, score_nU if expand_M is None else score_nU[:, expand_M]


def first_rank(score_nM: Tensor, place_nR: Tensor) -> Tensor:
    """Return the rank, from 0, of the best of the items at `place_nR`, [n]: how many come before it in a stable sort.

    Arguments:
        place_nR: columns of `score_nM`, M where a query has fewer than R of them.
    """
    columns = score_nM.shape[1]
    score_nR = score_nM.gather(1, place_nR.clamp(max=columns - 1))
    score_nR = score_nR.masked_fill(place_nR == columns, -torch.inf)
    best_n1 = score_nR.amax(dim=1, keepdim=True)
    place_n1 = place_nR.masked_fill(score_nR != best_n1, columns).amin(dim=1, keepdim=True)
    # Sums of floats are several times as fast on a CPU as sums of booleans, and exact up to 2^24 columns.
    scratch_nM = torch.empty_like(score_nM)
    rank_n = torch.gt(score_nM, best_n1, out=scratch_nM).sum(dim=1).long()
    tied_n = torch.ge(score_nM, best_n1, out=scratch_nM).sum(dim=1).long() > rank_n + 1
    if tied_n.any():
        before = torch.arange(columns, device=score_nM.device) < place_n1[tied_n]
        rank_n[tied_n] += ((score_nM[tied_n] == best_n1[tied_n]) & before).sum(dim=1)
    return rank_n.masked_fill(best_n1[:, 0].isnan(), columns - 1)  # nothing is closer than nan, and nothing is found


def places(matches: Matches, gallery: Gaussian) -> Tensor:
    """Return the places of each query's right items in `tie_order`, [N, R], padded with M."""
    device, size = gallery.mean.device, len(gallery.mean)
    place_M = torch.empty(size + 1, dtype=torch.long, device=device)
    place_M[tie_order(gallery)] = torch.arange(size, device=device)
    place_M[size] = size
    indices = [torch.as_tensor(items, dtype=torch.long) for items in matches]
    return place_M[pad_sequence(indices, batch_first=True, padding_value=size).to(device)]


def top_k(score_nM: Tensor, k: int) -> Tensor:
    """Return the columns of the k highest scores, [n, k], the highest first and equal ones in the order of columns.

    That is the start of a stable sort, so the result for a larger k begins with that for a smaller one, which
    `torch.topk` does not promise."""
    k = min(k, score_nM.shape[1])
    value, place = score_nM.topk(min(k + 1, score_nM.shape[1]), dim=1)
    place_nk, by_place = place[:, :k].sort(dim=1)
    by_value = value[:, :k].gather(1, by_place).argsort(dim=1, descending=True, stable=True)
    place_nk = place_nk.gather(1, by_value)
    cut_n = (value[:, k - 1 : k] == value[:, k:]).any(dim=1)  # only some of several equal scores are among the first k
    if cut_n.any():
        place_nk[cut_n] = score_nM[cut_n].argsort(dim=1, descending=True, stable=True)[:, :k]
    return place_nk


def precisions(hit_NK: Tensor, count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mAP@R, R-Precision) of each query, [N], from right or wrong at the first K ranks, where R, the number of
    right items, is at most K.

        R-Precision = share of right items among the first R
        mAP@R       = 1/R sum over r = 1..R of (precision at r if item r is right, else 0)
    """
    place_K = torch.arange(1, hit_NK.shape[1] + 1, device=hit_NK.device)
    counted_NK = hit_NK.double() * (place_K <= count_N[:, None])
    precision_NK = counted_NK.cumsum(dim=1) / place_K
    return (precision_NK * counted_NK).sum(dim=1) / count_N, counted_NK.sum(dim=1) / count_N


def invert(matches: Matches, count: int) -> list[list[int]]:
    """Return the matches seen from the other side, which has `count` items."""
    inverse: list[list[int]] = [[] for _ in range(count)]
    for i, items in enumerate(matches):
        for j in items:
            inverse[j].append(i)
    return inverse
