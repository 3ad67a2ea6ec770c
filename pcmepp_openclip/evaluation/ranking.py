"""Retrieval of the paired item, and how it depends on uncertainty, without the N x N matrix."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gaussian import Gaussian


def ranks(query: Gaussian, gallery: Gaussian, chunk: int = 2**22) -> dict[str, Tensor]:
    """The rank, from 0, of item i of the gallery for query i, [N], by distance; an item that ties counts half.

    "mean" ranks by the cosine of the means, "csd" by the closed-form sampled distance. A query's own uncertainty
    shifts all of its distances alike, so only the gallery's matters there. `chunk` elements of the matrix are held
    at a time.
    """
    gallery_DM, offset_M = gallery.mean.float().T, gallery.uncertainty / 2
    out = {name: torch.empty(len(query.mean), device=query.mean.device) for name in ("mean", "csd")}
    step = max(1, chunk // len(gallery.mean))
    for start in range(0, len(query.mean), step):
        rows = slice(start, min(start + step, len(query.mean)))
        score = query.mean[rows].float() @ gallery_DM
        out["mean"][rows] = _ranks(score, start)
        out["csd"][rows] = _ranks(score.sub_(offset_M), start)
    return out


def _ranks(score: Tensor, start: int) -> Tensor:
    # closer items less farther ones; with ties as halves that is twice the rank less the others' number
    difference = (score - score.diagonal(start)[:, None]).sign_().sum(dim=1)
    return (difference + score.shape[1] - 1) / 2


def retrieval_metrics(
    images: Gaussian, texts: Gaussian, bins: dict[str, list[list[float]]] | None = None
) -> Iterator[tuple[str, float]]:
    """R@1, 5, 10, median and mean rank in both directions, by the mean (open_clip's names) and by CSD (`csd_`), and
    for each the correlation of a query's uncertainty with R@1 over 10 bins of equal size (-1: the uncertain ones
    fail); the paper's is the one by CSD. `bins`, if given, receives the [uncertainties, R@1] of these bins."""
    for name, query, gallery in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        by_distance = ranks(query, gallery)
        for distance, prefix in (("mean", ""), ("csd", "csd_")):
            rank = by_distance[distance]
            yield f"{prefix}{name}_mean_rank", rank.mean().item() + 1
            yield f"{prefix}{name}_median_rank", rank.floor().median().item() + 1
            for k in (1, 5, 10):
                yield f"{prefix}{name}_R@{k}", (rank < k).float().mean().item()
            hit = (rank < 1).float()
            if bins is not None:
                bins[f"{prefix}{name}"] = [values.tolist() for values in binned(query.uncertainty, hit)]
            yield f"{prefix}{name}_uncertainty_R@1_correlation", bin_correlation(query.uncertainty, hit)


def binned(uncertainty_N: Tensor, hit_N: Tensor, bins: int = 10) -> tuple[Tensor, Tensor]:
    """(mean uncertainty, share of hits) of bins of equal size, by rising uncertainty; at most [bins] each."""
    order = uncertainty_N.argsort()
    parts = [values[order].tensor_split(bins) for values in (uncertainty_N, hit_N)]
    mean, share = (torch.stack([part.mean() for part in values if len(part)]) for values in parts)
    return mean, share


def bin_correlation(uncertainty_N: Tensor, hit_N: Tensor, bins: int = 10) -> float:
    """Pearson's correlation between the number of an uncertainty bin and the share of hits in it; nan if undefined."""
    shares = binned(uncertainty_N, hit_N, bins)[1]
    if len(shares) < 2 or shares.std() == 0:
        return float("nan")
    number = torch.arange(len(shares), dtype=shares.dtype, device=shares.device)
    return torch.corrcoef(torch.stack([number, shares]))[0, 1].item()
