"""Is a vague caption more uncertain than an exact one of the same image? Chains of captions, from vague to exact.

    kendall_tau = mean over chains of (pairs in order - pairs in reverse order) / pairs, of the depth 1..K of a caption
                  and its specificity; 1 where each step is more specific. Equal values are neither. HierarCaps' d_corr.

The specificity is -uncertainty; beside it are `radius`, the distance of the mean from that of the empty caption, which
any CLIP has, `caption_length`, the number of words, which needs no model, and, given a bank of reference pairs, `bank`,
the negative number of images in the bank that the caption is confused among.

    traversal   = 50 bounds from the lowest to the highest specificity of all captions; at each, the caption within it
                  that is most similar to the image by the cosine. These are the captions found for the image.
    precision   = the share of them that are of the image's own chains; mean over images
    recall      = the share of depths of which a caption of the image's own chains is found; mean over images

    HiMo@K      = mean over images of Pearson's correlation of 1..K with the closeness of its K ever longer captions;
                  0 where it is undefined

How it must not be read: vaguer captions are shorter in these datasets, so a number is about vagueness only as far as it
exceeds that of `caption_length`, and the traversal rewards captions that occur in many chains. HiMo@K is about the
distance, not about the uncertainty alone; words beyond a model's context are not seen by it.

Reference: Alper and Averbuch-Elor, "Emergent Visual-Semantic Hierarchies in Image-Text Representations" (HierarCaps),
ECCV 2024; Wu et al., "HiMo-CLIP", AAAI 2026.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..ambiguity.bank import TEXTS, Bank
from ..distances import Distance, by_name
from ..gaussian import Gaussian
from .metric import Metric
from .uncertainty import pearson

STEPS = 50
Chains = Sequence[Sequence[str]]


def kendall_tau(specificity_K: Tensor) -> float:
    """Return (pairs in order - pairs in reverse order) / pairs; nan for fewer than two values."""
    k = len(specificity_K)
    later, earlier = torch.tril_indices(k, k, -1)
    return (specificity_K[later] - specificity_K[earlier]).sign().double().mean().item() if k > 1 else math.nan


def specificities(
    chains: Chains, texts: Gaussian, root_D: Tensor, probabilistic: bool = True, bank: Bank | None = None
) -> dict[str, Tensor]:
    """Return the specificities of the file's docstring, [M] each, by the `score` of `Metric`.

    Arguments:
        texts: the Gaussians of the captions of all chains in order, [M, D].
        root_D: the mean of the empty caption.
    """
    words = [float(len(caption.split())) for chain in chains for caption in chain]
    values = {"": -texts.uncertainty.double()} if probabilistic else {}
    if bank is not None:
        values["bank"] = -bank.confusion(texts.mean, TEXTS).double()
    radius = (texts.mean - root_D).double().norm(dim=1)
    return {**values, "radius": radius, "caption_length": torch.tensor(words).double()}


def order(chains: Chains, specificity: dict[str, Tensor]) -> Iterator[Metric]:
    """Yield `kendall_tau` by each specificity."""
    for score, values_M in specificity.items():
        taus = torch.tensor([kendall_tau(part) for part in values_M.split([len(chain) for chain in chains])])
        yield Metric("kendall_tau", taus.nanmean().item(), samples="captions", score=score)


def found_captions(similarity_NM: Tensor, specificity_M: Tensor, steps: int = STEPS) -> Tensor:
    """Return the index of the caption found for each image at each bound, [N, steps]."""
    order_M = specificity_M.argsort(stable=True)
    first, last = specificity_M[order_M[0]].item(), specificity_M[order_M[-1]].item()
    bounds = torch.linspace(first, last, steps, dtype=torch.double)
    bounds[-1] = last  # Whatever the rounding, the last bound is around all captions, and the first around one.
    inside = torch.searchsorted(specificity_M[order_M], bounds, right=True).clamp(min=1)
    return order_M[similarity_NM[:, order_M].cummax(dim=1).indices[:, inside - 1]]


def traversal(
    chains: Chains, texts: Gaussian, images: Gaussian, image_of_chain: Sequence[int], specificity: dict[str, Tensor]
) -> Iterator[Metric]:
    """Yield `traversal_precision` and `traversal_recall`, of sets of strings, by each specificity but the word count.

    Arguments:
        texts, images: Gaussians, [M, D] of the captions of all chains in order, and [N, D].
        image_of_chain: for each chain the index of its image.
    """
    captions = [caption for chain in chains for caption in chain]
    own: list[list[Sequence[str]]] = [[] for _ in images.mean]
    for chain, image in zip(chains, image_of_chain, strict=True):
        own[image].append(chain)
    similarity_NM = images.mean @ texts.mean.T
    for score, values_M in specificity.items():
        if score == "caption_length":
            continue
        precision, recall = [], []
        for row, mine in zip(found_captions(similarity_NM, values_M).tolist(), own, strict=True):
            retrieved, right = {captions[i] for i in row}, {caption for chain in mine for caption in chain}
            precision.append(len(retrieved & right) / len(retrieved))
            depths = max(len(chain) for chain in mine)
            hits = [any(depth < len(chain) and chain[depth] in retrieved for chain in mine) for depth in range(depths)]
            recall.append(sum(hits) / depths)
        for name, values in (("precision", precision), ("recall", recall)):
            value = sum(values) / len(values)
            yield Metric(f"traversal_{name}", value, samples="captions", score=score)


def himo(
    chains: Chains,
    texts: Gaussian,
    images: Gaussian,
    image_of_chain: Sequence[int],
    distances: Iterable[str] | Mapping[str, Distance],
) -> Iterator[Metric]:
    """Yield `HiMo@K` by each distance; see the file's docstring and `traversal`."""
    lengths = [len(chain) for chain in chains]
    image_M = torch.tensor(image_of_chain).repeat_interleave(torch.tensor(lengths))
    for name, distance in by_name(distances).items():
        parts = (-distance.paired(images.select(image_M), texts)).split(lengths)
        correlation_N = torch.tensor([pearson(torch.arange(len(part)), part) for part in parts])
        yield Metric("HiMo@K", correlation_N.nan_to_num(0.0).mean().item(), name)
