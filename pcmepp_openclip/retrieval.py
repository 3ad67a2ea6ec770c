"""Retrieval of the paired item, and how it depends on uncertainty, without the N x N matrix."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .gaussian import Gaussian


def ranks(query: Gaussian, gallery: Gaussian, distance: str, chunk: int = 2**22) -> Tensor:
    """The rank, from 0, of item i of the gallery for query i, [N]; an item that ties counts half.

    Arguments:
        distance: "mean" ranks by the cosine of the means, "csd" by the closed-form sampled distance. A query's own
            uncertainty shifts all of its distances alike, so only the gallery's matters.
        chunk: elements of the matrix held at a time.
    """
    assert distance in ("mean", "csd")
    offset_M = 0.5 * gallery.uncertainty * (distance == "csd")
    out = torch.empty(len(query.mean))
    for rows in _rows(len(query.mean), max(1, chunk // len(gallery.mean))):
        score = query.mean[rows].float() @ gallery.mean.T.float() - offset_M
        true = score.diagonal(rows.start)[:, None]
        out[rows] = ((score > true).sum(dim=1) + 0.5 * ((score == true).sum(dim=1) - 1)).cpu()
    return out


def retrieval_metrics(images: Gaussian, texts: Gaussian) -> Iterator[tuple[str, float]]:
    """R@1, 5, 10, median and mean rank in both directions, by the mean (open_clip's names) and by CSD (`csd_`), and
    the correlation of a query's uncertainty with R@1 over 10 bins of equal size (-1: the uncertain ones fail)."""
    for name, query, gallery in (("image_to_text", images, texts), ("text_to_image", texts, images)):
        for distance, prefix in (("mean", ""), ("csd", "csd_")):
            rank = ranks(query, gallery, distance)
            yield f"{prefix}{name}_mean_rank", rank.mean().item() + 1
            yield f"{prefix}{name}_median_rank", rank.floor().median().item() + 1
            for k in (1, 5, 10):
                yield f"{prefix}{name}_R@{k}", (rank < k).float().mean().item()
            if distance == "mean":
                yield (
                    f"{name}_uncertainty_R@1_correlation",
                    bin_correlation(query.uncertainty.cpu(), (rank < 1).float()),
                )


def bin_correlation(uncertainty_N: Tensor, hit_N: Tensor, bins: int = 10) -> float:
    """Pearson's correlation between the number of an uncertainty bin and the share of hits in it; nan if undefined."""
    shares = torch.stack([hit.mean() for hit in hit_N[uncertainty_N.argsort()].tensor_split(bins) if len(hit)])
    if len(shares) < 2 or shares.std() == 0:
        return float("nan")
    return torch.corrcoef(torch.stack([torch.arange(len(shares), dtype=shares.dtype), shares]))[0, 1].item()


def _rows(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
