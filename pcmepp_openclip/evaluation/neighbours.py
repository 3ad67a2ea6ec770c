"""Does an image's uncertainty say how far its embedding can be trusted? No text is involved.

R-AUROC of the URL benchmark: each image looks for its nearest *other* image by the cosine, and is right if that is of
its own class; the AUROC of -uncertainty against right or wrong. `neighbour_R@1` is the share that is right.

croppedHasBiggerUnc of the same benchmark: the share of images that are less uncertain than their own centre crop.

How it must not be read: R-AUROC compares models only together with R@1, which decides how hard the wrong cases are,
and papers report the mean over CUB-200, CARS-196 and SOP with classes that were not trained on; 0.5 is chance. A crop
may well show the one thing that matters, so the share of crops has no known best value; 0.5 is chance here too.

Reference: Kirchhof et al., "URL: A Representation Learning Benchmark for Transferable Uncertainty Estimates", 2023.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..gaussian import Gaussian
from .metric import Metric
from .retrieval import CHUNK, scores, tie_order, top_k
from .uncertainty import auroc

HIT = "neighbour_R@1"
CROPS = (0.1, 0.75)  # The sides of crops are in this range, as shares of the image's, as in the benchmark's code.


def nearest_other(images: Gaussian, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Return the index of each image's nearest other image by the cosine, [N], and that cosine, [N]; of several equally
    near ones the first in `tie_order`. It is exact, in chunks of the matrix."""
    order_N = tie_order(images)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    index, cosine = [], []
    for rows, score_nN in scores(images, images, "cosine", chunk):
        score_nN = score_nN.scatter(1, place_N[rows, None], -torch.inf)  # No image is its own neighbour.
        first_n1 = top_k(score_nN, 1)
        index.append(order_N[first_n1[:, 0]])
        cosine.append(score_nN.gather(1, first_n1)[:, 0])
    return torch.cat(index), torch.cat(cosine)


def neighbours(images: Gaussian, labels: Sequence[int], uncertainties: Mapping[str, Tensor]) -> Iterator[Metric]:
    """Yield `hits_of_all`, which is R@1, and `R-AUROC` of each -uncertainty and, as `max_cosine`, of the cosine with
    the neighbour; nan where there is but one image, or no neighbour is right, or all are.

    Arguments:
        images: Gaussians with l2-normalised means, [N, D].
        labels: the class of each, N of them.
        uncertainties: [N] each, by the `score` of `Metric`.
    """
    labels_N, hit_N, cosine_N = torch.as_tensor(labels), torch.zeros(0), torch.zeros(0)
    if len(labels) > 1:
        index_N, cosine_N = nearest_other(images)
        hit_N = (labels_N[index_N] == labels_N).float()
    yield Metric("hits_of_all", hit_N.double().mean().item(), samples="images", hit=HIT)
    confidences = {score: -values_N[: len(hit_N)] for score, values_N in uncertainties.items()}
    for score, values_N in {**confidences, "max_cosine": cosine_N}.items():
        value = auroc(values_N, hit_N)
        yield Metric("R-AUROC", value, samples="images", hit=HIT, score=score)


def crop_ratios(count: int) -> list[float]:
    """Draw the sides of the centre crops of `count` images, as shares of the image's, evenly and with a fixed seed."""
    low, high = CROPS
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    return (low + (high - low) * drawn).tolist()


def crops(uncertainty_N: Tensor, cropped_N: Tensor) -> Metric:
    """Return `cropped_has_bigger_uncertainty` of images and of their crops, see croppedHasBiggerUnc above: equal
    uncertainties do not count."""
    return Metric("cropped_has_bigger_uncertainty", (cropped_N > uncertainty_N).double().mean().item())
