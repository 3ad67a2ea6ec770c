"""Images and captions in one plane, by t-SNE of their means.

How it must not be read: t-SNE keeps neighbours together, but neither distances nor the sizes of clusters, and in most
CLIPs the images lie apart from the captions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BACKGROUND = 400  # At most this many images are placed besides those that are shown.
PERPLEXITY = 30.0


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
