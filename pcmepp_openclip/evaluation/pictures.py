"""The sections of a report in which one sees samples: uncertain and certain ones with what they find, images and
captions in one plane, and the curves of the run that trained the model."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.decode import decode_image
from ..distances import Distance
from ..gaussian import Gaussian
from ..reports import curves, plots
from ..reports.report import Plot, Row, Section, Thumbnail
from .pages import SHOWN, number, shown_scores
from .retrieval import nearest
from .tasks import CaptionedGaussians, QueryResults, TaskResult

FOUND = 4  # This many of the items that a sample finds are shown.
PAIR_COLOURS = ("#2a8c86", "#c8742c", "#7a68b3", "#b3456b", "#6b8e23", "#3a74c4", "#a8842c", "#5c6670")
BACKGROUND = 400  # At most this many images are placed in the plane besides those that are shown.
PERPLEXITY = 30.0
AREAS = (25.0, 420.0)  # The least and the most uncertain item have these areas, in square points.
EXAMPLES = """\
The number is the {label}. Beside each are the first {count} of the {size:,} {gallery} that it finds by the distance
{distance}; those that it is paired with, or that are known to fit, have a tick."""
PLANE = """\
{shown} images, drawn at random, with their captions, and {background} others in grey: a square is an image, a dot a
caption. An image and its captions have one colour and are joined by lines. {areas} t-SNE by the cosine of the means
keeps neighbours together; other distances in the plane mean nothing."""
AREAS_BY = "Areas grow with the {label}, from the least to the most uncertain of the images, and of the captions."
TRAINING = "From the history of the run that wrote the checkpoint. A pseudo-positive is nearer than a true pair."


def picture_sections(results: Sequence[TaskResult], count: int, tsne: int = 0, seed: int = 0) -> Iterator[Section]:
    """Yield the sections that show the samples of each task.

    Arguments:
        count: samples at each end of the uncertainty, 0 for none.
        tsne: images to show in the plane, 0 for no plane.
        seed: the seed of their choice.
    """
    for result in results:
        if tsne and result.encoded is not None:
            yield tsne_section(result, result.encoded, tsne, seed)
        for query in result.queries if count else ():
            for score in shown_scores(query):
                yield from _extremes(result, query, score, count)


def training_section(history: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """Yield the curves of the run, if there are any."""
    drawn = {"training-loss": curves.loss(history), "training-pseudo-positives": curves.pseudo_positives(history)}
    figures = [Plot(name, figure) for name, figure in drawn.items() if figure is not None]
    if figures:
        yield Section("Training", TRAINING, plots=figures)


def _extremes(result: TaskResult, query: QueryResults, score: str, count: int) -> Iterator[Section]:
    """Yield sections of the most, then of the least uncertain samples by one score; of equal captions the first."""
    uncertainty_N, by = query.uncertainties[score], " by the bank" if score == "bank" else ""
    captions = result.data.captions if query.samples == "captions" else None
    for end, indices in zip(("most", "least"), extremes(uncertainty_N, count, captions), strict=True):
        title = f"{result.name}: {end} uncertain {query.samples}{by}"
        if not indices:
            continue
        if result.encoded is None:
            yield Section(title, thumbnails=[_labelled(result, i, uncertainty_N[i].item()) for i in indices])
        else:
            text = ""
            if end == "most":
                gallery = "captions" if query.samples == "images" else "images"
                size, distance = len(getattr(result.encoded, gallery).mean), result.encoded.model.distance
                sizes = {"count": min(FOUND, size), "size": size}
                text = EXAMPLES.format(label=SHOWN[score], gallery=gallery, distance=distance, **sizes)
            yield Section(title, text, examples=list(_with_retrieved(result.encoded, query, indices, uncertainty_N)))


def _labelled(result: TaskResult, index: int, value: float) -> Thumbnail:
    """Return an image of a zero-shot folder with its uncertainty and its class."""
    data = result.data
    return Thumbnail(decode_image(data.images[index].read()), f"{number(value)}: {data.classes[data.labels[index]]}")


def _with_retrieved(
    encoded: CaptionedGaussians, query: QueryResults, indices: list[int], uncertainty_N: Tensor
) -> Iterator[Row]:
    """Yield rows of images with the captions that they find, or of captions with the images."""
    by_image, data, wanted = query.samples == "images", encoded.data, (encoded.model.distance, query.samples)
    measure = next(x.measure for x in encoded.rankings if (x.distance, x.samples) == wanted)
    sides = (encoded.images, encoded.captions)
    retrieved = retrieved_items(indices, *(sides if by_image else sides[::-1]), measure, FOUND)
    for i, items in zip(indices, retrieved, strict=True):
        value = number(uncertainty_N[i].item())
        if by_image:
            thumbnail = Thumbnail(decode_image(data.images[i].read()), value)
            yield Row(thumbnails=[thumbnail], lines=[_ticked(data.captions[j], encoded.fits(i, j)) for j in items])
        else:
            thumbnails = [
                Thumbnail(decode_image(data.images[j].read()), _ticked(str(rank), encoded.fits(j, i)))
                for rank, j in enumerate(items, start=1)
            ]
            yield Row(f"{value}: {data.captions[i]}", thumbnails)


def _ticked(text: str, fits: bool) -> str:
    return f"✓ {text}" if fits else text


def retrieved_items(
    indices: Sequence[int], query: Gaussian, gallery: Gaussian, distance: Distance, k: int
) -> list[list[int]]:
    """Return the indices of the `k` items that each of the queries at `indices` finds, nearest first.

    Arguments:
        query, gallery: all Gaussians, [N, D] and [M, D].
        distance: a distance, which is called with the queries first.
    """
    return torch.cat(list(nearest(query.select(indices), gallery, distance, k))).tolist()


def extremes(uncertainty_N: Tensor, count: int, keys: Sequence[Hashable] | None = None) -> tuple[list[int], list[int]]:
    """Return indices of the most uncertain samples, the most uncertain first, and of the least uncertain ones, the
    least uncertain first: `count` of each, fewer where there are not twice as many.

    Arguments:
        keys: the key of each sample; of samples with equal keys only the first counts.
    """
    kept = list(range(len(uncertainty_N)))
    if keys is not None:
        kept = sorted({key: i for i, key in reversed(list(enumerate(keys)))}.values())
    order = [kept[i] for i in uncertainty_N[kept].argsort(descending=True, stable=True).tolist()]
    return order[:count], order[count:][::-1][:count]


def tsne_section(result: TaskResult, encoded: CaptionedGaussians, count: int, seed: int) -> Section:
    data = encoded.data
    plane = place(encoded.images.mean, encoded.captions.mean, data.image_of_caption, count, seed)
    shown = {query.samples: shown_scores(query) for query in result.queries}
    areas_by = [
        query.uncertainties[shown[query.samples][0]] if shown[query.samples] else None for query in result.queries
    ]
    figure = draw_plane(plane, data.image_of_caption, *areas_by)
    by = AREAS_BY.format(label=SHOWN[shown["images"][0]]) if shown["images"] else ""
    text = PLANE.format(shown=plane.shown, background=len(plane.images) - plane.shown, areas=by)
    drawn = Plot(f"{result.task}-{result.name}-tsne", figure)
    return Section(f"{result.name}: images and captions in one plane", text, plots=[drawn])


@dataclass(frozen=True)
class Plane:
    """Places of images and captions in a plane.

    Arguments:
        images, captions: indices into the dataset; the captions are all of these images.
        shown: how many of the images are meant to be looked at, the first ones; the rest is background.
        image_I2, caption_J2: their places.
    """

    images: list[int]
    captions: list[int]
    shown: int
    image_I2: Tensor
    caption_J2: Tensor


def place(image_ND: Tensor, caption_MD: Tensor, image_of_caption: Sequence[int], shown: int, seed: int = 0) -> Plane:
    """Choose images and place them with their captions.

    Neighbours stay together, but neither distances nor the sizes of clusters mean anything, and in most CLIPs the
    images lie apart from the captions.

    Arguments:
        image_ND, caption_MD: l2-normalised means; t-SNE is by their cosine.
        image_of_caption: for each caption the index of its image.
        shown: how many images to show, all if there are fewer.
        seed: the seed of the choice and of t-SNE.
    """
    from sklearn.manifold import TSNE  # scikit-learn comes with an extra

    order = torch.randperm(len(image_ND), generator=torch.Generator().manual_seed(seed)).tolist()
    images = order[: shown + BACKGROUND]
    chosen = set(images)
    captions = [j for j, i in enumerate(image_of_caption) if i in chosen]
    mean_KD = torch.cat([image_ND[images], caption_MD[captions]]).float()
    perplexity = min(PERPLEXITY, (len(mean_KD) - 1) / 3)
    settings = {"perplexity": perplexity, "metric": "cosine", "init": "random", "random_state": seed}
    place_K2 = torch.from_numpy(TSNE(**settings).fit_transform(mean_KD.numpy()))
    return Plane(images, captions, min(shown, len(images)), *place_K2.split([len(images), len(captions)]))


def draw_plane(plane: Plane, image_of_caption: Sequence[int], image_N: Tensor | None, caption_M: Tensor | None) -> Any:
    """Return a matplotlib figure of the plane.

    Arguments:
        image_of_caption: for each caption of the dataset the index of its image.
        image_N, caption_M: uncertainties of all images and captions, or None: then all areas are equal.
    """
    figure, axes = plots.new(size=(6.4, 6.0))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    shown = plane.images[: plane.shown]
    captions = {i: [j for j, k in enumerate(plane.captions) if image_of_caption[k] == i] for i in shown}
    background = [j for j, k in enumerate(plane.captions) if image_of_caption[k] not in captions]
    axes.scatter(*plane.image_I2[plane.shown :].T, marker="s", s=9, color=plots.INK, alpha=0.25, linewidths=0)
    axes.scatter(*plane.caption_J2[background].T, s=5, color=plots.INK, alpha=0.25, linewidths=0)
    drawn = [j for i in shown for j in captions[i]]
    image_area_I, caption_area_J = areas(image_N, shown), areas(caption_M, [plane.captions[j] for j in drawn])
    area_of = dict(zip(drawn, caption_area_J, strict=True))
    for n, i in enumerate(shown):
        colour, at_2 = PAIR_COLOURS[n % len(PAIR_COLOURS)], plane.image_I2[n]
        for j in captions[i]:
            axes.plot(*torch.stack([at_2, plane.caption_J2[j]]).T, color=colour, linewidth=0.7, alpha=0.6, zorder=2)
        look = {"facecolors": colour, "edgecolors": colour, "alpha": 0.6, "zorder": 3}
        axes.scatter(*plane.caption_J2[captions[i]].T, s=[area_of[j] for j in captions[i]], **look)
        axes.scatter(*at_2, marker="s", s=image_area_I[n], **look)
    _add_legend(axes, PAIR_COLOURS[0], by_uncertainty=image_N is not None or caption_M is not None)
    return figure


def _add_legend(axes: Any, colour: str, by_uncertainty: bool) -> None:
    """Add a legend below the plane, for the PNG file, which has no caption."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 0}
    entries = {
        "image": Line2D([], [], marker="s", color=colour, **look),
        "its captions": Line2D([], [], marker="o", color=colour, **look),
        "others": Line2D([], [], marker="s", markersize=3, color=plots.INK, alpha=0.4, **look),
    }
    if by_uncertainty:
        entries["larger: more uncertain"] = Line2D([], [], linestyle="none")
    axes.legend(entries.values(), entries.keys(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, frameon=False)


def areas(uncertainty_N: Tensor | None, indices: Sequence[int]) -> list[float]:
    """Return the areas of the items at `indices`: linear in the uncertainty, between both ends of `AREAS`."""
    least, most = AREAS
    if uncertainty_N is None:
        return [(least + most) / 4] * len(indices)
    value_n = uncertainty_N[list(indices)].double()
    share_n = (value_n - value_n.min()) / (value_n.max() - value_n.min()).clamp(min=1e-12)
    return (least + (most - least) * share_n).tolist()
