"""What validation says of the means alone, against a slow computation."""

import pytest
import torch
import torch.nn.functional as F

from pcmepp_openclip import Gaussian
from pcmepp_openclip.evaluation.metric import as_dict
from pcmepp_openclip.evaluation.retrieval import rankings
from pcmepp_openclip.training.validation import _of_means

N, SCALE = 30, 15.0


@pytest.fixture
def pairs():
    g = torch.Generator().manual_seed(0)
    shared = torch.randn(N, 6, generator=g)
    noise = torch.linspace(0.1, 2, N)[:, None]
    images, texts = (F.normalize(shared + noise * torch.randn(N, 6, generator=g), dim=-1) for _ in range(2))
    return tuple(Gaussian(mean, torch.randn(N, 6, generator=g) - 3) for mean in (images, texts))


def slow_auroc(query, gallery):
    """Return the AUROC of misses by the confusion; the gallery is also what hubness is measured against."""
    query, gallery = query.double(), gallery.double()
    hubness = [torch.stack([(SCALE * (q @ item)).exp() for q in query]).mean().log() for item in gallery]
    found = []
    for i in range(N):
        p = torch.stack([SCALE * (query[i] @ item) - h for item, h in zip(gallery, hubness, strict=True)]).softmax(0)
        hit = max(range(N), key=lambda j: query[i] @ gallery[j]) == i
        found.append((-(p * p).sum().item(), hit))
    hits, misses = ([confusion for confusion, hit in found if hit == wanted] for wanted in (True, False))
    assert len(hits) > 5 and len(misses) > 5
    return sum((miss > hit) + (miss == hit) / 2 for miss in misses for hit in hits) / len(misses) / len(hits)


def test_misses_by_the_means_alone(pairs):
    images, texts = pairs
    ranked = rankings(images, texts, range(N), distances=["cosine", "csd"])
    found = as_dict(_of_means(ranked, images, texts, (images.mean, texts.mean), SCALE))
    assert len(found) == 4 and "captions/csd_R@1/bank/miss_AUROC" in found
    assert found["images/cosine_R@1/bank/miss_AUROC"] == pytest.approx(slow_auroc(images.mean, texts.mean))
    assert found["captions/cosine_R@1/bank/miss_AUROC"] == pytest.approx(slow_auroc(texts.mean, images.mean))


def test_one_pair_has_no_bank(pairs):
    one = [Gaussian(x.mean[:1], x.logvar[:1]) for x in pairs]
    pair = one[0].mean, one[1].mean
    assert list(_of_means(rankings(*one, [0], distances=["cosine"]), *one, pair, SCALE)) == []
