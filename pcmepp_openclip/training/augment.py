"""Augmentation of whole batches, between the loader and the step: mixed images and shortened captions.

Every batch has random numbers of its own, which follow from --seed, epoch, batch and rank, so that a resumed run draws
the same ones in the middle of an epoch. With --accum-freq, both forward passes see the same augmented batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import PCMEppCfg
from ..data.mixup import MODES, Mixing, mix_images
from ..data.plan import seed_for
from ..data.size_augment import TokenIds, augment_captions, cut_captions
from ..losses.terms import loss_weights, without_labels
from ..models.batches import LabelledImages
from ..system.flags import Flag, number
from ..system.text import flag_of

CROPPED, LONGEST = (0.05, 1.0), 4 / 3  # the share of the area that a crop keeps, and the ratio of its sides
MIXING = ("mix_share", "mix_mode", "mix_switch_prob")  # the flags that say how to mix


def _check_mixing(flag: str) -> Callable[[Any], str | None]:
    """Return the check of a flag that says how images are mixed."""

    def check(config: Any) -> str | None:
        if not (config.mixup or config.cutmix):
            return f"{flag} says how to mix images: give --mixup or --cutmix as well."
        if flag == "--mix-switch-prob" and not (config.mixup and config.cutmix):
            one = "--mixup" if config.mixup else "--cutmix"
            return f"--mix-switch-prob chooses between --mixup and --cutmix, and only {one} is given: give both."
        return None

    return check


def _check_cut_images(config: Any) -> str | None:
    if config.caption_cut:
        return None
    return "--cut-images crops the images of captions that are cut: give --caption-cut as well."


def set_defaults(config: Any) -> None:
    """Set the defaults of mixing if images are mixed; ValueError if the model cannot train by augmented batches."""
    mixes = [f"--{name}" for name in ("mixup", "cutmix") if getattr(config, name)]
    labelled = mixes or (["--multi-positives"] if config.multi_positives else [])
    used = labelled + [flag_of(name) for name in ("caption_augment", "caption_cut") if getattr(config, name)]
    if not used:
        return
    if config.pcmepp_cfg is None:
        raise ValueError(f"{used[0]} is for PCME++ models, and {config.model} is a plain one: choose a PCMEpp model.")
    if config.cache_tokens is not None:
        raise ValueError(f"{used[0]} changes samples in every epoch, and --cache-tokens keeps them: drop one of them.")
    if labelled:
        _check_loss(labelled[0], config.pcmepp_cfg)
    if mixes:
        if config.batch_size < 2:
            raise ValueError(f"{mixes[0]} mixes an image with another one of its batch: raise --batch-size to 2.")
        for name in MIXING:
            if getattr(config, name) is None and (name != "mix_switch_prob" or len(mixes) == 2):
                setattr(config, name, getattr(Mixing, name.removeprefix("mix_")))


def _check_loss(flag: str, pcmepp_cfg: dict) -> None:
    """Raise ValueError if a term of the loss takes no soft labels."""
    cfg = PCMEppCfg.parse(pcmepp_cfg)
    hard = without_labels(loss_weights(cfg.weights))
    if hard:
        change = [f"{flag_of(name)}-weight 0" for name in hard]
        if "contrastive" in hard and cfg.train_means_by == "contrastive":
            change.append("--train-means-by all")
        term = "InfoNCE" if hard[0] == "contrastive" else f"the loss term '{hard[0]}'"
        raise ValueError(f"{flag} gives pairs soft labels, which {term} does not take: add {' '.join(change)}.")


FLAGS = (
    *(
        Flag(f"--{way.lower()}", number(float, 0), f"mix images by {way}, w ~ Beta(ALPHA, ALPHA)", metavar="ALPHA")
        for way in ("Mixup", "CutMix")
    ),
    Flag(
        "--mix-share",
        number(float, above=0, most=1),
        f"share of images that are mixed (default: {Mixing.share})",
        check=_check_mixing("--mix-share"),
    ),
    Flag(
        "--mix-mode",
        None,
        f"'elem' mixes a share of every batch, 'batch' all images of a share of the batches (default: {Mixing.mode})",
        choices=MODES,
        check=_check_mixing("--mix-mode"),
    ),
    Flag(
        "--mix-switch-prob",
        number(float, 0, 1),
        f"probability of CutMix with both --mixup and --cutmix (default: {Mixing.switch_prob})",
        metavar="P",
        check=_check_mixing("--mix-switch-prob"),
    ),
    Flag(
        "--caption-augment",
        number(float, 0, 1),
        "mask, replace or delete each token of a caption with this probability",
        metavar="P",
    ),
    Flag(
        "--caption-cut",
        number(float, 0, 1),
        "cut each caption, with this probability, to a random run of its tokens",
        metavar="P",
    ),
    Flag(
        "--cut-images",
        bool,
        "with --caption-cut: crop the images of the captions that are cut, to 5 to 100 %% of their area",
        default=None,
        check=_check_cut_images,
    ),
)


class BatchAugmentation:
    """The augmentation of the batches of one rank: `augmentation(batch, epoch, index)` returns the changed batch.

    Arguments:
        config: all flags of the run.
        caption_ids: the special token ids of the tokenizer, needed with --caption-augment and --caption-cut.
    """

    def __init__(self, config: Any, caption_ids: TokenIds | None = None):
        self.config, self.caption_ids = config, caption_ids
        # Each image gets a seed that chooses which of its tokens are dropped in the tower.
        self.with_token_seeds = (config.pcmepp_cfg or {}).get("image_token_augment", 0) > 0
        self.mixing = None
        if config.mixup or config.cutmix:
            how = {name.removeprefix("mix_"): getattr(config, name) for name in MIXING}
            how = {name: value for name, value in how.items() if value is not None}
            self.mixing = Mixing(config.mixup or 0.0, config.cutmix or 0.0, **how)

    def __call__(self, batch: tuple[Any, Tensor], epoch: int, index: int) -> tuple[Tensor | LabelledImages, Tensor]:
        """Return the augmented batch, which the step takes.

        Arguments:
            batch: (images, texts). Images that are `LabelledImages` already keep their ids.
            index: the index of the batch in its epoch.
        """
        (images, texts), config = batch, self.config
        rng = np.random.Generator(np.random.PCG64(seed_for("augment", config.seed, epoch, index, config.rank)))
        if self.caption_ids is not None and config.caption_cut:
            share: float | Tensor = config.caption_cut
            if config.cut_images:
                is_cut_N = torch.from_numpy(rng.random(len(texts)) < config.caption_cut)
                share = is_cut_N.double()
                if isinstance(images, LabelledImages):
                    images = dataclasses.replace(images, image_NCHW=cropped(images.image_NCHW, is_cut_N, rng))
                else:
                    images = cropped(images, is_cut_N, rng)
            texts = cut_captions(texts, share, self.caption_ids, rng)
        if self.caption_ids is not None and config.caption_augment:
            texts = augment_captions(texts, config.caption_augment, self.caption_ids, rng)
        if self.mixing is None and not self.with_token_seeds:
            return images, texts
        out = images if isinstance(images, LabelledImages) else LabelledImages(images)
        if self.mixing is not None:
            ids = self._unique_ids(index, len(images)) if out.own_id_N is None else out.own_id_N
            pixels, partner_N, own_share_N = mix_images(out.image_NCHW, self.mixing, rng)
            out = LabelledImages(pixels, ids, ids[partner_N], own_share_N)
        if self.with_token_seeds:
            out.token_seed_N = torch.from_numpy(rng.integers(2**63, size=len(images)))
        return out, texts

    def _unique_ids(self, index: int, samples: int) -> Tensor:
        """Return ids that no other sample of the epoch has, on any rank."""
        first = (index * self.config.world_size + self.config.rank) * self.config.batch_size
        return torch.arange(first, first + samples)


def cropped(image_NCHW: Tensor, which_N: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images, some of them cropped to a random box and resized to what they were."""
    out, (height, width) = image_NCHW.clone(), image_NCHW.shape[2:]
    for i in which_N.nonzero()[:, 0].tolist():
        side = rng.uniform(*CROPPED) ** 0.5
        ratio = math.exp(rng.uniform(-math.log(LONGEST), math.log(LONGEST)) / 2)
        h, w = (min(size, max(1, round(size * side * by))) for size, by in ((height, ratio), (width, 1 / ratio)))
        top, left = (int(rng.integers(size - part + 1)) for size, part in ((height, h), (width, w)))
        box = image_NCHW[i : i + 1, :, top : top + h, left : left + w].float()
        out[i] = F.interpolate(box, (height, width), mode="bicubic", align_corners=False)[0].to(out.dtype)
    return out


def batch_augmentation(config: Any, tokenizer: Any) -> BatchAugmentation | None:
    """Return the augmentation of a run whose flags are checked and whose rank is known, or None if it has none."""
    from ..host.tokenizers import token_ids

    caption_ids = None
    if config.caption_augment or config.caption_cut:
        try:
            caption_ids = TokenIds(**token_ids(tokenizer))
        except ValueError as error:
            flag = "--caption-augment" if config.caption_augment else "--caption-cut"
            raise ValueError(f"{flag} cannot be used with {config.model}: {error}") from None
    augmentation = BatchAugmentation(config, caption_ids)
    if augmentation.mixing or caption_ids or augmentation.with_token_seeds:
        return augmentation
    return None
