"""The slow and obvious computations that the fast ones are tested against."""

import torch
import torch.nn.functional as F


def slow_distances(v, t, lv, lt):
    """CSD of all pairs in N x M x D."""
    return ((v[:, None] - t[None]) ** 2).sum(-1) + (lv.exp()[:, None] + lt.exp()[None]).sum(-1)


def slow_cosine(v, t, lv, lt):
    return torch.stack([torch.stack([1 - (x * y).sum() for y in t]) for x in v])


def slow_wasserstein(v, t, lv, lt):
    sigma_v, sigma_t = (lv / 2).exp(), (lt / 2).exp()
    return ((v[:, None] - t[None]) ** 2).sum(-1) + ((sigma_v[:, None] - sigma_t[None]) ** 2).sum(-1)


def slow_manhattan(v, t, lv, lt):
    """The distance of `own_terms.py`."""
    return (v[:, None] - t[None]).abs().sum(-1) + (lv.exp()[:, None] + lt.exp()[None]).sum(-1)


SLOW = {"cosine": slow_cosine, "csd": slow_distances, "wasserstein": slow_wasserstein, "manhattan": slow_manhattan}


def slow_terms(v, t, lv, lt, s, a, b, reduction="mean", distance="csd"):
    """(InfoNCE, matching, PP, VIB) of one batch by the paper's formulas, one pair at a time in N x M x D."""
    d = SLOW[distance](v, t, lv, lt)
    n = len(v)
    z = s * torch.stack([torch.stack([(v[i] * t[j]).sum() for j in range(n)]) for i in range(n)])
    own = torch.arange(n)
    contrastive = (F.cross_entropy(z, own) + F.cross_entropy(z.T, own)) / 2
    y = -a * d + b
    bce = F.binary_cross_entropy_with_logits
    divisor = n * n if reduction == "mean" else n
    m = torch.eye(n, dtype=y.dtype)
    match = bce(y, m, reduction="sum") / divisor
    rows, columns = m.clone(), m.clone()
    for i in range(n):
        for j in range(n):
            if y[i, j] >= y[i, i]:
                rows[i, j] = 1
            if y[i, j] >= y[j, j]:
                columns[i, j] = 1
    pp = (bce(y, rows, reduction="sum") + bce(y, columns, reduction="sum")) / divisor
    kl = sum((-0.5 * (1 + s_ - mu**2 - s_.exp())).mean() for mu, s_ in ((v, lv), (t, lt)))
    return contrastive, match, pp, kl
