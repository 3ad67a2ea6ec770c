"""Zero-shot classification: a class is its name in many prompts, and the uncertainty says which prompts to trust.

How it must not be read: what is chosen on the test images themselves (`oracle_...`) says what luck can do, not what a
model can; `bprw_unlabelled` has seen the test images, though not their labels. The rest are fair.

Shapes: N images, C classes, T prompts per class, D dimensions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distances import Distance, by_name
from ..gaussian import Gaussian
from .bprw import FEW_SHOT, NEIGHBOURS, prompt_weights
from .metric import Metric
from .retrieval import top_k

TOP_KS = (1, 2, 5, 10, 20, 40)


def weighted_sum(prompts_CTD: Gaussian, weight_CT: Tensor) -> Tensor:
    """Return a classifier, [C, D]: the sum of each class's prompts with these weights."""
    return torch.einsum("ctd,ct->cd", prompts_CTD.mean, weight_CT)


def weighted(prompts_CTD: Gaussian, weight_CT: Tensor) -> Tensor:
    """Return `weighted_sum` on the unit sphere, where CLIP's classifier is."""
    return F.normalize(weighted_sum(prompts_CTD, weight_CT), dim=-1)


def predict(images_ND: Tensor, classifier_CD: Tensor, k: int = 1) -> Tensor:
    """Return the indices of the k most similar classes, [N, k], in chunks of images; of equal ones the first."""
    return torch.cat([top_k(part @ classifier_CD.T, k) for part in images_ND.split(4096)])


def nearest_class(images: Gaussian, prompts_CTD: Gaussian, distance: Distance) -> Tensor:
    """Return the index of the class whose prompts are nearest on average, [N], in chunks of images."""
    shape = prompts_CTD.mean.shape[:2]
    prompts = Gaussian(prompts_CTD.mean.flatten(0, 1), prompts_CTD.logvar.flatten(0, 1))
    factors = distance.factors(images, prompts)
    if factors is None:
        parts = zip(images.mean.split(256), images.logvar.split(256), strict=True)
        score = (-distance.matrix(Gaussian(*part), prompts).unflatten(1, shape).mean(dim=2) for part in parts)
    else:  # the mean over prompts of a product with each is the product with their mean
        classifier_CE = factors.gallery_ME.unflatten(0, shape).mean(dim=1)
        offset_C = 0 if factors.offset_M is None else factors.offset_M.unflatten(0, shape).mean(dim=1)
        score = (part @ classifier_CE.T - offset_C for part in factors.query_NE.split(4096))
    return torch.cat([top_k(score_nC, 1)[:, 0] for score_nC in score])


def accuracy(images_ND: Tensor, labels_N: Tensor, classifier_CD: Tensor) -> float:
    return (predict(images_ND, classifier_CD)[:, 0] == labels_N).double().mean().item()


def per_class_accuracy(prediction_N: Tensor, labels_N: Tensor, classes: int) -> Tensor:
    """Return the accuracy of each class, [C], nan for a class without images."""
    number_C = torch.bincount(labels_N, minlength=classes)
    return torch.bincount(labels_N[prediction_N == labels_N], minlength=classes) / number_C


def certain_weights(uncertainty_CT: Tensor, k_C: Tensor) -> Tensor:
    """Return 1 for the k_c most certain prompts of each class, else 0, [C, T]."""
    place_CT = uncertainty_CT.argsort(dim=1, stable=True).argsort(dim=1)
    return (place_CT < k_C[:, None]).float()


def best_ks(prompts_CTD: Gaussian, images_ND: Tensor, labels_N: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the best number of certain prompts for all classes alike, and for each class by itself, [C], on these
    images; and the share of the class's images that are then right, [C].

    For a class it is the K at which, K being the same for all classes, most of the class's images are right. Ties go
    to the larger K, and a class without images gets the K for all.
    """
    uncertainty_CT = prompts_CTD.uncertainty
    classes, most = uncertainty_CT.shape
    right_KC = torch.empty(most, classes, dtype=torch.double)
    overall_K = torch.empty(most, dtype=torch.double)
    for k in range(1, most + 1):
        weight_CT = certain_weights(uncertainty_CT, torch.full((classes,), k))
        prediction_N = predict(images_ND, weighted(prompts_CTD, weight_CT))[:, 0]
        right_KC[k - 1] = per_class_accuracy(prediction_N, labels_N, classes)
        overall_K[k - 1] = (prediction_N == labels_N).double().mean()
    k_all = most - int(overall_K.flip(0).argmax())
    k_C = most - right_KC.nan_to_num(-1.0).flip(0).argmax(dim=0)
    return k_all, torch.where(right_KC[0].isnan(), k_all, k_C), right_KC.amax(dim=0)


def zeroshot(
    images: Gaussian,
    labels: Sequence[int],
    prompts_CTD: Gaussian,
    one_prompt: int = 0,
    validation: tuple[Gaussian, Sequence[int]] | None = None,
    probabilistic: bool = True,
    distances: Iterable[str] | Mapping[str, Distance] | None = None,
) -> Iterator[Metric]:
    """Yield accuracies: by the mean, as in clip_benchmark, `one_prompt`, `all_prompts`, `all_prompts_top5` and
    `all_prompts_mean_per_class`; by each other distance than the cosine, `all_prompts` of the class with the smallest
    mean distance to its prompts; and with uncertainties:

    top_K_certain: the K most certain prompts of each class, for several K; none of them is chosen by this.
    top_K_chosen_on_validation, best_K_per_class: K for all, and a K for each class, chosen on the validation split.
    oracle_best_K_per_class: the same chosen on the test split itself, still one classifier.
    oracle_best_accuracy_per_class: each class at the K that is best for it, the others at that K too, averaged: no
        classifier does this. The published 41.82 on ImageNet chose on the test set in one of these two ways.
    certainty_weighted: prompts weighted by 1 / uncertainty.
    bprw, bprw_unlabelled: Bayesian prompt re-weighting (`bprw.py`) with ProLIP's two settings: by the first 5
        validation images of each class, and by the 10 test images that are nearest to the class.

    Arguments:
        prompts_CTD: a Gaussian with means and log-variances [C, T, D].
        one_prompt: the index of the prompt that is used alone.
        distances: names of registered distances, or distances by name; by default all that the model has, which is the
            cosine alone where it is not probabilistic.
    """
    if distances is None:
        distances = by_name() if probabilistic else ("cosine",)
    images_ND, labels_N = images.mean, torch.as_tensor(labels)
    classes, prompts = prompts_CTD.mean.shape[:2]
    ones_CT = torch.ones(classes, prompts)
    everything_CD = weighted(prompts_CTD, ones_CT)
    yield Metric("one_prompt", accuracy(images_ND, labels_N, prompts_CTD.mean[:, one_prompt]))
    top = predict(images_ND, everything_CD, min(5, classes))
    yield Metric("all_prompts", (top[:, 0] == labels_N).double().mean().item())
    if classes >= 5:
        yield Metric("all_prompts_top5", (top == labels_N[:, None]).any(dim=1).double().mean().item())
    yield Metric("all_prompts_mean_per_class", per_class_accuracy(top[:, 0], labels_N, classes).nanmean().item())
    for name, distance in by_name(distances).items():
        if name != "cosine":
            nearest_N = nearest_class(images, prompts_CTD, distance)
            yield Metric("all_prompts", (nearest_N == labels_N).double().mean().item(), name)
    if not probabilistic:
        return

    uncertainty_CT = prompts_CTD.uncertainty

    def by(weight_CT: Tensor) -> float:
        return accuracy(images_ND, labels_N, weighted(prompts_CTD, weight_CT))

    def by_ks(k_C: Tensor) -> float:
        return by(certain_weights(uncertainty_CT, k_C))

    for k in TOP_KS:
        if k < prompts:
            yield Metric(f"top_{k}_certain", by_ks(torch.full((classes,), k)))
    yield Metric("certainty_weighted", by(1 / uncertainty_CT))
    if validation is not None:
        known, known_labels = validation[0], torch.as_tensor(validation[1])
        k_all, k_C, _ = best_ks(prompts_CTD, known.mean, known_labels)
        yield Metric("top_K_chosen_on_validation", by_ks(torch.full((classes,), k_all)))
        yield Metric("best_K_per_class", by_ks(k_C))
        labelled = [(known_labels == c).nonzero()[:, 0] for c in range(classes)]
        weight_CT = prompt_weights(prompts_CTD, known, labelled, FEW_SHOT)
        yield Metric("bprw", accuracy(images_ND, labels_N, weighted_sum(prompts_CTD, weight_CT)))
    nearest_CN = top_k(everything_CD @ images_ND.T, NEIGHBOURS.images)
    weight_CT = prompt_weights(prompts_CTD, images, list(nearest_CN), NEIGHBOURS)
    yield Metric("bprw_unlabelled", accuracy(images_ND, labels_N, weighted_sum(prompts_CTD, weight_CT)))
    _, k_C, right_C = best_ks(prompts_CTD, images_ND, labels_N)
    yield Metric("oracle_best_K_per_class", by_ks(k_C))
    yield Metric("oracle_best_accuracy_per_class", right_C.nanmean().item())
