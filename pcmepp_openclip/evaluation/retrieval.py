"""Retrieval with several right answers a query, by three distances, in chunks of the matrix.

How it must not be read: R@k counts only the caption that was written for an image, as the field does; a model that
finds another caption that fits as well is wrong there. mAP@R and R-Precision are for that, where all matches are known.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..gaussian import Gaussian

KS = (1, 5, 10)
DISTANCES = ("mean", "csd", "wasserstein")
Matches = Sequence[Sequence[int]]  # for each query the numbers of the right items of the gallery


class Product(NamedTuple):
    """A distance in the form that needs no N x M x D: its negative, up to a term of the query's own and a factor 2,
    is `query @ gallery.T - offset`, where there is an offset."""

    query_NE: Tensor
    gallery_ME: Tensor
    offset_M: Tensor | None


def product(query: Gaussian, gallery: Gaussian, distance: str) -> Product:
    """With unit means: "mean" is the cosine, "csd" `|mu - mu'|^2 + sum sigma^2 + sum sigma'^2`, "wasserstein" the
    2-Wasserstein distance of diagonal Gaussians, `|mu - mu'|^2 + |sigma - sigma'|^2`."""
    mean_ND, mean_MD = query.mean.float(), gallery.mean.float()
    if distance == "mean":
        return Product(mean_ND, mean_MD, None)
    offset_M = gallery.uncertainty / 2
    if distance == "csd":
        return Product(mean_ND, mean_MD, offset_M)
    assert distance == "wasserstein", distance
    sigma_ND, sigma_MD = (0.5 * query.logvar).exp(), (0.5 * gallery.logvar).exp()
    return Product(torch.cat([mean_ND, sigma_ND], 1), torch.cat([mean_MD, sigma_MD], 1), offset_M)


def nearest(query: Gaussian, gallery: Gaussian, distance: str, k: int, chunk: int = 2**23) -> Iterator[Tensor]:
    """The numbers of the k nearest items, [n, k], nearest first, for chunks of queries in order.

    Ties are broken by a fixed random order of the gallery, whatever k is, and never by the order in which right
    answers lie: a model that maps everything to one point finds as much as chance does. Equal items always tie: their
    score is computed once.
    """
    order_M = torch.randperm(len(gallery.mean), generator=torch.Generator().manual_seed(0))
    keys_U, place_M = gallery.keys.unique(return_inverse=True)
    if len(keys_U) == len(order_M):
        rows, expand_M = order_M, None
    else:
        rows = torch.empty_like(keys_U).index_copy_(0, place_M, torch.arange(len(place_M)))  # any of the equal ones
        expand_M = place_M[order_M]
    query_NE, gallery_ME, offset_M = product(query, gallery, distance)
    gallery_UE, offset_U = gallery_ME[rows], None if offset_M is None else offset_M[rows]
    step = max(1, chunk // len(order_M))
    for start in range(0, len(query_NE), step):
        score_nU = query_NE[start : start + step] @ gallery_UE.T
        if offset_U is not None:
            score_nU -= offset_U
        score_nM = score_nU if expand_M is None else score_nU[:, expand_M]
        yield order_M[top_k(score_nM, k)]


def top_k(score_nM: Tensor, k: int) -> Tensor:
    """The places of the k highest scores, [n, k], the highest first and equal ones in order of place.

    That is the start of a stable sort, and so that of a larger k begins with that of a smaller one, which
    `torch.topk` does not promise."""
    k = min(k, score_nM.shape[1])
    value, place = score_nM.topk(min(k + 1, score_nM.shape[1]), dim=1)
    place_nk, by_place = place[:, :k].sort(dim=1)
    by_value = value[:, :k].gather(1, by_place).argsort(dim=1, descending=True, stable=True)
    place_nk = place_nk.gather(1, by_value)
    cut_n = (value[:, k - 1 : k] == value[:, k:]).any(dim=1)  # of some equal scores, not all are among the first k
    if cut_n.any():
        place_nk[cut_n] = score_nM[cut_n].argsort(dim=1, descending=True, stable=True)[:, :k]
    return place_nk


def hits(top_nK: Tensor, matches: Matches) -> Tensor:
    """Whether each retrieved item is right, [n, K]."""
    right = [torch.isin(row, torch.as_tensor(match)) for row, match in zip(top_nK, matches, strict=True)]
    return torch.stack(right)


def recalls(hit_NK: Tensor, ks: Sequence[int] = KS) -> Iterator[tuple[str, float]]:
    """R@k: the share of queries with a right item among the first k."""
    for k in ks:
        yield f"R@{k}", hit_NK[:, :k].any(dim=1).float().mean().item()


def precisions(hit_NK: Tensor, number_N: Tensor) -> tuple[Tensor, Tensor]:
    """(mAP@R, R-Precision) of each query, [N], from right or wrong at the first K places, where R, the number of
    right items, is at most K.

        R-Precision = share of right items among the first R
        mAP@R       = 1/R sum over r = 1..R of (precision at r if item r is right, else 0)
    """
    place_K = torch.arange(1, hit_NK.shape[1] + 1)
    counted_NK = hit_NK.double() * (place_K <= number_N[:, None])
    precision_NK = counted_NK.cumsum(dim=1) / place_K
    return (precision_NK * counted_NK).sum(dim=1) / number_N, counted_NK.sum(dim=1) / number_N


def invert(matches: Matches, count: int) -> list[list[int]]:
    """Matches seen from the other side, which has `count` items."""
    inverse: list[list[int]] = [[] for _ in range(count)]
    for i, items in enumerate(matches):
        for j in items:
            inverse[j].append(i)
    return inverse


def first_hit(query: Gaussian, gallery: Gaussian, matches: Matches, distance: str) -> Tensor:
    """Whether the nearest item is a right one, [N] of 0 and 1: what uncertainty is held against. Its mean is R@1."""
    top_N1 = torch.cat(list(nearest(query, gallery, distance, 1)))
    return hits(top_N1, matches)[:, 0].float()


def confidence(query: Gaussian, gallery: Gaussian, scale: float, chunk: int = 2**23) -> Tensor:
    """The probability that the softmax over the gallery, by the cosine times `scale`, gives to its first item, [N]."""
    step = max(1, chunk // len(gallery.mean))
    logits = (scale * part @ gallery.mean.T for part in query.mean.split(step))
    return torch.cat([part.softmax(dim=1).amax(dim=1) for part in logits])


def retrieval(
    images: Gaussian,
    texts: Gaussian,
    image_of_text: Sequence[int],
    images_of_text: Matches | None = None,
    distances: Sequence[str] = DISTANCES,
) -> Iterator[tuple[str, float]]:
    """R@k, mAP@R and R-Precision in both directions, and RSUM (the six R@k in per cent, added), by each distance.

    Arguments:
        image_of_text: for each text the image that it was written for: R@k.
        images_of_text: for each text all images that it fits, where known: mAP@R and R-Precision, and R@1 with any of
            them right as `any_match_R@1`. Without, these are computed from `image_of_text` too.

    Yields names like "csd/image_to_text_R@1".
    """
    pairs = [[i] for i in image_of_text]
    matches = pairs if images_of_text is None else images_of_text
    n = len(images.mean)
    directions = {
        "image_to_text": (images, texts, invert(pairs, n), invert(matches, n)),
        "text_to_image": (texts, images, pairs, matches),
    }
    for distance in distances:
        rsum = 0.0
        for name, (query, gallery, own, right) in directions.items():
            found = dict(_one_direction(query, gallery, own, right, distance))
            rsum += sum(100 * value for key, value in found.items() if key.startswith("R@"))
            if images_of_text is None:
                del found["any_match_R@1"]
            yield from ((f"{distance}/{name}_{key}", value) for key, value in found.items())
        yield f"{distance}/RSUM", rsum


def _one_direction(
    query: Gaussian, gallery: Gaussian, own: Matches, right: Matches, distance: str
) -> Iterator[tuple[str, float]]:
    number_N = torch.tensor([len(items) for items in right])
    paired, first, by_query, start = [], [], [], 0
    for top in nearest(query, gallery, distance, max(*KS, int(number_N.max()))):
        rows = slice(start, start := start + len(top))
        paired.append(hits(top[:, : max(KS)], own[rows]))
        hit = hits(top, right[rows])
        first.append(hit[:, :1])
        by_query.append(torch.stack(precisions(hit, number_N[rows])))
    yield from recalls(torch.cat(paired))
    yield "any_match_R@1", torch.cat(first).float().mean().item()
    average, precision = torch.cat(by_query, dim=1).mean(dim=1).tolist()
    yield "mAP@R", average
    yield "R-Precision", precision
