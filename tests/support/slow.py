"""The slow and obvious computations that the fast ones are tested against."""

import torch
import torch.nn.functional as F

from pcmepp_openclip import DISTANCES


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


def slow_entailment(v, t, lv, lt):
    """Images first, texts second."""
    return torch.stack(
        [torch.stack([1 - (x * y).sum() - s.exp().sum() / 2 for y, s in zip(t, lt, strict=True)]) for x in v]
    )


def slow_euclidean(v, t, lv, lt):
    return ((v[:, None] - t[None]) ** 2).sum(-1)


def slow_kl(v, t, lv, lt):
    """By torch's own formula for one dimension."""
    normals = [torch.distributions.Normal(mean, (s / 2).exp()) for mean, s in ((v[:, None], lv[:, None]), (t, lt))]
    return torch.distributions.kl_divergence(*normals).sum(-1)


def slow_js(v, t, lv, lt):
    return (slow_kl(v, t, lv, lt) + slow_kl(t, v, lt, lv).T) / 2


def slow_elk(v, t, lv, lt):
    """The density of the difference of the means under the sum of both covariances."""
    scale = (lv.exp()[:, None] + lt.exp()[None]).sqrt()
    return -torch.distributions.Normal(t[None], scale).log_prob(v[:, None]).sum(-1)


def slow_bhattacharyya(v, t, lv, lt):
    variance = (lv.exp()[:, None] + lt.exp()[None]) / 2
    apart = ((v[:, None] - t[None]) ** 2 / variance).sum(-1) / 8
    return apart + (variance.log() - (lv[:, None] + lt[None]) / 2).sum(-1) / 2


def slow_match_log_odds(z_v, z_t, a, b):
    """log((1 - p) / p) for samples [N, J, D] and [M, J, D], where p is the mean over all pairs of samples."""
    distance = ((z_v[:, None, :, None] - z_t[None, :, None]) ** 2).sum(-1).clamp(min=1e-8).sqrt()
    logit = b - a * distance
    return F.logsigmoid(-logit).logsumexp((2, 3)) - F.logsigmoid(logit).logsumexp((2, 3))


def slow_match_probability(v, t, lv, lt):
    """With the noise of the registered distance."""
    noise_v, noise_t = DISTANCES["match_probability"].noise(v.shape[1])
    z_v = v[:, None] + (lv / 2).exp()[:, None] * noise_v
    z_t = t[:, None] + (lt / 2).exp()[:, None] * noise_t
    return slow_match_log_odds(z_v, z_t, 5.0, 5.0)


SLOW = {
    "cosine": slow_cosine,
    "csd": slow_distances,
    "entailment": slow_entailment,
    "wasserstein": slow_wasserstein,
    "euclidean": slow_euclidean,
    "kl": slow_kl,
    "js": slow_js,
    "elk": slow_elk,
    "bhattacharyya": slow_bhattacharyya,
    "match_probability": slow_match_probability,
    "manhattan": slow_manhattan,
}


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


def slow_calibration(v, t, lv, lt, s, a, b, distance="csd"):
    """What the log says of a batch, one sample at a time: see `losses/diagnostics.py`."""
    v, t, lv, lt, s, a, b = (x.detach() for x in (v, t, lv, lt, s, a, b))
    match = (-a * SLOW[distance](v, t, lv, lt) + b).sigmoid()
    n, found = len(v), {"match_ratio": (2 * a / s).item(), "expected_matches": (match.sum() / len(v)).item()}
    for side, x, y, logvar, matches in (("image", v, t, lv, match), ("text", t, v, lt, match.T)):
        others = [[j for j in range(n) if j != i] for i in range(n)]
        hubness = torch.stack(
            [torch.stack([(s * (y[j] @ x[i])).exp() for i in others[j]]).mean().log() for j in range(n)]
        )
        entropy = []
        for i in range(n):
            p = torch.stack([s * (x[i] @ y[j]) - hubness[j] for j in others[i]]).softmax(dim=0)
            entropy.append(-(p * p.log()).sum())
        entropy, u = torch.stack(entropy), a * logvar.exp().sum(dim=1)
        found[f"{side}_miscalibration"] = sum(abs(matches[i].sum().log().item()) for i in range(n)) / n
        ones = torch.ones(n, dtype=entropy.dtype)
        found[f"{side}_slope"] = torch.linalg.lstsq(torch.stack([entropy, ones], dim=1), u[:, None]).solution[0].item()
        found[f"{side}_agreement"] = torch.corrcoef(torch.stack([entropy, u]))[0, 1].item()
    return found


def slow_difficulty(v, t, lv, lt, s):
    """The regression of log u on log(2 / s * InfoNCE of the own pair + 0.001), one sample at a time."""
    total = 0
    for a, b, logvar in ((v, t, lv), (t, v, lt)):
        for i in range(len(a)):
            with torch.no_grad():
                logits = torch.stack([s * (a[i] * b[j]).sum() for j in range(len(b))])
                target = (2 / s * (logits.logsumexp(0) - logits[i]) + 1e-3).log()
            total = total + (logvar[i].exp().sum().log() - target) ** 2 / len(a)
    return total


def slow_labels(own_id, partner_id, own_share):
    """How much image i matches text j, one pair at a time."""
    n = len(own_id)
    m = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if own_id[i] == own_id[j]:
                m[i, j] += own_share[i].item()
            if partner_id[i] == own_id[j]:
                m[i, j] += 1 - own_share[i].item()
    return m


def slow_soft_terms(v, t, lv, lt, a, b, m, reduction="mean", distance="csd"):
    """(matching, PP) with the labels m, one pair at a time, and how many labels pseudo-positives raise."""
    y = -a * SLOW[distance](v, t, lv, lt) + b
    n, raised = len(y), 0
    totals = [torch.zeros((), dtype=y.dtype) for _ in range(3)]
    for k, (logits, labels) in enumerate(((y, m), (y, m), (y.T, m.T))):  # as they are, by the rows, by the columns
        for i in range(n):
            largest = max(labels[i])
            farthest = min(logits[i, j] for j in range(n) if labels[i, j] == largest)
            for j in range(n):
                is_pseudo = k > 0 and logits[i, j] >= farthest
                label = largest if is_pseudo else labels[i, j]
                raised += int(label > labels[i, j])
                p = logits[i, j].sigmoid()
                totals[k] = totals[k] - label * p.log() - (1 - label) * (1 - p).log()
    divisor = n * n if reduction == "mean" else n
    return totals[0] / divisor, (totals[1] + totals[2]) / divisor, raised


def slow_triplet(v, t, margin, hardest):
    """Hinges over all negatives of each image and of each text, one pair at a time."""
    n, total = len(v), 0
    for a, b in ((v, t), (t, v)):
        for i in range(n):
            hinges = [(margin + (a[i] * b[j]).sum() - (a[i] * b[i]).sum()).clamp(min=0) for j in range(n) if j != i]
            total = total + (max(hinges) if hardest else sum(hinges)) / n
    return total


def slow_pcme(v, t, lv, lt, a, b, noise, reduction="mean"):
    """Binary cross-entropy of the mean over all pairs of samples, for noise [2, N, J, D], in N x N x J x J x D."""
    n, noise = len(v), noise.to(v.dtype)
    z_v, z_t = (mean[:, None] + (s / 2).exp()[:, None] * e for mean, s, e in ((v, lv, noise[0]), (t, lt, noise[1])))
    p = (b - a * (z_v[:, None, :, None] - z_t[None, :, None]).norm(dim=-1)).sigmoid().mean(dim=(2, 3))
    m = torch.eye(n, dtype=torch.bool)
    return -torch.where(m, p.log(), (1 - p).log()).sum() / (n * n if reduction == "mean" else n)
