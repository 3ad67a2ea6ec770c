"""Three questions, each by numbers that say how well an estimator answers it, with intervals over photographs.

multiplicity   Spearman's correlation with the number of true matches among all of COCO's test photographs, for captions
               and for images, and for short texts with the number of photographs whose captions mention them; the
               median ratio of an estimate to the truth among those of the gallery
confusion      AUROC of misses against hits, and the correlation of R@1 with ten bins of the estimate
vagueness      Kendall's tau of captions from vague to exact, also among captions of equally many words; AUROC of
               blurred, covered and cropped images and of cut captions against whole ones
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcmepp_openclip import DISTANCES, Gaussian
from pcmepp_openclip.ambiguity.bank import IMAGES, TEXTS
from pcmepp_openclip.distances import Distance
from pcmepp_openclip.evaluation.uncertainty import auroc, bin_correlation, spearman
from pcmepp_openclip.evaluation.vagueness import kendall_tau

from .estimators import Estimator, Query
from .features import DEGRADED, Photos, TrueMatches
from .heads import Heads

SHORT = 2  # words of a short text
Numbers = Iterator[tuple[str, int, Callable[[Tensor], float]]]  # name, samples, and the value of some of the samples


@dataclass
class Encoded:
    """A split by a model: Gaussians of the images by view, of the captions, and of the cut captions."""

    photos: Photos
    views: dict[str, Gaussian]
    texts: Gaussian
    cut: Gaussian
    scale: float
    hits: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        images, texts = first_hits(self, DISTANCES["cosine"])
        self.hits = {IMAGES: images, TEXTS: texts}

    @property
    def images(self) -> Gaussian:
        return self.views["clean"]

    def query(self, of: str) -> Query:
        return Query(self.images, IMAGES) if of == IMAGES else Query(self.texts, TEXTS, self.photos.words)

    def gallery(self, of: str) -> Tensor:
        """Return the means of the items among which queries of this kind belong."""
        return self.texts.mean if of == IMAGES else self.images.mean


@torch.inference_mode()
def encode(heads: Heads, photos: Photos) -> Encoded:
    """Return a split by a model."""
    views = {name: heads.images(x) for name, x in photos.views.items()}
    return Encoded(photos, views, heads.texts(photos.texts), heads.texts(photos.cut), heads.scale.item())


def first_hits(data: Encoded, distance: Distance) -> tuple[Tensor, Tensor]:
    """Return whether each image, and each caption, finds its own first: [N] and [M] of 0 and 1."""
    own_M = data.photos.image_of_text
    by_image = distance.matrix(data.images, data.texts).argmin(dim=1)
    by_text = distance.transposed.matrix(data.texts, data.images).argmin(dim=1)
    return (own_M[by_image] == torch.arange(len(by_image))).float(), (by_text == own_M).float()


def resampled(samples: int, value: Callable[[Tensor], float], resamples: int) -> list[float]:
    """Return the value of all samples, and those of as many samples that are drawn with replacement."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(samples, (samples,), generator=generator) for _ in range(resamples)]
    return [value(rows) for rows in (torch.arange(samples), *draws)]


def short_texts(graded: Photos, photos: Photos) -> tuple[Tensor, Tensor]:
    """Return rows of different short captions of `graded`, and how many photographs have captions that mention each."""
    said = [" " + " | ".join(_words(photos.captions[i]) for i in own) + " " for own in photos.captions_of]
    rows = {_words(text): i for i, text in enumerate(graded.captions) if len(text.split()) <= SHORT}
    number = torch.tensor([sum(f" {text} " in own for own in said) for text in rows])
    return torch.tensor(list(rows.values()))[number > 0], number[number > 0]


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def multiplicity(estimator: Estimator, data: Encoded, true: list[TrueMatches]) -> Numbers:
    for known in true:
        value_N = estimator.score(data.query(known.of), data.gallery(known.of))
        if value_N is not None:
            name = "captions" if known.of == TEXTS else "images"
            yield from _against(name, value_N[known.rows], known.total, known.number, estimator.is_number)


def multiplicity_of_short(
    estimator: Estimator, graded: Encoded, data: Encoded, rows: Tensor, number: Tensor
) -> Numbers:
    """Yield the same of short texts, among the images of `data`."""
    texts = Gaussian(*(x[rows] for x in graded.texts))
    value_N = estimator.score(Query(texts, TEXTS, graded.photos.words[rows]), data.images.mean)
    if value_N is not None:
        yield from _against("short texts", value_N, number, number, estimator.is_number)


def _against(name: str, value_N: Tensor, order_N: Tensor, number_N: Tensor, is_number: bool) -> Numbers:
    yield name, len(value_N), lambda rows: spearman(value_N[rows], order_N[rows])
    if is_number:
        ratio_N = value_N.double() / number_N
        yield f"size, {name}", len(value_N), lambda rows: ratio_N[rows].median().item()


def confusion(estimator: Estimator, data: Encoded) -> Numbers:
    for of, name in ((IMAGES, "i2t"), (TEXTS, "t2i")):
        value_N, hit_N = estimator.score(data.query(of), data.gallery(of)), data.hits[of]
        if value_N is None:
            continue
        # Captions of an image are drawn together: the samples are images.
        rows_of = _captions if of == TEXTS else _themselves
        yield from _of_hits(name, value_N, hit_N, rows_of(data.photos), len(data.photos.count))


def _of_hits(name: str, value_N: Tensor, hit_N: Tensor, rows_of: Callable[[Tensor], Tensor], samples: int) -> Numbers:
    yield f"miss {name}", samples, lambda rows: auroc(-value_N[rows_of(rows)], hit_N[rows_of(rows)])
    yield f"bins {name}", samples, lambda rows: bin_correlation(value_N[rows_of(rows)], hit_N[rows_of(rows)])


def _themselves(_: Photos) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows


def _captions(photos: Photos) -> Callable[[Tensor], Tensor]:
    """Return images to their captions."""

    def of(rows: Tensor) -> Tensor:
        count = photos.count[rows]
        start = photos.first[rows] - (count.cumsum(0) - count)
        return start.repeat_interleave(count) + torch.arange(int(count.sum()))

    return of


def less_detail(estimator: Estimator, data: Encoded) -> Numbers:
    whole_N = estimator.score(data.query(IMAGES), data.texts.mean)
    for view in DEGRADED:
        less_N = estimator.score(Query(data.views[view], IMAGES), data.texts.mean)
        if whole_N is not None and less_N is not None:
            yield view, len(whole_N), _compare(whole_N, less_N)
    photos = data.photos
    whole_M = estimator.score(data.query(TEXTS), data.images.mean)
    cut_M = estimator.score(Query(data.cut, TEXTS, photos.cut_words), data.images.mean)
    assert whole_M is not None and cut_M is not None
    yield "cut", len(whole_M), _compare(whole_M, cut_M)
    yield (
        "cut, equal words",
        len(whole_M),
        lambda rows: _equal_words(
            torch.cat([whole_M[rows], cut_M[rows]]),
            torch.cat([torch.zeros(len(rows)), photos.is_cut[rows].float()]),
            torch.cat([photos.words[rows], photos.cut_words[rows]]),
        ),
    )


def _compare(whole_N: Tensor, less_N: Tensor) -> Callable[[Tensor], float]:
    """Return aUROC of what shows or says less against the whole."""
    return lambda rows: auroc(
        torch.cat([whole_N[rows], less_N[rows]]), torch.cat([torch.zeros(len(rows)), torch.ones(len(rows))])
    )


def _equal_words(value_N: Tensor, less_N: Tensor, words_N: Tensor) -> float:
    """Return aUROC among captions of the same number of words, all pairs together."""
    total = right = 0.0
    for count in words_N.unique():
        inside = words_N == count
        positives = int(less_N[inside].sum())
        pairs = positives * (int(inside.sum()) - positives)
        if pairs:
            total, right = total + pairs, right + pairs * auroc(value_N[inside], less_N[inside])
    return right / total if total else float("nan")


def graded_captions(estimator: Estimator, graded: Encoded) -> Numbers:
    value_M = estimator.score(graded.query(TEXTS), graded.images.mean)
    assert value_M is not None
    photos = graded.photos
    taus = torch.tensor([kendall_tau(-value_M[own]) for own in photos.captions_of], dtype=torch.double)
    yield "tau", len(taus), lambda rows: taus[rows].mean().item()
    level_M = torch.cat([torch.arange(int(count)) for count in photos.count])
    rows_of = _captions(photos)
    yield (
        "tau, equal words",
        len(taus),
        lambda rows: _equal_tau(-value_M[rows_of(rows)], level_M[rows_of(rows)], photos.words[rows_of(rows)]),
    )


def _equal_tau(value_M: Tensor, level_M: Tensor, words_M: Tensor) -> float:
    """Return (pairs in order - pairs in reverse order) / pairs, of captions of equal length and different levels."""
    total = right = 0.0
    for count in words_M.unique():
        value, level = value_M[words_M == count], level_M[words_M == count]
        later = level[:, None] > level
        total += later.sum().item()
        right += ((value[:, None] - value).sign() * later).sum().item()
    return right / total if total else float("nan")
