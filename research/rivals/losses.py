"""The losses of NCR, DECL, DAA and P2RM as functions of the cosines S_ij of a batch of N image-text pairs.

NCR (Huang et al., NeurIPS 2021), DECL (Qin et al., ACM MM 2022) and DAA (Li et al., NeurIPS 2022) follow their authors'
code, XLearning-SCU/2021-NeurIPS-NCR, QinYang79/DECL and leolee99/2022-NeurIPS-DAA. Of P2RM (Wang et al., "Point to
Rectangle Matching for Image Text Retrieval", ACM MM 2022) only the abstract was found, see `point_to_rectangle`. Sums
over the batch are means here in NCR and DAA, as in the package's triplet loss.
"""

import math

import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from pcmepp_openclip import Gaussian

MARGIN = 0.2  # of all four, and of VSE-infinity
WEIGHTS, DAA_TEMPERATURE = {"daa": 50 / 128, "p2rm": 1.0}, 1e-3  # 50 beside a sum over 128 pairs
DECL_TAU, DECL_RDH, DECL_KL, DECL_FEWEST = 0.1, 0.8, 0.1, 5


def hinges(cosine_NN: Tensor, margin_N: Tensor | float = MARGIN) -> Tensor:
    """Return max(0, margin_i + S_ij - S_ii) of image i with every text j, [N, N], and 0 for its own."""
    margin_N1 = torch.as_tensor(margin_N, device=cosine_NN.device).reshape(-1, 1)
    hinge_NN = (margin_N1 + cosine_NN - cosine_NN.diagonal()[:, None]).relu()
    return hinge_NN.masked_fill(torch.eye(len(hinge_NN), dtype=torch.bool, device=hinge_NN.device), 0.0)


def triplet(cosine_NN: Tensor, margin_N: Tensor | float = MARGIN, hardest: bool = True) -> Tensor:
    """Return the mean triplet loss of both directions with the hardest negatives, or with the mean over all."""
    both = torch.stack([hinges(cosine_NN, margin_N), hinges(cosine_NN.T, margin_N)])
    return (both.amax(dim=2) if hardest else both.mean(dim=2)).sum(dim=0).mean()


def pair_losses(cosine_NN: Tensor) -> Tensor:
    """Return NCR's loss of each pair, [N], the mean over all texts of its image's hinges plus that of its text's."""
    return hinges(cosine_NN).mean(dim=1) + hinges(cosine_NN.T).mean(dim=1)


def predicted_match(cosine_NN: Tensor) -> Tensor:
    """Return P(I_i, T_i) in [0, 1], [N]: how far a pair's loss is below the margin, relative to the best tenth."""
    match_N = (MARGIN - pair_losses(cosine_NN) / 2).clamp(0, MARGIN)
    best = match_N.topk(len(match_N) // 10 + 1).values.mean()
    return (match_N / best.clamp(min=1e-12)).clamp(0, 1)


def soft_margin(label_N: Tensor) -> Tensor:
    """Return the margin (10^y - 1) / 9 * 0.2 of pairs that match with y in [0, 1]."""
    return (10**label_N - 1) / 9 * MARGIN


def clean_probability(loss_N: Tensor) -> Tensor:
    """Return the posterior of the component with the smaller mean, [N], in a mixture of two Gaussians of the losses."""
    scaled_N1 = ((loss_N - loss_N.min()) / (loss_N.max() - loss_N.min()).clamp(min=1e-12)).double().numpy()[:, None]
    mixture = GaussianMixture(n_components=2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0).fit(scaled_N1)
    return torch.from_numpy(mixture.predict_proba(scaled_N1)[:, mixture.means_.argmin()])


def evidence(cosine_NN: Tensor) -> Tensor:
    """Return the evidence exp(tanh(S_ij) / 0.1) of each pair."""
    return (cosine_NN.tanh() / DECL_TAU).exp()


def evidential_loss(evidence_NN: Tensor, label_N: Tensor) -> Tensor:
    """Return DECL's loss of each query, [N], a row of evidences that are a Dirichlet with alpha = evidence + 1.

        sum_j (y_j - m_j)^2 + m_j (1 - m_j) / (A + 1)  +  0.1 KL(Dir(alpha~) || Dir(1)),    A = sum_j alpha_j

    with m = alpha / A, y_j = 0 but for the label of the own item, 1 or 0, and alpha~_j = 1 where y_j = 1.
    """
    alpha_NN = evidence_NN + 1
    label_NN = label_N[:, None] * torch.eye(len(alpha_NN), device=alpha_NN.device)
    strength_N1 = alpha_NN.sum(dim=1, keepdim=True)
    mean_NN = alpha_NN / strength_N1
    fit_N = ((label_NN - mean_NN) ** 2 + mean_NN * (1 - mean_NN) / (strength_N1 + 1)).sum(dim=1)
    return fit_N + DECL_KL * kl_from_uniform(evidence_NN * (1 - label_NN) + 1)


def kl_from_uniform(alpha_NK: Tensor) -> Tensor:
    """Return the KL divergence of each Dirichlet(alpha) from Dirichlet(1, ..., 1), [N]."""
    total_N1 = alpha_NK.sum(dim=1, keepdim=True)
    log_ratio_N = total_N1[:, 0].lgamma() - alpha_NK.lgamma().sum(dim=1) - math.lgamma(alpha_NK.shape[1])
    return log_ratio_N + ((alpha_NK - 1) * (alpha_NK.digamma() - total_N1.digamma())).sum(dim=1)


def robust_hinge(cosine_NN: Tensor, negatives: int) -> Tensor:
    """Return DECL's robust dynamic hinge loss of each pair, [N], the mean over its hardest negatives."""
    similarity_NN = cosine_NN.tanh()
    tops = [hinges(x).topk(min(negatives, len(x) - 1)).values.mean(dim=1) for x in (similarity_NN, similarity_NN.T)]
    return tops[0] + tops[1]


def decl(cosine_NN: Tensor, label_N: Tensor, negatives: int) -> Tensor:
    """Return DECL's loss: the mean of the evidential losses, and the sum of the hinges of pairs labelled 1."""
    evidences = evidence(cosine_NN)
    evidential_N = evidential_loss(evidences, label_N) + evidential_loss(evidences.T, label_N)
    return evidential_N.mean() + DECL_RDH * (label_N * robust_hinge(cosine_NN, negatives)).sum()


def share_of_evidence(cosine_NN: Tensor) -> Tensor:
    """Return the own pair's share in a row of both directions' evidence, and if it leads, as a match does, [2, N]."""
    both_NN = evidence(cosine_NN) + evidence(cosine_NN).T
    own_N = both_NN.diagonal()
    return torch.stack([own_N / both_NN.sum(dim=1), (own_N == both_NN.amax(dim=1)).float()])


def smooth_ranks(score_QN: Tensor, temperature: float = DAA_TEMPERATURE) -> Tensor:
    """Return 1 + sum over k != j of sigmoid((s_qk - s_qj) / temperature): the rank of item j for query q, [Q, N].

    The authors' code compares s_jq with s_qk, which is this only where s is symmetric.
    """
    above_QNN = torch.sigmoid((score_QN[:, None, :] - score_QN[:, :, None]) / temperature)
    return above_QNN.sum(dim=2) + 0.5  # the item itself counts as half


def daa(cosine_NN: Tensor, semantic_NN: Tensor, temperature: float = DAA_TEMPERATURE) -> Tensor:
    """Return 1 - ASP of both directions, with ASP the mean ratio of the smaller to the larger of two ranks: by the
    cosine, and by the similarity of the captions of image i and text j."""
    loss = cosine_NN.new_zeros(())
    for score, semantic in ((cosine_NN, semantic_NN), (cosine_NN.T, semantic_NN.T)):
        ranks = smooth_ranks(score, temperature), smooth_ranks(semantic, temperature)
        loss = loss + 1 - (torch.minimum(*ranks) / torch.maximum(*ranks)).mean()
    return loss


def point_to_rectangle(point_QD: Tensor, centre_ND: Tensor, width_ND: Tensor, inside: float) -> Tensor:
    """Return the distance of each point from each rectangle with centre c and sides of length 2 w, [Q, N].

    With r = |p - c|, |max(r - w, 0)|^2 + inside * |min(r, w)|^2: the squared distance from the rectangle and a small
    part of that within it, as Query2Box has it. The abstract of P2RM says that inputs become rectangles, that points in
    one are related to it, and that a distance measures this; which one, what makes w, and the loss are choices here.
    """
    reach_QND = (point_QD[:, None] - centre_ND).abs()
    outside_QN = (reach_QND - width_ND).relu().square().sum(dim=2)
    return outside_QN + inside * torch.minimum(reach_QND, width_ND).square().sum(dim=2)


def p2rm(images: Gaussian, texts: Gaussian, inside: float, hardest: bool = True) -> Tensor:
    """Return the triplet losses by -d / 2, which is the cosine less 1 if w = 0. Centres are means, and w is sigma."""
    to_texts = point_to_rectangle(images.mean, texts.mean, (texts.logvar / 2).exp(), inside)
    to_images = point_to_rectangle(texts.mean, images.mean, (images.logvar / 2).exp(), inside).T
    return triplet(-to_texts / 2, hardest=hardest) + triplet(-to_images / 2, hardest=hardest)
