"""Mixup and CutMix: a share of a batch's images is mixed with others of the same batch.

    Mixup     w x + (1 - w) x',  w ~ Beta(alpha, alpha)
    CutMix    x with a box of x' pasted over it; w is the share of x's pixels that are left

Captions are not mixed: the mixed image matches its own caption by w and that of its partner by 1 - w. All functions
leave their input as it is, and depend on nothing but their arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MODES = ("elem", "batch")


@dataclass(frozen=True)
class Mixing:
    """The settings of mixing images.

    Arguments:
        mixup, cutmix: alpha of Beta(alpha, alpha) for each; 0 switches one off.
        share: the share of images that are mixed.
        mode: "elem" mixes that share of every batch, each image with its own w and by its own choice of Mixup or
            CutMix; "batch" mixes every image of that share of the batches, all with the same w, choice and box.
        switch_prob: the probability of CutMix if both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    share: float = 0.25
    mode: str = "elem"
    switch_prob: float = 0.5

    @property
    def cutmix_prob(self) -> float:
        return self.switch_prob if self.mixup and self.cutmix else float(self.cutmix > 0)


class Mixed(NamedTuple):
    """A batch of images after mixing.

    Arguments:
        image_NCHW: the images.
        partner_N: int64, the index of the image that was mixed in; an image's own index if none was.
        own_share_N: w, fp32; 1 if no other image was mixed in.
    """

    image_NCHW: Tensor
    partner_N: Tensor
    own_share_N: Tensor


def mix_images(image_NCHW: Tensor, mixing: Mixing, rng: np.random.Generator) -> Mixed:
    """Mix some images of a batch of any size; a single image has no partner to be mixed with.

    The partner of image i is image (i + shift) mod N of the batch before mixing, with one random shift per batch:
    never the image itself.
    """
    (n, _, height, width), out_NCHW = image_NCHW.shape, image_NCHW.clone()
    partner_N, share_N = np.arange(n), np.ones(n)
    chosen = _chosen(n, mixing, rng) if n > 1 else partner_N[:0]
    if len(chosen):
        partner_N[chosen] = (chosen + rng.integers(1, n)) % n
        draws = len(chosen) if mixing.mode == "elem" else 1
        is_cutmix = rng.random(draws) < mixing.cutmix_prob
        alpha = np.where(is_cutmix, mixing.cutmix, mixing.mixup)
        share = rng.beta(alpha, alpha)
        boxes = cut_boxes(share, height, width, rng)
        for i, draw in zip(chosen, np.resize(np.arange(draws), len(chosen)), strict=True):
            own, partner = image_NCHW[i], image_NCHW[partner_N[i]]
            if is_cutmix[draw]:
                top, bottom, left, right = boxes[draw]
                out_NCHW[i, :, top:bottom, left:right] = partner[:, top:bottom, left:right]
                share_N[i] = 1 - (bottom - top) * (right - left) / (height * width)
            else:
                out_NCHW[i] = share[draw] * own + (1 - share[draw]) * partner
                share_N[i] = share[draw]
    return Mixed(out_NCHW, torch.from_numpy(partner_N), torch.from_numpy(share_N).float())


def cut_boxes(share: np.ndarray, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Return boxes (top, bottom, left, right), [..., 4], with an area of 1 - share and the proportions of the image.

    Each lies around a random pixel, and is cut at the borders of the image.
    """
    sides = []
    for size in (height, width):
        half = np.sqrt(1 - share) * size / 2
        centre = rng.integers(size, size=len(share))
        sides += [(centre - half).clip(0, size), (centre + half).clip(0, size)]
    return np.stack(sides, axis=-1).round().astype(int)


def _chosen(n: int, mixing: Mixing, rng: np.random.Generator) -> np.ndarray:
    """Return the indices of the images to mix.

    A share that is no whole number of images is rounded up or down at random, so that small batches have their share
    too.
    """
    if mixing.mode == "batch":
        return np.arange(n if rng.random() < mixing.share else 0)
    return rng.permutation(n)[: int(mixing.share * n + rng.random())]
