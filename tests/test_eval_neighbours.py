"""R-AUROC of URL and croppedHasBiggerUnc, against plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

from pcmepp_openclip import Gaussian
from pcmepp_openclip.encode.encode import centre_crop
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.neighbours import CROPS, crop_ratios, crops, nearest_other, neighbours


def case(n=70, classes=5, seed=0):
    """Images around a direction of their class, the uncertain ones far from it."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    centre, doubt = F.normalize(torch.randn(classes, 8, generator=g), dim=-1), torch.rand(n, 1, generator=g)
    mean = F.normalize(centre[labels] + 1.5 * doubt * torch.randn(n, 8, generator=g), dim=-1)
    return Gaussian(mean, (doubt + 0.1 * torch.rand(n, 1, generator=g)).log().expand(n, 8)), labels.tolist()


def slow_nearest_other(mean):
    found = []
    for i, own in enumerate(mean):
        others = [(float(own @ other), j) for j, other in enumerate(mean) if j != i]
        found.append(max(others)[1])
    return found


@pytest.mark.parametrize("chunk", [1, 300, 10**6])
def test_the_nearest_other_image(chunk):
    images, _ = case()
    index, cosine = nearest_other(images, chunk)
    expected = slow_nearest_other(images.mean)
    assert index.tolist() == expected
    assert torch.allclose(cosine, (images.mean * images.mean[expected]).sum(dim=1), atol=1e-6)


def test_r_auroc_against_a_loop():
    images, labels = case()
    right = [labels[j] == labels[i] for i, j in enumerate(slow_nearest_other(images.mean))]
    bank_N = images.mean[:, 0]
    got = as_dict(neighbours(images, labels, {"": images.uncertainty, "bank": bank_N}))
    assert got["images/neighbour_R@1/hits_of_all"] == pytest.approx(sum(right) / len(right)) and 0 < sum(right) < 70
    uncertainty = images.logvar.exp().sum(dim=1)
    assert got["images/neighbour_R@1/R-AUROC"] == pytest.approx(roc_auc_score(right, -uncertainty))
    assert got["images/neighbour_R@1/R-AUROC"] > 0.6
    assert "images/neighbour_R@1/max_cosine/R-AUROC" in got
    assert got["images/neighbour_R@1/bank/R-AUROC"] == pytest.approx(roc_auc_score(right, -bank_N))
    assert len(got) == 4 and len(as_dict(neighbours(images, labels, {}))) == 2


def test_the_same_image_twice_is_its_own_neighbour_and_no_image_is():
    images, labels = case(12)
    twice = Gaussian(torch.cat([images.mean, images.mean]), torch.cat([images.logvar, images.logvar]))
    index, cosine = nearest_other(twice)
    assert index.tolist() == [(i + 12) % 24 for i in range(24)] and torch.allclose(cosine, torch.ones(24))
    assert as_dict(neighbours(twice, labels + labels, {}))["images/neighbour_R@1/hits_of_all"] == 1


def test_of_equally_near_images_one_is_drawn():
    """All images at one point, of two classes in turn: as often right as by chance."""
    images = Gaussian(F.normalize(torch.ones(200, 4), dim=-1), torch.zeros(200, 4))
    got = as_dict(neighbours(images, [i % 2 for i in range(200)], {"": images.uncertainty}))
    assert 0.3 < got["images/neighbour_R@1/hits_of_all"] < 0.7
    assert got["images/neighbour_R@1/R-AUROC"] == 0.5


@pytest.mark.parametrize("labels", [[0] * 12, list(range(12)), [3]])
def test_without_right_or_wrong_neighbours_there_is_no_auroc(labels):
    images, _ = case(len(labels))
    got = as_dict(neighbours(images, labels, {"": images.uncertainty}))
    assert math.isnan(got["images/neighbour_R@1/R-AUROC"])
    expected = math.nan if len(labels) == 1 else float(labels == [0] * 12)
    assert got["images/neighbour_R@1/hits_of_all"] == pytest.approx(expected, nan_ok=True)


def test_crops():
    got = crops(torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 2, 2, 5]))
    assert as_dict([got]) == {"cropped_has_bigger_uncertainty": 0.5}
    ratios = crop_ratios(1000)
    assert ratios == crop_ratios(1000) and CROPS[0] <= min(ratios) < 0.12 and 0.73 < max(ratios) <= CROPS[1]


def test_a_crop_is_the_middle_at_the_size_of_the_whole():
    pixels = torch.zeros(3, 8, 8)
    pixels[:, 2:6, 2:6] = 1
    assert torch.allclose(centre_crop(pixels, 0.5), torch.ones(3, 8, 8))
    assert torch.equal(centre_crop(pixels, 1.0), pixels)
    assert centre_crop(pixels, 0.01).shape == (3, 8, 8)
